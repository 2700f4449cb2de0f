"""Reconstruction reward: how well what was executed matches what was imagined.  Frames in, one number per decision out.

The actor learner feeds it imagined frames (the behaviour pair's world model) and codec-round-tripped executed frames,
and adds the result to the success reward.  The distance is a `types.Reward`; this file owns the shaping.  Both sides
go through the codec so that its own error is not charged to the actor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from wamrl_ray.types import Reward


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What the actor is paid for.  The paper (WAM-RL, arXiv 2606.17906) names the metric only; the rest is ours."""

    kind: Literal["pixel"] = "pixel"
    "metric between imagined and executed frames; pixel MSE was the best of the paper's ablation (21 % on Water Plants)"
    shaping: Literal["progress", "negative", "exp"] = "progress"
    "progress pays nothing for standing still; a bare negative distance pays for imagining and doing nothing"
    epsilon: float = 1e-4
    "progress: least imagined change (in the metric) that is scored; below it the ratio of two noises is meaningless. "
    "1e-4 as an MSE is 1 % of the value range over the whole image, about the size of rounding plus codec error"
    tau: float = 0.01
    "exp: distance at which the reward has fallen to 1/e; 0.01 = 10 % RMS error"
    weight: float = 0.2
    "of the reconstruction reward; 0 trains on success alone.  On reach, training on it alone (success_weight 0) "
    "lowered success from 433 to 277 of 1200: what is foreseen best is not what succeeds.  Beside success, 1 and 0.2 "
    "gave 551 and 562, which chance may explain"
    success_weight: float = 5.0
    "added once, at the decision in which the task succeeds; 0 reproduces the paper.  Success ends the episode and so "
    "gives up the reconstruction reward of the decisions that would have followed (at most `weight` each, in practice "
    "a fraction of it): it has to pay more than they do.  5 is also what RLinf's Wan recipe multiplies success by"
    success_form: Literal["best_so_far", "difference"] = "best_so_far"
    "best_so_far: paid once, at the first success; difference: of being successful after a decision and before it, "
    "which takes back what a success that does not last had earned (an episode's sum telescopes)"
    imagine_steps: int = 1
    "Euler steps of the imagination, one pass of the world model each. One step draws the mean future, the nearest to "
    "what will happen; more draw a sharper sample of what could, with a larger distance (`docs/base-policies.md`)"

    def __post_init__(self) -> None:
        for name in ("epsilon", "tau"):
            if not getattr(self, name) > 0:
                raise ValueError(f"reward.{name} = {getattr(self, name)}: use a positive distance")
        for name in ("weight", "success_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"reward.{name} = {getattr(self, name)}: use a non-negative weight")
        if self.weight == 0 == self.success_weight:
            raise ValueError("reward.success_weight = 0: nothing is paid for, reward.weight is 0 too; use one of them")
        if self.imagine_steps < 1:
            raise ValueError(f"reward.imagine_steps = {self.imagine_steps}: use at least 1 step")
        if self.success_form not in ("best_so_far", "difference"):
            raise ValueError(f"reward.success_form = {self.success_form!r}: use 'best_so_far' or 'difference'")
        if self.kind != "pixel":
            raise ValueError(f"reward.kind = {self.kind!r}: use 'pixel'")
        if self.shaping not in ("progress", "negative", "exp"):
            raise ValueError(f"reward.shaping = {self.shaping!r}: use 'progress', 'negative' or 'exp'")


def shape(d_executed: Tensor, d_still: Tensor, d_moved: Tensor, config: RewardConfig) -> Tensor:
    """Distance -> reward, elementwise over any shape.

    `d_executed` = d(imagined, executed), `d_still` = d(imagined, now), `d_moved` = d(executed, now), where now is the
    frame at decision time.
    progress: clip(1 - d_executed / max(d_still, d_moved), -1, 1), 0 where d_still < epsilon; negative: -d_executed;
    exp: e^{-d_executed / tau}.
    The larger of the two movements is the scale because imaginations are timid: a world model trained on squared error
    shows the mean of what may happen.  Over d_still alone, the very motion it was trained on measured -0.9 on
    LIBERO-Object where standing still earns 0; over the larger one, +0.1 to +0.3.
    """
    match config.shaping:
        case "progress":
            scored = d_still >= config.epsilon
            scale = torch.maximum(d_still, d_moved)
            ratio = d_executed / torch.where(scored, scale, torch.ones_like(scale))
            return torch.where(scored, (1.0 - ratio).clamp(-1.0, 1.0), torch.zeros_like(ratio))
        case "negative":
            return -d_executed
        case "exp":
            return torch.exp(-d_executed / config.tau)


def decision_rewards(
    metric: Reward, imagined: Tensor, executed: Tensor, now: Tensor, reached: Tensor, config: RewardConfig
) -> Tensor:
    """Reconstruction reward of each decision, (T,) float32: the mean over its reached offsets, 0 where there is none.

    imagined, executed (T, F, V, h, w, 3) and now (T, V, h, w, 3) float in [0, 1], all codec-round-tripped; reached
    (T, F) bool says which offsets have an executed frame (`executed` may hold anything elsewhere).
    """
    if imagined.shape != executed.shape or now.shape != imagined[:, 0].shape or reached.shape != imagined.shape[:2]:
        raise ValueError(
            f"imagined {tuple(imagined.shape)}, executed {tuple(executed.shape)}, now {tuple(now.shape)}, "
            f"reached {tuple(reached.shape)}: expected (T, F, ...), (T, F, ...), (T, ...), (T, F)"
        )
    still = now[:, None].expand_as(imagined)
    rewards = torch.zeros(reached.shape, dtype=torch.float32, device=imagined.device)
    if bool(reached.any()):
        seen = imagined[reached].float()
        d_executed = metric.distance(seen, executed[reached].float())
        d_still = metric.distance(seen, still[reached].float())
        d_moved = metric.distance(executed[reached].float(), still[reached].float())
        rewards[reached] = shape(d_executed, d_still, d_moved, config)
    count = reached.sum(dim=1)
    return rewards.sum(dim=1) / count.clamp(min=1)

"""The actor learner's configuration: what all its algorithms share, and the unions of those that differ.

`actor_flow_sde.py` builds from it; each member of a union stands beside its implementation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from learners.advantages import GroupConfig
from learners.awr import AWRConfig
from learners.gae import GAEConfig
from learners.ppo import PPOConfig
from wamrl_ray.policy.flow_sde import SamplerConfig


@dataclass(frozen=True, kw_only=True)
class ActorFlowSDEConfig:
    """How the action expert is trained.  Defaults follow piRL (arXiv 2510.25889) unless a line says otherwise."""

    kind: Literal["actor_flow_sde"] = "actor_flow_sde"
    objective: PPOConfig | AWRConfig = field(default_factory=PPOConfig)
    advantage: GAEConfig | GroupConfig = field(default_factory=GAEConfig)
    lr: float = 5e-6
    "AdamW of the expert; 0 trains nothing and must give ratio 1 exactly.  Goes with the network's size: the tiny "
    "bases learn at 5e-5 and more"
    weight_decay: float = 0.0
    "ours: the KL to the base is the anchor; piRL uses 0.01"
    grad_clip: float = 1.0
    "largest global gradient norm of the expert"
    epochs: int = 2
    "passes over an iteration's decisions; between piRL's 4 (pi0) and 1 (pi0.5)"
    batch_size: int = 64
    "decisions per gradient step, at most: an update's decisions are split evenly"
    micro_batch: int = 64
    "decisions that go through the networks at once, at most; changes memory and speed, not the gradient"
    target_kl: float = 0.1
    "mean exact KL from the update's start (nats per decision) at which the rest of an update is skipped; 0 disables.  "
    "Ours: at 0.1 a fifth of the ratios lie outside 1 +- 0.5"
    kl_to_base: float = 0.01
    "weight of the exact transition KL to the base expert, nats per decision; ours, piRL has none that works"
    entropy_bonus: float = 0.0
    "weight of the transitions' entropy, nats per action entry; only Flow-Noise has one to change, piRL gives it 0.005"
    mask_unexecuted: bool = True
    "densities count only steps that ran: what a chunk had planned beyond the success that ended it earned nothing.  "
    "False counts the whole chunk, which is the exact density of its chain"
    behaviour_logprob: Literal["recomputed", "stored"] = "recomputed"
    "recomputed here at the weights of the pair that acted, in the update's own micro-batches; stored: the worker's, "
    "whose last digits differ, so that ratios start beside 1"
    reuse_context: bool = True
    "keep every decision's features for the whole update; False computes them at every use, with the same bits, for "
    "policies whose features do not fit into memory"
    precision: Literal["fp32", "bf16"] = "fp32"
    "of the networks; densities, losses and weights are float32 either way"
    lora_rank: int = 0
    "train low-rank additions to the expert's matrices; 0 trains all of it, as piRL does"
    lora_scale: float = 1.0
    "factor of the additions, alpha / rank of other libraries"
    remember_pairs: int = 4
    "behaviour pairs whose weights are kept for recomputing log-probs; at least the staleness allowed + 1"
    max_bad_updates: int = 5
    "non-finite losses or gradients in a row after which the learner gives up with an error"

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "target_kl", "kl_to_base", "entropy_bonus", "lora_rank"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"actor_learner.{name} = {getattr(self, name)}: use 0 or a positive number")
        for name in ("epochs", "batch_size", "micro_batch", "remember_pairs", "max_bad_updates"):
            if getattr(self, name) < 1:
                raise ValueError(f"actor_learner.{name} = {getattr(self, name)}: use at least 1")
        for name in ("grad_clip", "lora_scale"):
            if not getattr(self, name) > 0:
                raise ValueError(f"actor_learner.{name} = {getattr(self, name)}: use a positive number")
        if self.behaviour_logprob not in ("recomputed", "stored"):
            raise ValueError(
                f"actor_learner.behaviour_logprob = {self.behaviour_logprob!r}: use 'recomputed' or 'stored'"
            )
        if self.behaviour_logprob == "stored" and self.mask_unexecuted:
            raise ValueError(
                "actor_learner.mask_unexecuted = True: workers store the density of whole chunks; use False with "
                "behaviour_logprob = 'stored'"
            )

    def check_sampler(self, sampler: SamplerConfig) -> None:
        """Raise ValueError where these settings ask for what the sampler does not give."""
        if not sampler.explores:
            raise ValueError("sampler.eta = 0: the ODE has no density to train on, use a positive scale such as 0.5")
        if self.entropy_bonus > 0 and not sampler.learned_std:
            raise ValueError(
                f"actor_learner.entropy_bonus = {self.entropy_bonus}: Flow-SDE's entropy is a constant; use 0, or "
                "sampler.noise = 'flow_noise'"
            )
        if self.behaviour_logprob == "stored" and sampler.stochastic_steps > 1:
            raise ValueError(
                "actor_learner.behaviour_logprob = 'stored': workers store one number per decision; use 'recomputed', "
                "or sampler.stochastic = 'one'"
            )

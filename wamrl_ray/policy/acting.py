"""Acting: from observations to executed actions and the chain of iterates that led to them.

`WAM.decide` asks one question at a time; a pool that runs many cheap environments in one process asks them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from wamrl_ray.policy import flow_sde
from wamrl_ray.types import Decision

if TYPE_CHECKING:
    from wamrl_ray.policy.wam import WAM


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a decision depends on, beside the weights.  rollout -> policy."""

    frames: NDArray[np.uint8]
    "(M, V, h, w, 3), oldest first"
    state: NDArray[np.float32]
    "(S,) env units"
    instruction: str
    action_seed: int
    world_seed: int
    stochastic: bool
    "explore, or follow the ODE"


@torch.inference_mode()
def decide_together(policy: WAM, questions: Sequence[Question]) -> list[Decision]:
    """One decision per question, in one pass of the networks.

    Each draws from its own seeds, but the last bits of a matrix product depend on its shape: the bits of a decision are
    a function of its question alone only where it is asked alone.
    """
    sampler, spec, device = policy.sampler, policy.spec, policy.device
    frames = torch.from_numpy(np.stack([q.frames for q in questions]))
    world_seed = [q.world_seed for q in questions]
    context = policy.world_context(policy.encode(frames, [q.instruction for q in questions]), world_seed)
    context = replace(context, keys_values=policy.expert.keys_values(context.features))
    state = torch.from_numpy(np.stack([q.state for q in questions]).astype(np.float32)).to(device)

    generators = [torch.Generator().manual_seed(q.action_seed) for q in questions]
    shape = (spec.horizon, spec.channels)
    x = torch.stack([torch.randn(shape, generator=g) for g in generators]).to(device)
    chosen = [
        flow_sde.draw_stochastic_step(g, sampler) if q.stochastic else -1
        for g, q in zip(generators, questions, strict=True)
    ]
    mask, chain, logprob = policy.executed_mask(), [x], torch.zeros(len(questions), device=device)
    for k, sigma in enumerate(flow_sde.sigma_grid(sampler.num_steps)[:-1]):
        prediction = policy(context, x, torch.full((len(x),), sigma, device=device), state)
        x_next = flow_sde.transition_mean(x, prediction.velocity, k, sampler.num_steps, 0.0)
        random = [sampler.explores and flow_sde.is_stochastic(step, k, sampler) for step in chosen]
        if any(random):
            mean, std = flow_sde.transition(x, prediction, k, sampler)
            noise = [
                torch.randn(shape, generator=g) if r else torch.zeros(shape)
                for g, r in zip(generators, random, strict=True)
            ]
            moved = torch.where(mask > 0, mean + std * torch.stack(noise).to(device), x_next)
            which = torch.tensor(random, device=device)
            x_next = torch.where(which[:, None, None], moved, x_next)
            logprob = logprob + which * flow_sde.gaussian_log_prob(x_next, mean, std, mask)
        x = x_next
        chain.append(x)
    actions = policy.normalizer.denormalize_action(x[:, : spec.executed, : spec.action_dim]).cpu().numpy()
    chains = torch.stack(chain, dim=1).cpu().numpy()
    made = zip(actions, chains, chosen, logprob.tolist(), world_seed, strict=True)
    return [
        Decision(actions=a, chain=c, stochastic_step=step, logprob=density, world_seed=seed)
        for a, c, step, density, seed in made
    ]

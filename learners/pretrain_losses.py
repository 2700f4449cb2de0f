"""The two losses of pretraining.  `pretrain_batch.Batch` in, a loss and its terms out.

Video: flow matching on the true future.  Action: flow matching on labelled action chunks through features at
sigma = 1.  On a GPU the networks run in bfloat16 by autocast; weights, targets and losses are float32 everywhere.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from learners.losses import flow_matching_mse
from learners.pretrain_batch import ActionTargets, Batch
from learners.pretrain_config import PretrainConfig
from wamrl_ray.policy.wam import WAM, Context


def mixed_precision(device: torch.device) -> torch.autocast:
    """bfloat16 on a GPU, nothing on a CPU.  bfloat16 has float32's range, so no loss scaling is needed."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def batch_loss(policy: WAM, batch: Batch, config: PretrainConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Scalar loss and its detached terms by metric name: still on the device, reading them would wait for it."""
    obs = policy.encode(batch.memory, batch.instruction)
    future = policy.encode_future(batch.future)
    at = batch.sigma.reshape(-1, 1, 1, 1, 1, 1)
    with mixed_precision(policy.device):
        out = policy.world_forward(obs, (1.0 - at) * future + at * batch.noise, batch.sigma)
    weight = policy.flow_weight(batch.sigma) / batch.still_error
    video = flow_matching_mse(out.velocity.float(), batch.noise, future, batch.seen, weight=weight)
    terms = {"pretrain/video_loss": video.detach()}
    if batch.actions is None:
        return video, terms
    action = action_loss(policy, policy.context_of(out.features), batch.actions, config)
    return action + config.video_weight * video, terms | {"pretrain/action_loss": action.detach()}


def action_loss(policy: WAM, context: Context, targets: ActionTargets, config: PretrainConfig) -> Tensor:
    """Masked flow-matching MSE over action and future-state channels, `draws` noise levels per window."""
    norm, r = policy.normalizer, config.draws
    clean = torch.cat(
        [norm.normalize_action(targets.action), norm.normalize_state(targets.next_state)], dim=-1
    ).repeat_interleave(r, 0)
    sigma, noise = targets.sigma, targets.noise
    x = (1.0 - sigma[:, None, None]) * clean + sigma[:, None, None] * noise
    state = targets.state.repeat_interleave(r, 0)
    with mixed_precision(policy.device):
        keys_values = tuple(
            (k.repeat_interleave(r, 0), v.repeat_interleave(r, 0))
            for k, v in policy.expert.keys_values(context.features)
        )
        velocity = policy.velocity(replace(context, keys_values=keys_values), x, sigma, state)
    weight = torch.ones(policy.spec.channels, device=x.device)
    weight[policy.spec.action_dim :] = config.state_weight
    weight = weight * targets.valid.repeat_interleave(r, 0)[:, :, None]
    return ((velocity.float() - (noise - clean)).square() * weight).sum() / weight.sum()

"""One batch of windows and every random draw its loss needs, on the policy's device.

    Windows, picks, generator ──► make_batch ──► Batch ──► `pretrain_losses.batch_loss`

Draws come from a CPU generator whatever the device, so that a step sees the same batch everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from learners.pretrain_config import PretrainConfig
from learners.windows import Windows
from wamrl_ray.policy.wam import WAM


@dataclass(frozen=True, kw_only=True)
class ActionTargets:
    """What the action loss compares with; R noise draws per window."""

    state: Tensor
    "(B, S)"
    action: Tensor
    "(B, H, A) env units"
    next_state: Tensor
    "(B, H, S)"
    valid: Tensor
    "(B, H)"
    sigma: Tensor
    "(B*R,) uniform noise levels"
    noise: Tensor
    "(B*R, H, D)"


@dataclass(frozen=True, kw_only=True)
class Batch:
    memory: Tensor
    "(B, M, V, h, w, 3) uint8, augmented"
    future: Tensor
    "(B, F, V, h, w, 3) uint8, augmented alike"
    seen: Tensor
    "(B, F)"
    instruction: tuple[str, ...]
    noise: Tensor
    "(B, V, F, gh, gw, C)"
    sigma: Tensor
    "(B,) of the video: 1 in an action step"
    still_error: float
    actions: ActionTargets | None
    "None in a video step"


def make_batch(
    policy: WAM, windows: Windows, picks: Tensor, generator: torch.Generator, config: PretrainConfig, *, action: bool
) -> Batch:
    """The windows `picks` (B,), on the CPU like `generator`, from which all randomness comes."""
    n, spec, device = len(picks), policy.spec, policy.device
    draws = torch.rand((n, 1, len(spec.views), 1, 1, 1), generator=generator)
    gain = (1.0 + config.brightness * (2.0 * draws - 1.0)).to(windows.device)
    shift = torch.randint(-config.shift, config.shift + 1, (2, n, len(spec.views)), generator=generator)
    latent = (len(spec.views), len(spec.imagined_offsets), *[policy.config.grid] * 2, policy.codec.channels)
    noise = torch.randn((n, *latent), generator=generator)
    sigma = torch.ones(n)
    if not action:
        uniform = torch.rand(n, generator=generator)
        sigma = torch.where(torch.rand(n, generator=generator) < config.sigma_one_share, sigma, uniform.clamp(min=0.02))
    at = picks.to(windows.device)

    def shown(index: Tensor) -> Tensor:
        moved = shift_images(windows.frames[index[at]], shift)
        return (moved.float() * gain).clamp(0, 255).to(torch.uint8).to(device)

    return Batch(
        memory=shown(windows.memory),
        future=shown(windows.future),
        seen=windows.seen[at].to(device),
        instruction=tuple(windows.instruction[i] for i in picks.tolist()),
        noise=noise.to(device),
        sigma=sigma.to(device),
        still_error=windows.still_error,
        actions=_action_targets(policy, windows, at, generator, config.draws) if action else None,
    )


def _action_targets(policy: WAM, windows: Windows, at: Tensor, generator: torch.Generator, draws: int) -> ActionTargets:
    rows, spec, device = len(at) * draws, policy.spec, policy.device
    sigma = torch.rand(rows, generator=generator)
    noise = torch.randn((rows, spec.horizon, spec.channels), generator=generator)
    return ActionTargets(
        state=windows.state[at].to(device),
        action=windows.action[at].to(device),
        next_state=windows.next_state[at].to(device),
        valid=windows.valid[at].to(device),
        sigma=sigma.to(device),
        noise=noise.to(device),
    )


def shift_images(frames: Tensor, shift: Tensor) -> Tensor:
    """Frames (B, F, V, h, w, 3), moved by integers (2, B, V) down and right; edges are repeated.  `shift` is on the
    CPU, so that looking whether it moves anything does not wait for the device."""
    if not shift.any():
        return frames
    height, width = frames.shape[3:5]
    device = frames.device
    rows = (torch.arange(height) - shift[0, :, :, None]).clamp(0, height - 1)[:, :, :, None].to(device)
    columns = (torch.arange(width) - shift[1, :, :, None]).clamp(0, width - 1)[:, :, None].to(device)
    batch = torch.arange(len(frames), device=device)[:, None, None, None]
    view = torch.arange(frames.shape[2], device=device)[None, :, None, None]
    return frames.transpose(1, 2)[batch, view, :, rows, columns].permute(0, 4, 1, 2, 3, 5)

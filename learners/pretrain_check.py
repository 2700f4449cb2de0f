"""How good the weights are on demonstrations they were not trained on: validation losses and imagined frames.

`pretrain` feeds it at every save; it feeds the metrics and, as `Imagined`, whoever draws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learners.pretrain_batch import make_batch
from learners.pretrain_config import PretrainConfig
from learners.pretrain_losses import batch_loss
from learners.windows import Windows
from wamrl_ray.policy.wam import WAM
from wamrl_ray.types import Metrics

SAMPLES = 8
"""imaginations shown, each of another instruction as far as there are so many"""
BATCHES = 4
"""batches of windows a validation is made on"""


@dataclass(frozen=True, kw_only=True)
class Imagined:
    """n windows at the last imagined offset, on the CPU.  Example (LIBERO): n 8, V 2, offset 8, 64 x 64 pixels."""

    instruction: tuple[str, ...]
    offset: int
    "env steps from the current frame to the other two"
    now: Tensor
    "(n, V, h, w, 3) float32 in [0, 1]"
    future: Tensor
    "the same, the true one"
    imagined: Tensor
    "the same, one denoising step from pure noise: the mean future"

    def errors(self) -> Metrics:
        """Mean pixel error of the imagined frame, over that of copying the current one; empty if nothing moved."""
        imagined, copied = (self.imagined - self.future).double(), (self.now - self.future).double()
        if not copied.any():
            return {}
        return {
            "pretrain/valid_imagined_to_copied_mse": float(imagined.square().mean() / copied.square().mean()),
            "pretrain/valid_imagined_to_copied_mae": float(imagined.abs().mean() / copied.abs().mean()),
        }


@torch.no_grad()
def validate(policy: WAM, windows: Windows, config: PretrainConfig, *, action: bool) -> tuple[Metrics, Imagined | None]:
    """Losses without augmentation, always on the same windows and noise, and imaginations of some; None if no window
    has its future."""
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(windows), (BATCHES * config.batch_size,), generator=generator)
    plain = replace(config, brightness=0.0, shift=0)
    _, terms = batch_loss(policy, make_batch(policy, windows, picks, generator, plain, action=action), plain)
    metrics = {name.replace("pretrain/", "pretrain/valid_"): float(value) for name, value in terms.items()}
    has_future = windows.seen[:, -1].cpu() > 0
    if not has_future.any():
        return metrics, None
    shown = sample_windows(windows, has_future)
    imagined = imagine(policy, windows, torch.cat([shown, picks[has_future[picks]]]))
    return metrics | imagined.errors(), _first(imagined, len(shown))


def sample_windows(windows: Windows, has_future: Tensor) -> Tensor:
    """The middle window of each instruction, up to SAMPLES; with fewer instructions, more of each."""
    of: dict[str, list[int]] = {}
    for i in has_future.nonzero().flatten().tolist():
        of.setdefault(windows.instruction[i], []).append(i)
    groups = list(of.values())[:SAMPLES]
    each = max(1, SAMPLES // len(groups))
    chosen = [group[len(group) * (2 * j + 1) // (2 * each)] for group in groups for j in range(each)]
    return torch.tensor(sorted(set(chosen)))


def imagine(policy: WAM, windows: Windows, picks: Tensor) -> Imagined:
    at = picks.to(windows.device)
    memory = windows.frames[windows.memory[at]].to(policy.device)
    instruction = tuple(windows.instruction[i] for i in picks.tolist())
    future = policy.imagine(policy.encode(memory, instruction), picks.tolist(), 1)[:, -1]
    return Imagined(
        instruction=instruction,
        offset=policy.spec.imagined_offsets[-1],
        now=policy.round_trip(memory[:, -1]).cpu(),
        future=policy.round_trip(windows.frames[windows.future[at, -1]]).cpu(),
        imagined=future.cpu(),
    )


def _first(imagined: Imagined, n: int) -> Imagined:
    return replace(
        imagined,
        instruction=imagined.instruction[:n],
        now=imagined.now[:n],
        future=imagined.future[:n],
        imagined=imagined.imagined[:n],
    )

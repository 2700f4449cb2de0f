"""AdamW with a clipped gradient and a guard against NaN.  Each learner owns one per trained part.

A non-finite loss or gradient changes nothing and is counted; after `max_bad` of them in a row the run ends with an
error, because weights that cannot be trained any more must not look like a plateau.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn


class GuardedAdamW:
    """`step(loss)` applies one gradient step, or skips it; state round-trips bit for bit.

    A batch too large for one pass goes in by parts, `accumulate` each, then `apply`.

    `name` appears in the error message.  betas (0.9, 0.95) as in piRL: a shorter second-moment memory suits targets
    that move with the policy.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        name: str,
        lr: float,
        weight_decay: float,
        grad_clip: float,
        max_bad: int,
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)
        self.name, self.grad_clip, self.max_bad = name, grad_clip, max_bad
        self.bad_in_a_row = 0
        self.skipped = 0
        self._loss = 0.0
        "of the step being accumulated"

    def step(self, loss: Tensor) -> float:
        """Backward, clip, update.  Returns the gradient norm before clipping, or -1 if the step was skipped.

        Raises RuntimeError after `max_bad` skips in a row.
        """
        self.accumulate(loss)
        return self.apply()

    def accumulate(self, loss: Tensor) -> None:
        """Add this loss's gradient to the coming step's; parts of one batch are given as parts of one sum."""
        self._loss += float(loss.detach())
        if math.isfinite(self._loss):
            loss.backward()  # type: ignore[no-untyped-call]

    def drop(self) -> None:
        """Forget what was accumulated."""
        self.optimizer.zero_grad(set_to_none=True)
        self._loss = 0.0

    def apply(self) -> float:
        """The step itself; returns and raises as `step` does."""
        loss, norm = self._loss, math.nan
        if math.isfinite(loss):
            norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.grad_clip))
        if not math.isfinite(norm):
            self.drop()
            self.bad_in_a_row += 1
            self.skipped += 1
            if self.bad_in_a_row >= self.max_bad:
                raise RuntimeError(
                    f"{self.name}: loss or gradient was not finite {self.bad_in_a_row} times in a row "
                    f"(last loss {loss}): lower the learning rate or resume from an earlier checkpoint"
                )
            return -1.0
        self.optimizer.step()
        self.drop()
        self.bad_in_a_row = 0
        return norm

    def state(self) -> dict[str, Any]:
        return {
            "optimizer": to_cpu(self.optimizer.state_dict()),
            "bad_in_a_row": self.bad_in_a_row,
            "skipped": self.skipped,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(to_cpu(state["optimizer"]))
        self.bad_in_a_row, self.skipped = int(state["bad_in_a_row"]), int(state["skipped"])


def autocast(device: torch.device, precision: Literal["fp32", "bf16"]) -> torch.autocast:
    """The networks' arithmetic; weights, targets, densities and losses stay float32.  bfloat16 has float32's range, so
    no loss scaling is needed."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def to_cpu(tree: Any) -> Any:
    """A copy of nested dicts, lists and tuples with every tensor detached, cloned and on the CPU."""
    if isinstance(tree, Tensor):
        return tree.detach().cpu().clone()
    if isinstance(tree, Mapping):
        return {key: to_cpu(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(to_cpu(value) for value in tree)
    return tree

"""Running means of an update's metrics.  The actor learner fills one per update."""

from __future__ import annotations

import torch
from torch import Tensor

from wamrl_ray.types import Metrics, finite


class Tally:
    """`add(name, values)` as often as needed; `means` is the mean over all values of each name."""

    def __init__(self) -> None:
        self._sum: dict[str, float] = {}
        self._count: dict[str, int] = {}

    def add(self, name: str, values: Tensor | float) -> None:
        """A number or a tensor of any shape; an empty tensor adds nothing."""
        values = torch.as_tensor(values).detach().double()
        if values.numel():
            self._sum[name] = self._sum.get(name, 0.0) + float(values.sum())
            self._count[name] = self._count.get(name, 0) + values.numel()

    def means(self) -> Metrics:
        """Raises ValueError on a non-finite mean."""
        return finite((name, total / self._count[name]) for name, total in self._sum.items())

"""The anchor of the world model: Gaussian KL of its features to the pretrained ones, and the weight it gets.

`VideoSFTLearner` feeds it features at sigma = 1, the ones the action expert reads, and gets one KL per layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from learners.losses import feature_kl, feature_variance
from learners.optim import to_cpu

FACTOR, RAISE_ABOVE, LOWER_BELOW = 2.0, 2 / 3, 1 / 3
"""by what an adapted weight changes at once, and the dead band within which it stays, as shares of the target"""


def adapted_weight(weight: float, drift: float, target: float, bounds: tuple[float, float]) -> float:
    """lambda_KL for the next update: doubled where drift > 2/3 target, halved where drift < 1/3 target, else kept.

    PPO's adaptive KL penalty (arXiv 1707.06347 section 4) with two departures.  The dead band is the target's middle
    third instead of [target / 1.5, 1.5 target]: the target is an upper limit here, and drift moves by a third from one
    update to the next.  And drift is the whole distance from the pretrained world, not that of one update, so the rule
    acts on what all updates together have done.
    """
    if drift > RAISE_ABOVE * target:
        weight *= FACTOR
    elif drift < LOWER_BELOW * target:
        weight /= FACTOR
    return min(max(weight, bounds[0]), bounds[1])


class FeatureAnchor:
    """Per-layer statistics.

    Reference covariance: diagonal, the mean of `feature_variance` over some batches of the pretrained world's features,
    fixed from then on.  Current covariance: diagonal, an EMA of the same estimate over training batches, from the
    reference's.  Both see batches of about the same size, so that the bias of a small batch cancels in their ratio.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.variance: list[Tensor] = []
        "s^2 per layer (width,)"
        self.reference_variance: list[Tensor] = []
        "s_ref^2 per layer (width,)"

    def calibrate(self, batches: Iterable[Sequence[Tensor]]) -> None:
        """Fix the reference covariance from the pretrained world's features, batches of L tensors (B, N, C)."""
        variances = [feature_variance(features) for features in batches]
        self.reference_variance = [torch.stack(layer).mean(dim=0) for layer in zip(*variances, strict=True)]
        self.variance = [layer.clone() for layer in self.reference_variance]

    def kl(self, features: Sequence[Tensor], reference: Sequence[Tensor]) -> list[Tensor]:
        """KL(current || reference) of each layer, scalars in nats per feature; moves the EMA first.

        Gradient flows through the means of `features` alone.
        """
        moved = zip(self.variance, feature_variance(features), strict=True)
        variance = [self._decay * old + (1.0 - self._decay) * new for old, new in moved]
        if all(bool(torch.isfinite(layer).all()) for layer in variance):
            self.variance = variance
        layers = zip(features, reference, self.variance, self.reference_variance, strict=True)
        return [feature_kl([mu], [mu_ref], [s2], [s2_ref]) for mu, mu_ref, s2, s2_ref in layers]

    def state(self) -> dict[str, Any]:
        return {"variance": to_cpu(self.variance), "reference_variance": to_cpu(self.reference_variance)}

    def load_state(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.variance = [layer.to(device) for layer in to_cpu(state["variance"])]
        self.reference_variance = [layer.to(device) for layer in to_cpu(state["reference_variance"])]

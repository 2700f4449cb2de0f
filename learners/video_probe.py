"""How far the world model has moved, measured on one fixed batch: from the pretrained world and from earlier versions.

`VideoSFTLearner` fixes the batch once and notes every exported world; metrics, the adapted KL weight and the broker's
gate read the drift.  Always float32, as acting is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from learners.losses import feature_kl, feature_variance
from learners.optim import to_cpu
from learners.video_batch import VideoBatch

if TYPE_CHECKING:
    from wamrl_ray.policy.wam import WAM


class DriftProbe:
    """Features of world versions on the probe batch.  Empty, and without drift, until `fix`."""

    def __init__(self, policy: WAM, versions: int) -> None:
        """`policy` holds the current world; `versions`: worlds remembered, the longest unused is forgotten."""
        self._policy, self._versions = policy, versions
        self.batch: dict[str, Any] | None = None
        "memory (P, M, V, h, w, 3) uint8, instruction (P strings), world_seed (P,)"
        self._reference: list[Tensor] = []
        "the pretrained world's features"
        self._features: dict[str, list[Tensor]] = {}
        "digest of a world -> its features, oldest first"

    def fix(self, batch: VideoBatch, world_seed: Tensor, reference: WAM) -> None:
        """Take this batch with this noise for good; the current world is the first to be remembered."""
        self.batch = {"memory": batch.memory, "instruction": list(batch.instruction), "world_seed": world_seed}
        self._reference = [layer.cpu() for layer in self._of(reference)]
        self.remember(self._policy.export("world").digest)

    def remember(self, digest: str) -> None:
        """Note the current world's features, so that drift from it can be measured later."""
        if self.batch is None:
            return
        self._features.pop(digest, None)
        self._features[digest] = [layer.cpu() for layer in self._of(self._policy)]
        while len(self._features) > self._versions:
            del self._features[next(iter(self._features))]

    def drift(self) -> float:
        """Mean feature KL(current world || pretrained world), nats per feature."""
        return self._from(self._reference)

    def drift_from(self, digest: str) -> float:
        """Mean feature KL(current world || world `digest`), nats per feature; 0 for the same digest.

        Both variances are the probe batch's own.  Raises ValueError if `digest` is not among the remembered versions.
        """
        if self._policy.export("world").digest == digest:
            return 0.0
        if digest not in self._features:
            known = ", ".join(self._features) or "none"
            raise ValueError(f"digest = {digest!r}: no remembered world ({known}); raise video_learner.probe_versions")
        self._features[digest] = self._features.pop(digest)  # asked for: forgotten last
        return self._from(self._features[digest])

    def state(self) -> dict[str, Any]:
        return {
            "batch": to_cpu(self.batch), "reference": to_cpu(self._reference), "features": to_cpu(self._features)
        }  # fmt: skip

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.batch, self._reference = to_cpu(state["batch"]), to_cpu(state["reference"])
        self._features = to_cpu(state["features"])

    def _from(self, then: list[Tensor]) -> float:
        now, earlier = self._of(self._policy), [layer.to(self._policy.device) for layer in then]
        return float(feature_kl(now, earlier, feature_variance(now), feature_variance(earlier)))

    @torch.no_grad()
    def _of(self, wam: WAM) -> list[Tensor]:
        assert self.batch is not None, "fix() comes first"
        obs = wam.encode(self.batch["memory"], self.batch["instruction"])
        return list(wam.world_context(obs, self.batch["world_seed"]).features)

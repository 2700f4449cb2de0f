"""Settings of the video learner.  `wamrl_ray.config` joins them to a run's; `video_sft` and the loop read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class PretrainingReplayConfig:
    """Demonstrations among the training windows, so that what few successes do not show is not forgotten."""

    path: str = ""
    "folder or uncompressed tar file that `wamrl collect` wrote, seen by the learner's machine; empty: none"
    share: float = 0.25
    "of each batch's windows, rounded down to whole windows"
    per_task: int = 20
    "demonstrations loaded of each task, the first in the order of their names: they stay in memory for the whole run"

    def __post_init__(self) -> None:
        _check_share("video_learner.pretraining.share", self.share)
        if self.per_task < 1:
            raise ValueError(f"video_learner.pretraining.per_task = {self.per_task}: use at least 1")


# ------------------------------------------------------------------------------------------------ failed episodes


@dataclass(frozen=True, kw_only=True)
class SuccessOnly:
    """The world is trained on successes alone (the paper, arXiv 2606.17906)."""

    kind: Literal["success_only"] = "success_only"

    @property
    def share(self) -> float:
        return 0.0

    @property
    def per_pair(self) -> int:
        return 0

    @property
    def per_start(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class FailureQuota:
    """How many failed episodes, and of whom.  Many failures of one policy or one start are volume without diversity."""

    share: float = 0.25
    "of each batch's windows, rounded down; none while no failure is stored, and no update without a success"
    per_pair: int = 4
    "most failed episodes kept of one behaviour pair; the later ones are dropped and counted"
    per_start: int = 2
    "most failed episodes kept of one (task, initial state); the oldest of that start leaves and is counted"

    def __post_init__(self) -> None:
        _check_share("video_learner.failures.share", self.share)
        for name in ("per_pair", "per_start"):
            if getattr(self, name) < 1:
                raise ValueError(f"video_learner.failures.{name} = {getattr(self, name)}: use at least 1")


@dataclass(frozen=True, kw_only=True)
class Mixed(FailureQuota):
    """Failures are windows like any other."""

    kind: Literal["mixed"] = "mixed"


@dataclass(frozen=True, kw_only=True)
class OutcomeConditioned(FailureQuota):
    """Failures are marked by a learned vector on every token; without it the world imagines success, as acting does."""

    kind: Literal["outcome_conditioned"] = "outcome_conditioned"


Failures = SuccessOnly | Mixed | OutcomeConditioned


# ------------------------------------------------------------------------------------------------ the learner


@dataclass(frozen=True, kw_only=True)
class VideoSFTConfig:
    """How the world model is fine-tuned.  The paper (arXiv 2606.17906) gives the loss and none of these numbers."""

    kind: Literal["video_sft"] = "video_sft"
    lr: float = 2e-5
    "AdamW; a tenth of a usual pretraining rate, because the base already predicts well; 0 trains nothing"
    weight_decay: float = 0.0
    "none: the feature KL is the anchor, and at lr = 0 nothing may move"
    batch_size: int = 16
    "windows (decision, its imagined future) per gradient step"
    steps_per_update: int = 8
    "gradient steps per update: one pass over some ten successful LIBERO-Object episodes of 14 decisions"
    precision: Literal["fp32", "bf16"] = "fp32"
    "of the networks' passes in training (autocast); weights, losses, drift and held-out error are fp32 either way"
    kl_weight: float = 0.1
    "lambda_KL; the KL is a mean per feature in nats, so 0.1 makes a drift of one reference std (0.5 nat) cost 0.05, "
    "of the order of the flow-matching loss of a trained base; where it is adapted, its first value"
    kl_target: float = 0.0
    "0: lambda_KL is constant; else nats of drift from the pretrained world that it is adapted to (`adapted_weight`)"
    kl_weight_range: tuple[float, float] = (1e-3, 1e3)
    "bounds of the adapted lambda_KL: narrow enough to come back within some ten updates"
    ema_decay: float = 0.99
    "of the current features' variance s^2: a memory of some 100 batches"
    calibration_batches: int = 8
    "batches over which the reference variance is averaged, once; each has as many windows as the KL sees in a step"
    grad_clip: float = 1.0
    "largest global gradient norm, as in pretraining"
    sigma_one_share: float = 0.5
    "share of each batch trained at sigma = 1, the only noise level whose features the action expert reads; the KL is "
    "taken on these rows, of which there is always one"
    sigma_min: float = 0.2
    "the other rows are uniform in [sigma_min, 1]; an imagination in 4 steps visits nothing below 0.25"
    replay: float = 0.5
    "share of successful episodes drawn from earlier stored ones, the rest from this iteration's; read by whoever "
    "picks the episodes (the training loop), so that few new successes do not wash out the old ones"
    balance_tasks: bool = True
    "each task gets an equal share of the windows drawn, however many successes it has; False: in proportion"
    pretraining: PretrainingReplayConfig = field(default_factory=PretrainingReplayConfig)
    failures: Failures = field(default_factory=SuccessOnly)
    held_out_share: float = 0.1
    "of the training starts (task, initial state), never trained on: the prediction error is measured there; 0: none"
    held_out_windows: int = 32
    "kept for that, at most 4 of one start; once full they stay the same for the rest of the run"
    max_bad_updates: int = 5
    "non-finite losses or gradients in a row after which the learner gives up with an error"
    probe_windows: int = 8
    "size of the fixed batch on which drift between world versions is measured"
    probe_versions: int = 6
    "worlds whose probe features are remembered, the longest unused is forgotten; a run asks for up to 4 at a time"

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "kl_weight", "kl_target"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"video_learner.{name} = {getattr(self, name)}: use 0 or a positive number")
        counts = ("batch_size", "steps_per_update", "calibration_batches", "held_out_windows", "max_bad_updates")
        for name in (*counts, "probe_windows", "probe_versions"):
            if getattr(self, name) < 1:
                raise ValueError(f"video_learner.{name} = {getattr(self, name)}: use at least 1")
        for name in ("sigma_one_share", "sigma_min", "replay"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"video_learner.{name} = {getattr(self, name)}: use a share between 0 and 1")
        for name in ("ema_decay", "held_out_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"video_learner.{name} = {getattr(self, name)}: use a number in [0, 1)")
        if not self.grad_clip > 0:
            raise ValueError(f"video_learner.grad_clip = {self.grad_clip}: use a positive norm")
        self._check_adaptation()
        shares = self.failures.share + (self.pretraining.share if self.pretraining.path else 0.0)
        if shares >= 1:
            raise ValueError(
                f"video_learner.failures.share = {self.failures.share}: with pretraining.share = "
                f"{self.pretraining.share} nothing is left for successes; use shares whose sum is below 1"
            )

    def _check_adaptation(self) -> None:
        low, high = self.kl_weight_range
        if not 0 < low <= high:
            raise ValueError(f"video_learner.kl_weight_range = {self.kl_weight_range}: use two numbers 0 < low <= high")
        if self.kl_target > 0 and not low <= self.kl_weight <= high:
            raise ValueError(
                f"video_learner.kl_weight = {self.kl_weight}: with kl_target = {self.kl_target} it is adapted within "
                f"kl_weight_range = {self.kl_weight_range}; start inside"
            )

    @property
    def anchored_rows(self) -> int:
        """Rows of a batch trained at sigma = 1."""
        return max(round(self.sigma_one_share * self.batch_size), 1)


def _check_share(name: str, share: float) -> None:
    if not 0 < share < 1:
        raise ValueError(f"{name} = {share}: use a share between 0 and 1, without either")

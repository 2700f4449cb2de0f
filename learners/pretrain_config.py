"""The recipe of a pretraining: what its weights are a function of, beside data and code.  CLI -> `pretrain`."""

from __future__ import annotations

from dataclasses import dataclass, field

from wamrl_ray.policy.wam import WAMConfig

CHANGEABLE = ("log_every", "save_every", "threads")
"""fields a resumed training may change: they say how it runs, not what it learns"""


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    policy: WAMConfig = field(default_factory=WAMConfig)
    "architecture; `--init BASE` brings its own"
    seed: int = 0
    video_steps: int = 300
    action_steps: int = 5700
    batch_size: int = 32
    draws: int = 3
    "noise draws of the action loss per context: the expert is cheap beside the world pass whose features they share"
    lr: float = 1e-3
    warmup_steps: int = 200
    final_lr_share: float = 0.05
    "cosine decay of both stages together, to this share of lr"
    weight_decay: float = 1e-4
    grad_clip: float = 1.0
    ema_decay: float = 0.998
    "of the weights that are saved as the base"
    sigma_one_share: float = 0.5
    video_weight: float = 0.2
    "of the video loss at sigma = 1 in the action stage; 1 is what copying the newest frame would cost"
    video_every: int = 4
    "every n-th step of the action stage is a step of the video stage, else the other noise levels, which imagining "
    "needs, are forgotten"
    state_weight: float = 0.1
    "of the future-state channels beside the action channels"
    brightness: float = 0.1
    "random brightness factor 1 +- this, one per window and view"
    shift: int = 0
    "random shift of up to so many pixels each way, one per window and view, edges repeated: for precision that does "
    "not hang on single pixels (DrQ, arXiv 2004.13649)"
    held_out_every: int = 10
    "every n-th demonstration of a folder is kept for validation"
    save_every: int = 250
    "steps between saves of state and base, each with a validation"
    log_every: int = 10
    "steps a training metric is averaged over"
    threads: int = 1
    "CPU threads; the weights' last bits may depend on it"

    def __post_init__(self) -> None:
        least = {
            "seed": 0, "video_steps": 0, "action_steps": 0, "batch_size": 1, "draws": 1, "warmup_steps": 1,
            "video_every": 1, "shift": 0, "held_out_every": 2, "save_every": 1, "log_every": 1, "threads": 1,
            "weight_decay": 0, "video_weight": 0, "state_weight": 0,
        }  # fmt: skip
        for name, low in least.items():
            if not getattr(self, name) >= low:
                raise ValueError(f"{name} = {getattr(self, name)}: use at least {low}")
        for name in ("lr", "grad_clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}: use a positive number")
        for name in ("final_lr_share", "ema_decay", "sigma_one_share", "brightness"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)}: use a number from 0 to 1")

    @property
    def total_steps(self) -> int:
        return self.video_steps + self.action_steps

    def trains_action(self, step: int) -> bool:
        """Whether this step takes the action loss."""
        return step >= self.video_steps and (step + 1) % self.video_every != 0

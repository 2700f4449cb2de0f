"""The demonstrations that the video learner replays.  Both shells load them for the learner, `preflight` checks them.

    video_learner.pretraining ──► Selection ──► Windows ──► VideoSFTLearner
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from wamrl_ray.demonstrations_select import Selection

if TYPE_CHECKING:
    from learners.video_config import PretrainingReplayConfig
    from learners.windows import Windows
    from wamrl_ray.policy.wam import WAMConfig

NAME = "video_learner.pretraining.path"


def pretraining_windows(config: PretrainingReplayConfig, policy: WAMConfig) -> Windows | None:
    """Windows of the first `per_task` demonstrations of each task; None if no path is set.

    Raises ValueError if there are none at `path`, or if they do not fit the policy.
    """
    return _windows(config, policy, None)


def check_pretraining(config: PretrainingReplayConfig, policy: WAMConfig) -> None:
    """Raise what `pretraining_windows` would, by the first demonstration alone."""
    _windows(config, policy, 1)


def _windows(config: PretrainingReplayConfig, policy: WAMConfig, count: int | None) -> Windows | None:
    from learners.windows import make_windows

    if not config.path:
        return None
    source = Path(config.path)
    if not source.exists():
        raise ValueError(
            f"{NAME} = {config.path!r}: no such folder or tar file on this machine; name one that `wamrl collect` "
            "wrote, or leave it empty"
        )
    # A run replays, it does not validate: nothing is held out.
    selection = Selection(sources=(source,), held_out_every=2**62, few_shot=config.per_task)
    try:
        return make_windows(islice(selection.training(), count), policy)
    except ValueError as error:
        raise ValueError(f"{NAME} = {config.path!r}: {error}") from error

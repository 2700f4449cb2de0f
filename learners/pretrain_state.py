"""What a stopped or killed pretraining continues from: `state.pt`, whole or absent, with the config it was made by."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learners.pretrain_config import CHANGEABLE, PretrainConfig
from wamrl_ray.atomic import replacing
from wamrl_ray.policy.wam import WAM


def save_state(
    path: Path,
    config: PretrainConfig,
    policy: WAM,
    average: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    step: int,
) -> None:
    """A kill while writing leaves the earlier state."""
    state = {
        "policy": policy.state_dict(),
        "average": list(average),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "config": json.dumps(asdict(config)),
    }
    with replacing(path) as file:
        torch.save(state, file)


def load_state(
    path: Path, config: PretrainConfig, policy: WAM, average: Sequence[Tensor], optimizer: torch.optim.Optimizer
) -> int:
    """Put the state at `path` into the parts, on their devices; returns its step, 0 without one.

    Raises ValueError, and changes nothing, if the state is damaged or was made by another config.
    """
    if not path.exists():
        return 0
    state = _read(path, config)
    policy.load_state_dict(state["policy"])
    policy.text.forget()
    for mean, saved in zip(average, state["average"], strict=True):
        mean.copy_(saved)
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def check_state(path: Path, config: PretrainConfig) -> int:
    """The step of the state at `path`, 0 without one.  Raises ValueError as `load_state` does."""
    if not path.exists():
        return 0
    return int(_read(path, config, mmap=True)["step"])


def _read(path: Path, config: PretrainConfig, *, mmap: bool = False) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{path}: is damaged or no training state; delete it to begin anew, or name another folder"
        ) from error
    _check(path, state, config)
    return state


def _check(path: Path, state: Mapping[str, Any], config: PretrainConfig) -> None:
    if "config" not in state:
        return
    # Through JSON, which makes lists of tuples, as the saved one went.
    before, now = _leaves(json.loads(state["config"])), _leaves(json.loads(json.dumps(asdict(config))))
    for name in sorted(before.keys() & now.keys()):
        if before[name] != now[name] and name not in CHANGEABLE:
            raise ValueError(
                f"{name} = {now[name]!r}, but {path} was trained with {before[name]!r}: "
                "continue with that, or name another folder"
            )


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        leaves |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return leaves

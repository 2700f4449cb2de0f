"""Tensors to and from immutable snapshots.  WAM and learners export, broker publishes, workers load."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from wamrl_ray.digest import snapshot_digest
from wamrl_ray.types import Snapshot


def to_snapshot(component: Literal["world", "actor"], tensors: Mapping[str, Tensor]) -> Snapshot:
    """Copy `tensors` into one flat float32 buffer, names sorted, and stamp it with its digest."""
    arrays = {name: tensors[name].detach().to("cpu", torch.float32).contiguous().numpy() for name in sorted(tensors)}
    layout = tuple((name, "<f4", array.shape) for name, array in arrays.items())
    buffer = np.concatenate([array.reshape(-1) for array in arrays.values()]).view(np.uint8)
    return Snapshot(
        component=component, digest=snapshot_digest(component, layout, buffer), layout=layout, buffer=buffer
    )


def from_snapshot(snapshot: Snapshot) -> dict[str, Tensor]:
    """The tensors of a snapshot, copied.  Raises ValueError if the content is not what the digest names."""
    digest = snapshot_digest(snapshot.component, snapshot.layout, snapshot.buffer)
    if digest != snapshot.digest:
        raise ValueError(
            f"snapshot.digest = {snapshot.digest!r} but its {snapshot.component} content hashes to {digest!r}: "
            "the weights were damaged on the way, fetch them again"
        )
    flat = np.array(snapshot.buffer).view("<f4")
    tensors, start = {}, 0
    for name, _, shape in snapshot.layout:
        tensors[name] = torch.from_numpy(flat[start : start + prod(shape)].reshape(shape))
        start += prod(shape)
    return tensors


def load_strict(module: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    """Load tensors whose names and shapes must match the module's; else ValueError and the module is unchanged."""
    own = {name: tuple(p.shape) for name, p in module.state_dict().items()}
    given = {name: tuple(t.shape) for name, t in tensors.items()}
    if own != given:
        odd = sorted(name for name in own.keys() | given.keys() if own.get(name) != given.get(name))
        raise ValueError(
            f"{what}: tensor {odd[0]!r} has shape {given.get(odd[0])} where the policy has {own.get(odd[0])} "
            f"({len(odd)} tensors differ): use weights made for this architecture"
        )
    module.load_state_dict(dict(tensors))

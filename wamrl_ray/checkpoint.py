"""Checkpoints: folders that are complete or absent.  Written by `run.System`, read by resume and `wamrl eval`.

    <root>/iter_000012/  config.json  world.npz  actor.npz  video_learner.pt  actor_learner.pt  run.json  manifest.json

Files go to a hidden temporary folder, each fsync'd; the manifest (size and sha256 of every file) is written last; then
one rename makes the folder visible.  Killed at any moment, there is either no such checkpoint or a sound one.
Nothing here is unpickled: arrays are plain `.npz`, learner states are read with torch's `weights_only`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from wamrl_ray.atomic import sync_folder
from wamrl_ray.types import Snapshot

Writer = Callable[[BinaryIO], None]
"""Writes one file's content."""

MANIFEST = "manifest.json"
FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or is damaged; the message names folder, cause and remedy."""


def save(root: Path, iteration: int, parts: Mapping[str, Writer], keep: int) -> Path:
    """Write `parts` (file name -> writer) as the checkpoint of `iteration`, then delete all but the last `keep`.

    Returns its folder.  Raises CheckpointError if the disk does not take it; the earlier checkpoints are then intact.
    """
    target, temporary = root / f"iter_{iteration:06d}", root / f".iter_{iteration:06d}.{os.getpid()}.tmp"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(".iter_*.tmp"):
            shutil.rmtree(leftover)
        temporary.mkdir()
        files = {name: _write(temporary / name, writer) for name, writer in sorted(parts.items())}
        manifest = {"format": FORMAT, "iteration": iteration, "files": files}
        _write(temporary / MANIFEST, json_part(manifest))
        sync_folder(temporary)
        if target.exists():
            # A repeated iteration (resumed from an older checkpoint on purpose) replaces what it wrote before.
            shutil.rmtree(target)
        temporary.rename(target)
        sync_folder(root)
    except OSError as error:
        last = next(reversed(complete(root)), None) if root.exists() else None
        raise CheckpointError(
            f"checkpoint {target} could not be written: {error.strerror or error}; the last good one is "
            f"{last or 'none'}; make room or fix the folder, then continue with --resume auto"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in complete(root)[:-keep]:
        shutil.rmtree(old)
    return target


def complete(root: Path) -> list[Path]:
    """Folders of all finished checkpoints, oldest first."""
    return sorted(path.parent for path in root.glob(f"iter_*/{MANIFEST}"))


def load_latest(root: Path) -> Path | None:
    """The newest sound checkpoint under `root`, None if there is none; a damaged one is passed over with a warning."""
    for folder in reversed(complete(root)):
        try:
            verify(folder)
        except CheckpointError as error:
            logging.getLogger(__name__).warning("passed over: %s", error)
        else:
            return folder
    return None


def verify(folder: Path) -> None:
    """Raise CheckpointError unless every file is as the manifest says."""
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is not a checkpoint of a run; name another folder")
    try:
        manifest = read_json(folder / MANIFEST)
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"{folder}: format {manifest['format']!r}, this version reads {FORMAT}")
        for name, expected in manifest["files"].items():
            if _fingerprint(folder / name) != expected:
                raise CheckpointError(f"{folder / name} is not what the manifest says: damaged; use another checkpoint")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} cannot be read ({error}): damaged; use another checkpoint") from error


# ------------------------------------------------------------------------------------------------ kinds of file


def json_part(value: object) -> Writer:
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    return lambda file: _discard(file.write(text.encode()))


def torch_part(state: Mapping[str, Any]) -> Writer:
    """Tensors, numbers, strings and containers of these: what torch reads back with `weights_only`."""


    def write(file: BinaryIO) -> None:
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:
            # torch reports a failed write as an error of its zip writer; the cause is what the user must hear.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise

    return write


def snapshot_part(snapshot: Snapshot) -> Writer:
    meta = {"component": snapshot.component, "digest": snapshot.digest, "layout": snapshot.layout}
    encoded = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    return lambda file: np.savez(file, allow_pickle=False, meta=encoded, buffer=snapshot.buffer)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def read_torch(path: Path) -> Mapping[str, Any]:
    """On the CPU, whatever device it was saved from."""
    state: Mapping[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def read_snapshot(path: Path) -> Snapshot:
    """Whoever loads the weights verifies the digest."""
    with np.load(path, allow_pickle=False) as file:
        meta, buffer = json.loads(file["meta"].tobytes()), file["buffer"]
    layout = tuple((str(name), str(dtype), tuple(int(n) for n in shape)) for name, dtype, shape in meta["layout"])
    return Snapshot(component=meta["component"], digest=meta["digest"], layout=layout, buffer=buffer)


# ------------------------------------------------------------------------------------------------ inside


def _write(path: Path, writer: Writer) -> dict[str, Any]:
    with path.open("wb") as file:
        writer(file)
        file.flush()
        os.fsync(file.fileno())
    return _fingerprint(path)


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _discard(count: int) -> None:
    """`BinaryIO.write` returns a count that a Writer does not."""

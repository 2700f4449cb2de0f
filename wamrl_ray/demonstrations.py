"""Demonstrations on disk: one file each, and an index of them.

Collection feeds it with demonstrations; `wamrl pretrain` and whoever looks for data read them back.

    DIR/demo_TT_SSS_NNNNN.npz   task, seed and number; the arrays of a `types.Demonstration`, and `meta`: the rest, JSON
    DIR/index.jsonl             one line per file, an `IndexEntry`

A file that is there is whole.  The index is derived from the files and never the other way round: a line that is torn,
missing or without its file is repaired when the folder is opened for writing.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from wamrl_ray.atomic import replacing
from wamrl_ray.types import Demonstration

INDEX = "index.jsonl"
FILES = "demo_*.npz"


# ------------------------------------------------------------------------------------------------ one file


def save_demonstration(demonstration: Demonstration, path: Path) -> None:
    """One .npz, complete or absent."""
    fields = asdict(demonstration)
    arrays = {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}
    meta = {name: value for name, value in fields.items() if name not in arrays}
    with replacing(path) as file:
        np.savez_compressed(file, allow_pickle=False, meta=np.array(json.dumps(meta)), **arrays)


def load_demonstration(path: Path, file: IO[bytes] | None = None) -> Demonstration:
    """Read `path`, or an open file that `path` only names.  Raises ValueError for a file that is none."""
    try:
        with np.load(file or path, allow_pickle=False) as npz:
            arrays = {name: npz[name] for name in npz.files if name != "meta"}
            return Demonstration(**json.loads(str(npz["meta"])), **arrays)
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: is no demonstration ({error}); delete it and collect it again") from error


def load_demonstrations(folder: Path) -> Iterator[Demonstration]:
    """All demonstrations below a folder, in the order of their names.  Raises ValueError if there are none."""
    paths = sorted(folder.rglob(FILES))
    if not paths:
        raise ValueError(f"data = {str(folder)!r}: no {FILES} there, run `wamrl collect` first")
    return (load_demonstration(path) for path in paths)


# ------------------------------------------------------------------------------------------------ the index


@dataclass(frozen=True, kw_only=True)
class IndexEntry:
    """One line of the index.

    Example: file "demo_03_000_00012.npz", env "libero_object", simulator "mujoco 3.17.0", resolution 64, task_id 3,
    init_state_id 12, seed 12, steps 118, success True, kind "expert", base "", instruction "pick up ...",
    disturbance "9f3a5c...", versions {"environment": "libero_object", ...}.
    """

    file: str
    env: str
    simulator: str
    resolution: int
    "h = w of a frame, pixels"
    task_id: int
    init_state_id: int
    seed: int
    steps: int
    "env steps"
    success: bool
    kind: str
    '"expert": the disturbed expert acted; "policy": a policy acted and the expert labelled'
    base: str
    "digest of that policy, empty for the expert"
    instruction: str
    disturbance: str
    "digest of the CollectConfig, empty if it was not recorded"
    versions: Mapping[str, str]


def index_entry(demonstration: Demonstration, file: str) -> IndexEntry:
    d = demonstration
    return IndexEntry(
        file=file,
        env=d.env,
        simulator=d.simulator,
        resolution=d.frames.shape[-2],
        task_id=d.task_id,
        init_state_id=d.init_state_id,
        seed=d.seed,
        steps=len(d.action),
        success=d.success,
        kind=d.kind,
        base=d.base,
        instruction=d.instruction,
        disturbance=text_digest(d.disturbance),
        versions=d.versions,
    )


def text_digest(text: str) -> str:
    """First 16 hex digits of the sha256, empty for an empty text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""


class DemonstrationFolder:
    """A folder opened for writing; raises OSError if it cannot be.  One process writes into it at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        lines, whole = _read_index(folder / INDEX)
        names = sorted(path.name for path in folder.glob(FILES))
        self.entries = {
            name: lines[name] if name in lines else index_entry(load_demonstration(folder / name), name)
            for name in names
        }
        "by file name"
        if not whole or self.entries.keys() != lines.keys():
            with replacing(folder / INDEX) as file:
                file.write("".join(_line(entry) for entry in self.entries.values()).encode())

    def add(self, demonstration: Demonstration, file: str) -> None:
        """The file first, then its line: a kill between the two leaves a line that the next opening adds."""
        save_demonstration(demonstration, self.folder / file)
        entry = index_entry(demonstration, file)
        with (self.folder / INDEX).open("ab", buffering=0) as index:
            index.write(_line(entry).encode())
            os.fsync(index.fileno())
        self.entries[file] = entry


def _line(entry: IndexEntry) -> str:
    return json.dumps(asdict(entry)) + "\n"


def _read_index(path: Path) -> tuple[dict[str, IndexEntry], bool]:
    """The sound lines by file name, and whether there was nothing else."""
    if not path.exists():
        return {}, False
    text = path.read_text(encoding="utf-8", errors="replace")
    entries, whole = {}, text.endswith("\n") or not text
    for line in text.splitlines():
        try:
            fields: dict[str, Any] = json.loads(line)
            entries[fields["file"]] = IndexEntry(**fields)
        except (ValueError, TypeError, KeyError):  # torn, or of another make: its file tells it anew
            whole = False
    return entries, whole

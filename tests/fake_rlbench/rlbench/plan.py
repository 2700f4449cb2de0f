"""What shall go wrong: read from `plan.json` in COPPELIASIM_ROOT at launch and at every reset, written by a test.

{"fault": "step_hang", "at_step": 3}: the names are those of `strike` and of the places that ask `wants`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(os.environ["COPPELIASIM_ROOT"])
FOREVER_S = 1000

_plan: dict[str, Any] = {}


def read() -> None:
    path = ROOT / "plan.json"
    _plan.clear()
    _plan.update(json.loads(path.read_text()) if path.exists() else {})


def get(name: str, default: Any = None) -> Any:
    return _plan.get(name, default)


def wants(fault: str) -> bool:
    return get("fault") == fault


def strike(place: str) -> None:
    """Do to this process what the plan has for launch, reset or step."""
    from rlbench.backend import exceptions

    fault = get("fault", "")
    if not fault.startswith(f"{place}_"):
        return
    print(f"the fake simulator meets {fault}", flush=True)
    if get("once"):
        (ROOT / "plan.json").unlink()
    match fault.removeprefix(f"{place}_"):
        case "hang":
            time.sleep(FOREVER_S)
        case "hang_with_the_lock":
            # Native code that never returns and keeps the interpreter's lock, as CoppeliaSim's own hangs do.
            ctypes.PyDLL(None).sleep(FOREVER_S)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
            time.sleep(FOREVER_S)
        case "exit":
            os._exit(3)
        case "error":
            raise ValueError(f"deliberate, in {place}")
        case "invalid":
            raise exceptions.InvalidActionError("deliberate")
        case "garbage":
            _answer(b"TRACE: not a message at all")
        case "oversized":
            _answer(struct.pack("<4sI", b"WRL1", 1 << 31))
        case "not_json":
            _answer(struct.pack("<4sI", b"WRL1", 4) + b"\xff\xfe{}")
        case "twice":
            _answer(struct.pack("<4sI", b"WRL1", 15) + b'{"n":0,"ok":{}}')
        case "says":
            body = get("text").encode()
            _answer(struct.pack("<4sI", b"WRL1", len(body)) + body)
        case "chatter":
            for _ in range(4000):
                print("x" * 99, flush=True)
        case "shout":
            while True:
                os.write(1, b"x" * 99 + b"\n")
        case "display":
            _end_display()
            time.sleep(FOREVER_S)
        case "nan":
            pass  # the scene sees to it
        case unknown:
            raise AssertionError(f"plan.json asks for {unknown!r}")


def _answer(data: bytes) -> None:
    """Onto the supervisor's socket, past the child."""
    socket.socket(fileno=os.dup(int(sys.argv[1]))).sendall(data)
    time.sleep(FOREVER_S)


def _end_display() -> None:
    """Kill the keeper's other child."""
    keeper = os.getppid()
    children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    for pid in map(int, children):
        if pid != os.getpid():
            os.kill(pid, signal.SIGKILL)

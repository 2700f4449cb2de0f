"""The renderer is chosen before mujoco is imported, probed with a deadline, and its absence names the remedy."""

from __future__ import annotations

import pytest

from envs import render


def test_the_renderer_named_by_the_user_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "egl")
    assert render.choose_renderer() == "egl"


def test_a_missing_renderer_is_reported_with_the_command_that_installs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    with pytest.raises(RuntimeError, match="run `apt-get install libosmesa6`"):
        render.choose_renderer()
    monkeypatch.setattr("ctypes.util.find_library", lambda name: "libEGL.so.1" if name == "EGL" else "no_such_file.so")
    monkeypatch.setattr("ctypes.CDLL", lambda name: (_ for _ in ()).throw(OSError) if "no_such" in name else object())
    assert render.choose_renderer() == "egl"


def test_the_probe_names_the_renderer_or_the_remedy_and_keeps_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    assert render.probe_renderer(150.0).startswith("osmesa: ")
    with pytest.raises(RuntimeError, match="within 0.01 s: run `apt-get install libosmesa6`"):
        render.probe_renderer(0.01)
    monkeypatch.setenv("MUJOCO_GL", "no_such_backend")
    with pytest.raises(RuntimeError, match="MUJOCO_GL=no_such_backend makes no GL context .*libosmesa6"):
        render.probe_renderer(150.0)

"""The renderer is chosen before mujoco is imported, probed with a deadline, and its absence names the remedy."""

from __future__ import annotations

import numpy as np
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


def test_halving_a_picture_is_the_mean_of_four_pixels_with_halves_rounded_up() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    picture[:2, :2], picture[:2, 2:4, 0] = 255, [[0, 0], [1, 1]]
    half = render.halve(picture)
    fours = picture.reshape(3, 2, 4, 2, 3).astype(float).mean(axis=(1, 3))
    assert half.dtype == np.uint8 and np.array_equal(half, np.floor(fours + 0.5))
    assert half[0, 0].tolist() == [255] * 3 and half[0, 1, 0] == 1

"""Pictures of a run: clips of imagined beside executed frames, and curves.  The run driver feeds it, people look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from wamrl_ray.metrics import read_metrics

Images = NDArray[Any]

CLIP_HEIGHT = 256
"""least pixels of a frame's side in a clip: a 96-pixel frame is too small for a person"""
BAR = 16
"""pixels of the label above each half"""

CURVES: tuple[tuple[str, str], ...] = (
    ("rollout/success_rate", "success of training episodes"),
    ("reward/reconstruction_mean", "reconstruction reward per decision"),
    ("actor/approx_kl_nats", "KL to the policy before the update, nats per decision"),
    ("video/flow_loss", "world model loss"),
)


def write_clip(path: Path, imagined: Images, executed: Images, captions: Sequence[str] = (), fps: float = 4.0) -> Path:
    """Write imagined (left) beside executed (right) frames as .mp4 or .gif, by the path's suffix.

    Both (N, V, h, w, 3), uint8 or float in [0, 1], frame n of both at the same moment; the V views are stacked and
    `captions` (N strings or none) stand over the right half.  Raises ValueError if shapes differ or there is no frame.
    """
    if imagined.shape != executed.shape or imagined.ndim != 5 or len(imagined) == 0:
        raise ValueError(f"imagined {imagined.shape} and executed {executed.shape}: both must be (N >= 1, V, h, w, 3)")
    frames = side_by_side(imagined, executed, captions)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gif":
        iio.imwrite(path, frames, duration=1000.0 / fps, loop=0)
        return path
    # H.264 wants even sides.
    frames = np.pad(frames, [(0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)])
    iio.imwrite(path, frames, fps=fps, codec="libx264", macro_block_size=2)
    return path


def write_episode_clip(path: Path, clip: Mapping[str, Images], fps: float = 4.0) -> Path | None:
    """The clip of one episode as the actor learner labels it; None if no imagined moment was reached.

    imagined, executed (T, F, V, h, w, 3), reached (T, F) bool, reward (T,): each decision's imagined offsets in turn.
    """
    reached = np.asarray(clip["reached"], dtype=bool)
    if not reached.any():
        return None
    captions = [f"decision {t}  reward {clip['reward'][t]:+.2f}" for t, _ in np.argwhere(reached)]
    return write_clip(path, clip["imagined"][reached], clip["executed"][reached], captions, fps)


def side_by_side(imagined: Images, executed: Images, captions: Sequence[str] = ()) -> NDArray[np.uint8]:
    """(N, V, h, w, 3) twice -> (N, height, width, 3) uint8: views below one another, labelled, upscaled."""
    left = _labelled(_stacked(imagined), ["imagined"] * len(imagined))
    right = _labelled(_stacked(executed), [f"executed  {caption}" for caption in captions or [""] * len(executed)])
    gap = np.zeros((*left.shape[:2], 4, 3), np.uint8)
    return np.concatenate([left, gap, right], axis=2)


def _stacked(frames: Images) -> NDArray[np.uint8]:
    pixels = frames if frames.dtype == np.uint8 else np.rint(np.clip(frames, 0.0, 1.0) * 255.0).astype(np.uint8)
    count, views, height, width, _ = pixels.shape
    scale = max(1, -(-CLIP_HEIGHT // height))
    tall = pixels.reshape(count, views * height, width, 3)
    return tall.repeat(scale, axis=1).repeat(scale, axis=2)


def _labelled(frames: NDArray[np.uint8], labels: Sequence[str]) -> NDArray[np.uint8]:
    bars = []
    for label in labels:
        bar = Image.new("RGB", (frames.shape[2], BAR))
        ImageDraw.Draw(bar).text((4, 2), label, fill="white")
        bars.append(np.asarray(bar))
    return np.concatenate([np.stack(bars), frames], axis=1)


def write_curves(run_dir: Path, title: str = "") -> Path | None:
    """Draw `curves.png` from the run's metrics; None if there are none yet.  `title`: environment and simulator."""
    lines = read_metrics(run_dir)
    if not lines:
        return None
    # The Figure class needs no display and no global state, unlike pyplot.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    figure.suptitle(title, fontsize=10)
    for axes, (name, title) in zip(np.ravel(figure.subplots(2, 2)), CURVES, strict=True):
        points = [(line["iteration"] + 1, line[name]) for line in lines if name in line]
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("iteration")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    figure.savefig(run_dir / "curves.png", dpi=120)
    return run_dir / "curves.png"

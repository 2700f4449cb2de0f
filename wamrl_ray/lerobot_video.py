"""Frames of one episode out of an mp4 that holds many.  `lerobot_import` asks, ffmpeg (of imageio-ffmpeg) answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from wamrl_ray.types import Frames


def read_frames(path: Path, *, start_s: float, count: int, fps: float) -> Frames:
    """`count` frames (count, h, w, 3) from the one shown at `start_s`; ValueError if they are not there."""
    import imageio_ffmpeg

    if not path.is_file():
        raise ValueError(f"{path} is missing: download the dataset with its videos")
    # Half a frame early, so that the rounding of a timestamp cannot skip the first one.
    seek = ["-ss", f"{max(0.0, start_s - 0.5 / fps):.6f}"]
    reader = imageio_ffmpeg.read_frames(
        str(path), input_params=seek, output_params=["-frames:v", str(count), "-fps_mode", "passthrough"]
    )
    width, height = next(reader)["size"]
    frames = np.stack([np.frombuffer(data, np.uint8).reshape(height, width, 3) for data in reader])
    if len(frames) != count:
        raise ValueError(f"{path}: {len(frames)} frames from {start_s} s on, {count} are wanted")
    return frames

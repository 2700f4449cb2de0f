"""Statistics of a LeRobotDataset: what its users normalise with.  `lerobot_dataset` feeds and writes them.

One entry per feature: min, max, mean, std, count and five quantiles.  Images are described per colour channel with
pixels in [0, 1], from a histogram of all of them, so nothing is sampled and nothing but the histogram is kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
Stats = dict[str, NDArray[Any]]


def vector_stats(values: NDArray[Any]) -> Stats:
    """Of (n, ...) numbers, over n: each statistic has shape (d,), `count` (1,)."""
    rows = values.reshape(len(values), -1).astype(np.float64)
    return {
        "min": rows.min(0),
        "max": rows.max(0),
        "mean": rows.mean(0),
        "std": rows.std(0),
        "count": np.array([len(rows)]),
        **{name: np.quantile(rows, share, axis=0) for name, share in QUANTILES.items()},
    }


def image_histogram(images: NDArray[np.uint8]) -> NDArray[np.int64]:
    """(n, h, w, 3) -> (3, 256) pixels of each level; histograms of two sets add up."""
    return np.stack([np.bincount(images[..., channel].ravel(), minlength=256) for channel in range(3)])


def image_stats(histogram: NDArray[np.int64], images: int) -> Stats:
    """Of the (3, 256) histogram of that many images: each statistic has shape (3, 1, 1), `count` (1,)."""
    level = np.arange(256) / 255.0
    share = histogram / histogram.sum(1, keepdims=True)
    mean = share @ level
    # The lowest level that at least this share of the pixels does not exceed.
    reached = share.cumsum(1)
    quantiles = {
        name: level[[np.searchsorted(row, wanted - 1e-9) for row in reached]] for name, wanted in QUANTILES.items()
    }
    present = histogram > 0
    stats = {
        "min": level[present.argmax(1)],
        "max": level[255 - present[:, ::-1].argmax(1)],
        "mean": mean,
        "std": np.sqrt(np.maximum(share @ level**2 - mean**2, 0.0)),
        **quantiles,
    }
    return {name: value.reshape(3, 1, 1) for name, value in stats.items()} | {"count": np.array([images])}

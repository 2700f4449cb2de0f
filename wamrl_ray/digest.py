"""The content digest of a snapshot, without torch: `policy/weights.py` stamps with it, broker and workers verify.

One function, so that a digest made on a learner means the same to everyone who checks it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def snapshot_digest(
    component: str, layout: Sequence[tuple[str, str, tuple[int, ...]]], buffer: NDArray[np.uint8]
) -> str:
    """First 16 hex digits of sha256(canonical JSON of component + layout, then the buffer (nbytes,) uint8)."""
    head = [component, [[name, dtype, [int(size) for size in shape]] for name, dtype, shape in layout]]
    digest = hashlib.sha256(json.dumps(head, separators=(",", ":"), ensure_ascii=True).encode())
    digest.update(np.ascontiguousarray(buffer, dtype=np.uint8).data)
    return digest.hexdigest()[:16]

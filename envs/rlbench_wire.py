"""The messages between the supervisor and the simulator's process: framed, bounded, plain JSON.

Used at both ends (`envs/rlbench_process.py`, `envs/rlbench_child.py`, `envs/rlbench_keeper.py`), so it imports the
standard library only.

    message = magic (4 bytes) | length of the body (uint32, little endian) | body: one JSON object in UTF-8

Nothing is executed by reading a message, a broken one is refused before its body is read, and NaN cannot be sent.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

Message = dict[str, Any]

MAX_BYTES = 1 << 20
"of a body; the longest sound one is an error's stack, a few kB"

_MAGIC = b"WRL1"
_HEADER = struct.Struct("<4sI")


class BadMessage(Exception):
    """What came in is not a message; nothing after it can be trusted."""


def encode(message: Message) -> bytes:
    """Header and body; ValueError for NaN, infinities and a body above `MAX_BYTES`."""
    body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    if len(body) > MAX_BYTES:
        raise ValueError(f"message of {len(body)} bytes: at most {MAX_BYTES} can be sent")
    return _HEADER.pack(_MAGIC, len(body)) + body


class Decoder:
    """Bytes in, in whatever pieces; messages out, in order."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    @property
    def empty(self) -> bool:
        """Whether every byte that came in belonged to a message that went out."""
        return not self._buffer

    def next(self) -> Message | None:
        """The next message, None until all of it is there; raises BadMessage."""
        # Judged by its first bytes, so that a writer of garbage is not waited for.
        begun = bytes(self._buffer[: len(_MAGIC)])
        if begun != _MAGIC[: len(begun)]:
            raise BadMessage(f"{begun!r} where a message should begin")
        if len(self._buffer) < _HEADER.size:
            return None
        _, length = _HEADER.unpack_from(self._buffer)
        if length > MAX_BYTES:
            raise BadMessage(f"a message of {length} bytes is announced, at most {MAX_BYTES} are accepted")
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):  # of JSON, of UTF-8, of lists in lists without end
            raise BadMessage(f"the body {body[:40]!r} is not JSON") from None
        if not isinstance(message, dict):
            raise BadMessage(f"the body {body[:40]!r} is not a JSON object")
        return message


def receive(sock: socket.socket, decoder: Decoder) -> Message | None:
    """The next message from a blocking socket, None at its end: for the side that has nothing else to wait for."""
    while (message := decoder.next()) is None:
        data = sock.recv(1 << 16)
        if not data:
            return None
        decoder.feed(data)
    return message

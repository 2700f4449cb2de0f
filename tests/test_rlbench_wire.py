"""The messages between supervisor and simulator: what goes in comes out, anything else is refused."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.rlbench_wire import MAX_BYTES, BadMessage, Decoder, encode, receive


@given(st.lists(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=9)), max_size=5), st.data())
def test_messages_come_out_as_they_went_in_however_they_are_cut(
    messages: list[dict[str, Any]], data: st.DataObject
) -> None:
    stream, decoder, found = b"".join(map(encode, messages)), Decoder(), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        decoder.feed(stream[:cut])
        stream = stream[cut:]
        while (message := decoder.next()) is not None:
            found.append(message)
    assert found == messages and decoder.empty


@given(st.binary(min_size=1, max_size=60))
def test_any_other_bytes_are_refused_or_waited_for(noise: bytes) -> None:
    decoder = Decoder()
    decoder.feed(noise)
    with contextlib.suppress(BadMessage):
        assert decoder.next() is None and b"WRL1".startswith(noise[:4])


def test_a_message_is_bounded_and_finite() -> None:
    with pytest.raises(ValueError, match="at most"):
        encode({"stack": "x" * MAX_BYTES})
    with pytest.raises(ValueError, match="JSON"):
        encode({"reward": float("nan")})
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(encode({"n": 1}))
        theirs.shutdown(socket.SHUT_WR)
        decoder = Decoder()
        assert receive(ours, decoder) == {"n": 1} and receive(ours, decoder) is None

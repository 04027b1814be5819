"""Frames of the publisher's two sockets: live messages, and the replay of earlier ones. Pure."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from kv_events.errors import BatchUndecodable

_SEQUENCE_BYTES: Final = 8
# Sequence -1 closes a replay.
_END: Final = b"\xff" * _SEQUENCE_BYTES


class Message(NamedTuple):
    """One batch as it came.

    Attributes:
        topic: Empty for a replay of older engines, which do not repeat it.
        sequence: Number of the batch in the publisher's life, from 0.
        payload: The batch, to be decoded.
    """

    topic: bytes
    sequence: int
    payload: bytes


def parse_message(frames: Sequence[bytes]) -> Message:
    """Take a live message apart: topic, sequence, payload.

    Raises:
        BatchUndecodable: ``frames`` or ``sequence``; drop it and go on.
    """
    if len(frames) != 3:
        raise BatchUndecodable("frames")
    topic, sequence, payload = frames
    return Message(topic, _sequence(sequence), payload)


def replay_request(start: int) -> list[bytes]:
    """Make the frames that ask, from a DEALER socket, for all batches from ``start`` on, ``start`` in [0, 2^64)."""
    return [b"", start.to_bytes(_SEQUENCE_BYTES, "big")]


def parse_reply(frames: Sequence[bytes]) -> Message | None:
    """Take one reply to a replay request apart.

    Newer engines answer with ``["", topic, sequence, payload]``, older ones without the topic.

    Returns:
        The batch, or ``None`` for the end of the replay.

    Raises:
        BatchUndecodable: ``frames`` or ``sequence``.
    """
    if len(frames) not in (3, 4) or frames[0]:
        raise BatchUndecodable("frames")
    sequence, payload = frames[-2:]
    if sequence == _END:
        return None
    return Message(frames[1] if len(frames) == 4 else b"", _sequence(sequence), payload)


def _sequence(frame: bytes) -> int:
    if len(frame) != _SEQUENCE_BYTES:
        raise BatchUndecodable("sequence")
    return int.from_bytes(frame, "big")

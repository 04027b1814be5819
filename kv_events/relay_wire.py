"""The messages between a relay and a gateway, and their bounds. Pure.

A relay speaks from a DEALER socket to the gateway's ROUTER. Each message is one or two frames: a header in MessagePack,
and for events and parts of snapshots a body, which is passed on as it came. One connection is one session:

    relay:   Hello                                    who it is, and which ranks it brings
    gateway: Accept | Refuse                          where to go on with each rank, or why not
    relay:   Resume | Begin Part* End                 for each rank: go on, or all that the rank holds now
    relay:   Events, Reset, Beat, ..., Bye            what happens then
    gateway: Ack, Resync, Clear                       what it has applied; what it wants whole again; what is no more

Numbers of events are the engine's own. They are without a hole inside an epoch; ``Reset`` begins the next epoch, of
which nothing is known. A relay sends no more than ``WINDOW_BYTES`` that the gateway has not acknowledged.
"""

from collections.abc import Sequence
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from kv_events.errors import RelayMessageRefused
from kv_events.types import Tier

PROTOCOL: Final = 1
MAX_HEADER_BYTES: Final = 256 * 1024
MAX_BODY_BYTES: Final = 64 * 1024 * 1024
WINDOW_BYTES: Final = 8 * 1024 * 1024
# What a message counts in the window besides its body, so that small ones are bounded in number too.
MESSAGE_COST_BYTES: Final = 512
PART_BLOCKS: Final = 1024
MAX_RANKS: Final = 1024
_U64_BYTES: Final = 8

_Rank = Annotated[int, Meta(ge=0, le=65_535)]
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Seconds = Annotated[float, Meta(gt=0, le=86_400)]
_Name = Annotated[str, Meta(max_length=256)]
_Url = Annotated[str, Meta(max_length=2048)]
_Text = Annotated[str, Meta(max_length=4096)]
_NamespaceFields = tuple[str | None, int | None, str | None, str | None]


class RankOffer(msgspec.Struct, array_like=True, frozen=True):
    """A rank that a relay brings.

    Attributes:
        dp_rank: Global rank.
        block_size: Tokens in a block; ``None`` if the engine does not tell.
    """

    dp_rank: _Rank
    block_size: Annotated[int, Meta(ge=1, le=2**31)] | None = None


class Group(msgspec.Struct, array_like=True, frozen=True):
    """The identity of an engine that spans nodes.

    Attributes:
        literal: Address of the group as the engine was given it.
        addresses: What it resolves to on the relay's node, sorted.
    """

    literal: _Text
    addresses: Annotated[tuple[_Name, ...], Meta(max_length=64)] = ()


class Hello(msgspec.Struct, array_like=True, tag="hello", frozen=True):
    """Opens a session. The only message whose later versions may have more fields.

    Attributes:
        protocol: Version of the wire.
        publisher: Random name of the relay's process.
        worker_url: Address of the worker, as gateways know it.
        role: ``leader`` or ``follower``.
        ranks: What it brings; none for a leader whose node has no publisher.
        dp_size: Ranks of the whole engine.
        relay_version: Release of the relay.
        group: Of an engine that spans nodes.
    """

    protocol: _Count
    publisher: Annotated[str, Meta(min_length=1, max_length=64)]
    worker_url: _Url
    role: _Name
    ranks: Annotated[tuple[RankOffer, ...], Meta(max_length=MAX_RANKS)]
    dp_size: Annotated[int, Meta(ge=1, le=65_536)]
    relay_version: _Name = ""
    group: Group | None = None


class _Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Any other message."""


class Events(_Message, tag="events", frozen=True):
    """One batch of the engine, which is the body."""

    dp_rank: _Rank
    epoch: _Count
    seq: _Count


class Reset(_Message, tag="reset", frozen=True):
    """Batches are lost, or the publisher is another one: forget what the rank held, and go on in a new epoch."""

    dp_rank: _Rank
    epoch: _Count
    reason: _Name


class Resume(_Message, tag="resume", frozen=True):
    """The next batch of a rank follows what the gateway has of it."""

    dp_rank: _Rank
    epoch: _Count


class Begin(_Message, tag="begin", frozen=True):
    """All that a rank holds follows, in place of what is known of it.

    Attributes:
        dp_rank: The rank.
        epoch: Life of its source.
        last_seq: Newest batch that is in it; ``None`` before the first.
        blocks: How many follow.
        is_complete: The engine's cache holds nothing else.
        is_eagle: Its blocks cover one token more than their size.
        group_kinds: Kinds of attention that earlier batches told, by group.
    """

    dp_rank: _Rank
    epoch: _Count
    last_seq: _Count | None
    blocks: _Count
    is_complete: bool
    is_eagle: bool
    group_kinds: Annotated[dict[int, _Name], Meta(max_length=1024)]


class Part(_Message, tag="part", frozen=True):
    """Blocks of a snapshot: the body has names, then sequence hashes, then the names that are held twice.

    All of them are little-endian, eight bytes each.
    """

    dp_rank: _Rank
    tier: Tier
    namespace: _NamespaceFields
    blocks: Annotated[int, Meta(ge=1, le=PART_BLOCKS)]
    copies: Annotated[int, Meta(ge=0, le=PART_BLOCKS)]

    def is_whole(self, body_bytes: int) -> bool:
        """Say whether a body of this length can belong to it."""
        return body_bytes == (2 * self.blocks + self.copies) * _U64_BYTES


class End(_Message, tag="end", frozen=True):
    """The snapshot is complete."""

    dp_rank: _Rank


class RankHealth(msgspec.Struct, array_like=True, frozen=True):
    """Whether a rank's publisher is connected to the relay."""

    dp_rank: _Rank
    is_connected: bool


class Beat(_Message, tag="beat", frozen=True):
    """The relay is there; sent regularly, and when a connection to a publisher comes or goes."""

    ranks: Annotated[tuple[RankHealth, ...], Meta(max_length=MAX_RANKS)]


class Bye(_Message, tag="bye", frozen=True):
    """The relay goes, and gives its ranks back."""


class Cursor(msgspec.Struct, array_like=True, frozen=True):
    """What a gateway has of a rank, from this very relay."""

    dp_rank: _Rank
    epoch: _Count
    last_seq: _Count | None


class Accept(_Message, tag="accept", frozen=True):
    """The gateway takes all ranks; those without a cursor need a snapshot.

    Attributes:
        worker_id: Whose they are.
        beat_s: Time between two heartbeats, either way.
        lease_s: Silence after which the other side is lost.
        cursors: Where to go on.
    """

    worker_id: _Text
    beat_s: _Seconds
    lease_s: _Seconds
    cursors: Annotated[tuple[Cursor, ...], Meta(max_length=MAX_RANKS)] = ()


class Refuse(_Message, tag="refuse", frozen=True):
    """The gateway takes none of the ranks, or none any more.

    Attributes:
        status: As of HTTP: 400, 404, 409, 410, 422, 426, 503.
        reason: Short, as the drop counter has it.
        message: For people.
        is_final: It will not be otherwise the next time.
    """

    status: Annotated[int, Meta(ge=400, le=599)]
    reason: _Name
    message: _Text
    is_final: bool


class Ack(_Message, tag="ack", frozen=True):
    """Sent regularly, and as the window fills.

    Attributes:
        taken_bytes: What of the session has been applied, as ``cost_bytes`` counts.
    """

    taken_bytes: _Count


class Resync(_Message, tag="resync", frozen=True):
    """The gateway wants a snapshot of a rank."""

    dp_rank: _Rank
    reason: _Name


class Clear(_Message, tag="clear", frozen=True):
    """The engine's cache was emptied, as the gateway knows from the engine's answer to a call.

    Attributes:
        dp_rank: The rank.
        epoch: Life of its source.
        last_seq: What this batch and earlier ones stored is worthless; later ones count.
    """

    dp_rank: _Rank
    epoch: _Count
    last_seq: _Count


ToGateway: TypeAlias = Hello | Events | Reset | Resume | Begin | Part | End | Beat | Bye
ToRelay: TypeAlias = Accept | Refuse | Ack | Resync | Clear

_ENCODER = msgspec.msgpack.Encoder()
_TO_GATEWAY: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)
_TO_RELAY: msgspec.msgpack.Decoder[ToRelay] = msgspec.msgpack.Decoder(ToRelay)
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def encode(message: ToGateway | ToRelay, body: bytes | None = None) -> list[bytes]:
    """Make the frames of a message."""
    header = _ENCODER.encode(message)
    return [header] if body is None else [header, body]


def cost_bytes(frames: Sequence[bytes]) -> int:
    """Count a message in the window, on both sides alike; ``frames`` as ``encode`` makes them."""
    return MESSAGE_COST_BYTES + (len(frames[1]) if len(frames) > 1 else 0)


def decode_from_relay(frames: Sequence[bytes]) -> tuple[ToGateway, bytes]:
    """Read what a relay sent; the body is empty where the message has none.

    Raises:
        RelayMessageRefused: It is none, or passes a bound.
    """
    _check_size(frames)
    try:
        message = _TO_GATEWAY.decode(frames[0])
    except _UNREADABLE as exc:
        raise RelayMessageRefused("the header cannot be read") from exc
    has_body = isinstance(message, Events | Part)
    if has_body is not (len(frames) == 2):
        raise RelayMessageRefused(f"{len(frames)} frames for this kind of message")
    body = frames[1] if has_body else b""
    if isinstance(message, Part) and not message.is_whole(len(body)):
        raise RelayMessageRefused("a part of a snapshot has another length than it says")
    return message, body


def decode_from_gateway(frames: Sequence[bytes]) -> ToRelay:
    """Read what a gateway sent.

    Raises:
        RelayMessageRefused: It is none, or passes a bound.
    """
    _check_size(frames)
    if len(frames) != 1:
        raise RelayMessageRefused(f"{len(frames)} frames for this kind of message")
    try:
        return _TO_RELAY.decode(frames[0])
    except _UNREADABLE as exc:
        raise RelayMessageRefused("the header cannot be read") from exc


def _check_size(frames: Sequence[bytes]) -> None:
    if not 1 <= len(frames) <= 2:
        raise RelayMessageRefused(f"{len(frames)} frames")
    if len(frames[0]) > MAX_HEADER_BYTES or (len(frames) == 2 and len(frames[1]) > MAX_BODY_BYTES):
        raise RelayMessageRefused("a frame is too long")

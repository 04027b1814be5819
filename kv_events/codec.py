"""Payloads of the engines' publishers to ``EventBatch``. Pure.

A good batch is decoded in one go. If that fails, its events are decoded one by one, so that a bad or unknown one
costs only itself. Reasons for dropping, as ``EventBatch.dropped`` counts them:

- ``unknown_event``: a kind of event that is not known here;
- ``malformed``: a field is missing, has the wrong type or passes a limit, or fields contradict each other;
- ``irrelevant``: blocks of layers that do not keep the whole prefix, or of another worker;
- ``medium``: a place that is not a tier here;
- ``duplicate_hash``: a store names a block twice, or a block as its own parent;
- ``incomplete_blocks``: a store has fewer or more tokens than its blocks have; whole blocks are kept.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, cast

import msgspec
from msgspec import Raw

from kv_events.codec_keys import BlockKeys, read_keys
from kv_events.codec_structs import (
    TAGS,
    Array,
    ArrayBatch,
    Arrays,
    Cleared,
    Map,
    MapBatch,
    Maps,
    Raws,
    Removed,
    Scope,
    Stored,
    tag_of,
)
from kv_events.errors import BatchUndecodable
from kv_events.hashing import pack_tokens
from kv_events.types import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVEvent, Tier

MAX_PAYLOAD_BYTES: Final = 64 * 1024 * 1024
_MAX_GROUPS: Final = 1024
_U64: Final = 2**64 - 1
_TOKEN_BYTES: Final = 4
_LIST_AT: Final = 10
_LONG_LIST: Final = 0xDC
_SHORT_LIST: Final = 0x90

_RELEVANT_KINDS: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_ELSEWHERE: Final = frozenset({"REMOTE", "FOREIGN", "remote", "foreign"})
_TIERS: Final = {
    None: Tier.DEVICE,
    "": Tier.DEVICE,
    "GPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "DISK": Tier.DISK,
}

# Everything that msgspec raises for bytes from elsewhere.
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_WHOLE: Final = (
    msgspec.msgpack.Decoder(ArrayBatch[Maps]),
    msgspec.msgpack.Decoder(ArrayBatch[Arrays]),
    msgspec.msgpack.Decoder(MapBatch[Maps]),
    msgspec.msgpack.Decoder(MapBatch[Arrays]),
)
_WHOLE_ARRAYS_FIRST: Final = (_WHOLE[1], _WHOLE[0], _WHOLE[3], _WHOLE[2])
_FRAME: Final = (msgspec.msgpack.Decoder(ArrayBatch[Raw]), msgspec.msgpack.Decoder(MapBatch[Raw]))
_RAWS: Final = msgspec.msgpack.Decoder(Raws)
_EVENT: Final = (msgspec.msgpack.Decoder(Map), msgspec.msgpack.Decoder(Array))

GroupKinds = dict[int, str]


def decode_batch(payload: bytes | memoryview, group_kinds: GroupKinds | None = None) -> EventBatch:
    """Decode one message of a publisher, of either engine and any release.

    Args:
        payload: The message's last frame.
        group_kinds: Kind of attention by group, as earlier stores of the same publisher told: removals of hybrid
            models name the group alone. The caller keeps one for each publisher's life; it is added to here.

    Raises:
        BatchUndecodable: ``payload_bytes``: above 64 MiB. ``msgpack``: not MessagePack, or no batch. ``events``: no
            list, or more than 65,536. ``depth``: nested too deep to be skipped.
    """
    if (payload.nbytes if isinstance(payload, memoryview) else len(payload)) > MAX_PAYLOAD_BYTES:
        raise BatchUndecodable("payload_bytes")
    reader = _Reader({} if group_kinds is None else group_kinds)
    for decoder in _WHOLE if _has_maps(payload) else _WHOLE_ARRAYS_FIRST:
        try:
            batch = decoder.decode(payload)
        except _UNREADABLE:
            continue
        for event in batch.events:
            reader.take(event)
        return reader.batch(batch.ts, batch.dp_rank)
    return _one_by_one(payload, reader)


def _has_maps(payload: bytes | memoryview) -> bool:
    """Guess whether events are maps, so that the decoder that fits is tried first; what is wrong costs time alone.

    A batch in an array begins with its header, nine bytes of time and the header of the list; then comes an event's.
    """
    if len(payload) < _LIST_AT + 4:
        return True
    return payload[_LIST_AT + (3 if payload[_LIST_AT] == _LONG_LIST else 1)] & 0xF0 != _SHORT_LIST


def _one_by_one(payload: bytes | memoryview, reader: "_Reader") -> EventBatch:
    frame = _frame(payload)
    try:
        raws = _RAWS.decode(frame.events)
    except _UNREADABLE as exc:
        raise BatchUndecodable("events") from exc
    for raw in raws:
        event = _event(raw)
        if event is None:
            tag = tag_of(raw)
            reader.drop("malformed" if tag is None or tag in TAGS else "unknown_event")
        else:
            reader.take(event)
    return reader.batch(frame.ts, frame.dp_rank)


def _frame(payload: bytes | memoryview) -> ArrayBatch[Raw] | MapBatch[Raw]:
    for decoder in _FRAME:
        try:
            return decoder.decode(payload)
        except RecursionError as exc:
            raise BatchUndecodable("depth") from exc
        except _UNREADABLE as exc:
            cause = exc
    raise BatchUndecodable("msgpack") from cause


def _event(raw: Raw) -> Map | Array | None:
    for decoder in _EVENT:
        try:
            return decoder.decode(raw)
        except _UNREADABLE:
            continue
    return None


class _Reader:
    """Makes events out of what was decoded, and counts what it leaves out."""

    __slots__ = ("_dropped", "_events", "_group_kinds", "_is_suspect")

    def __init__(self, group_kinds: GroupKinds) -> None:
        self._group_kinds = group_kinds
        self._events: list[KVEvent] = []
        self._dropped: dict[str, int] = {}
        self._is_suspect = False

    def batch(self, timestamp_s: float, dp_rank: int | None) -> EventBatch:
        """Give what was gathered."""
        return EventBatch(timestamp_s, self._events, dp_rank, self._dropped, self._is_suspect)

    def drop(self, reason: str) -> None:
        """Count an event that was left out; a malformed one leaves the view of the cache incomplete."""
        self._dropped[reason] = self._dropped.get(reason, 0) + 1
        self._is_suspect |= reason == "malformed"

    def take(self, event: Map | Array) -> None:
        """Add one event, if it counts."""
        named = event if isinstance(event, Scope) else event.named()
        if not self._is_relevant(named):
            self.drop("irrelevant")
            return
        tier = _TIERS.get(named.medium)
        if tier is None:
            self.drop("medium")
        elif isinstance(named, Stored):
            self._store(named, tier)
        elif isinstance(named, Removed):
            if named.block_hashes:
                self._events.append(BlockRemoved(_hashes(named.block_hashes), tier))
        else:
            self._events.append(AllBlocksCleared(None if named.medium is None else tier))

    def _is_relevant(self, event: Stored | Removed | Cleared) -> bool:
        if (event.locality or event.ownership) and not _ELSEWHERE.isdisjoint((event.locality, event.ownership)):
            return False
        kind, group = event.kv_cache_spec_kind, event.group_idx
        if group is not None:
            if kind is None:
                kind = self._group_kinds.get(group)
            elif len(self._group_kinds) < _MAX_GROUPS:
                self._group_kinds[group] = kind
        return not group if kind is None else kind in _RELEVANT_KINDS

    def _store(self, event: Stored, tier: Tier) -> None:
        hashes = _hashes(event.block_hashes)
        parent = event.parent_block_hash
        if parent is not None:
            parent = _hash(parent)
        blocks, block_size = len(hashes), event.block_size
        whole, rest = divmod(len(event.token_ids), block_size)
        try:
            # With more tokens than blocks nobody knows which of them a hash names.
            if whole > blocks:
                raise ValueError("more tokens than blocks")
            token_bytes, is_eagle = _token_bytes(event.token_ids)
            keys = read_keys(event)
        except ValueError:
            self.drop("malformed")
            return
        if len({*hashes, parent}) <= blocks:
            self.drop("duplicate_hash")
            return
        mm_hashes = keys.mm_hashes
        if rest or whole < blocks:
            self.drop("incomplete_blocks")
            hashes, token_bytes = hashes[:whole], token_bytes[: (whole * block_size + is_eagle) * _TOKEN_BYTES]
            mm_hashes = mm_hashes[:whole] if mm_hashes else None
        if whole:
            stored = BlockStored(hashes, parent, token_bytes, block_size, is_eagle, keys.namespace, mm_hashes, tier)
            self._events += (stored,) if keys.opaque_from is None else _split(stored, keys)


def _hashes(hashes: Sequence[int | bytes]) -> tuple[int, ...]:
    """Bring hashes to 64 bits: SGLang's are signed, and of vLLM's bytes the last eight are its integer."""
    try:
        return tuple([item & _U64 for item in hashes])  # type: ignore[operator]  # bytes come second: integers are usual
    except TypeError:
        return tuple([_hash(item) for item in hashes])


def _hash(item: int | bytes) -> int:
    return item & _U64 if isinstance(item, int) else int.from_bytes(item[-8:], "big")


def _token_bytes(tokens: Sequence[int | tuple[int, int]]) -> tuple[bytes, bool]:
    """Pack plain tokens, or pairs that overlap by one; also tell whether they were pairs.

    Raises:
        ValueError: A mixture of both, pairs that do not overlap, or a token not in [0, 2^32).
    """
    if not tokens or isinstance(tokens[0], int):
        # A pair after it is refused there.
        return pack_tokens(cast("Sequence[int]", tokens)), False
    pairs = [item for item in tokens if isinstance(item, tuple)]
    if len(pairs) < len(tokens) or any(left[1] != right[0] for left, right in pairwise(pairs)):
        raise ValueError("pairs of tokens do not overlap")
    return pack_tokens([*(first for first, _ in pairs), pairs[-1][1]]), True


def _split(stored: BlockStored, keys: BlockKeys) -> list[BlockStored]:
    """Cut a store in two where a block has an unknown key, so that the blocks before it can still be matched."""
    cut = keys.opaque_from
    if cut is None or cut >= len(stored.block_hashes):
        return [stored]
    if cut == 0:
        stored.namespace = keys.opaque
        return [stored]
    tokens = cut * stored.block_size
    first = replace(
        stored,
        block_hashes=stored.block_hashes[:cut],
        token_bytes=stored.token_bytes[: (tokens + stored.is_eagle) * _TOKEN_BYTES],
        mm_hashes=stored.mm_hashes[:cut] if stored.mm_hashes else None,
    )
    second = replace(
        stored,
        block_hashes=stored.block_hashes[cut:],
        parent_hash=stored.block_hashes[cut - 1],
        token_bytes=stored.token_bytes[tokens * _TOKEN_BYTES :],
        namespace=keys.opaque,
        mm_hashes=stored.mm_hashes[cut:] if stored.mm_hashes else None,
    )
    return [first, second]

"""Shapes of the engines' messages, as msgspec decodes them. Pure.

Everything that is decoded has a type and a bound here, which msgspec checks before it makes anything: no list grows
past its limit and nothing nests deeper than seven levels. What has no field here is skipped unread.

Releases differ in two ways: batches and events are arrays or maps, and fields were added at the end. vLLM 0.32 and
SGLang 0.5.21 send arrays of maps; SGLang up to 0.5.19 and older vLLM arrays of arrays; vLLM's source since then maps
of maps.
"""

from typing import Annotated, Final, Generic, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

MAX_EVENTS: Final = 65_536
MAX_TOKENS: Final = 4 * 1024 * 1024
_MAX_KEYS_OF_BLOCK: Final = 1024

Hash = int | Annotated[bytes, Meta(min_length=8)]
Hashes = Annotated[list[Hash], Meta(max_length=MAX_TOKENS)]
# Speculative decoding makes pairs of tokens the keys of SGLang's cache.
Tokens = Annotated[list[int | tuple[int, int]], Meta(max_length=MAX_TOKENS)]
ExtraKeys = Annotated[
    list[Annotated[list[Raw], Meta(max_length=_MAX_KEYS_OF_BLOCK)] | None], Meta(max_length=MAX_TOKENS)
]
_Positive = Annotated[int, Meta(ge=1)]
_Rank = Annotated[int, Meta(ge=0)]


class MmObject(Struct, gc=False):
    """One medium in a block; its digest is unsigned, 64 bits."""

    mm_hash: Annotated[int, Meta(ge=0)]


class MmInfo(Struct, gc=False):
    """All media in a block."""

    mm_objects: Annotated[list[MmObject], Meta(max_length=_MAX_KEYS_OF_BLOCK)] = []


MmInfos = Annotated[list[MmInfo | None], Meta(max_length=MAX_TOKENS)]


class Metadata(Struct, gc=False):
    """What SGLang 0.5.19 puts where vLLM has the LoRA name."""

    cache_salt: str | None = None
    lora_name: str | None = None


class Scope(Struct, kw_only=True, gc=False):
    """Fields that all three events may have.

    Attributes:
        medium: Where the blocks lie; absent means on the device.
        group_idx: Group of layers of a hybrid model.
        kv_cache_spec_kind: Kind of attention of that group.
        locality: ``REMOTE`` for blocks of another worker.
        ownership: The same, from other publishers.
    """

    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None
    ownership: str | None = None


class Stored(Scope, tag="BlockStored", tag_field="type", kw_only=True, gc=False):
    """BlockStored as a map."""

    block_hashes: Hashes
    parent_block_hash: Hash | None = None
    token_ids: Tokens
    block_size: _Positive
    lora_id: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    extra_keys: ExtraKeys | None = None
    block_mm_infos: MmInfos | None = None


class Removed(Scope, tag="BlockRemoved", tag_field="type", kw_only=True, gc=False):
    """BlockRemoved as a map."""

    block_hashes: Hashes


class Cleared(Scope, tag="AllBlocksCleared", tag_field="type", kw_only=True, gc=False):
    """AllBlocksCleared as a map."""


_Tail = int | str | None
_StoredTail = MmInfos | int | str | None


class StoredArray(Struct, array_like=True, tag="BlockStored", gc=False):
    """BlockStored as an array; what follows the LoRA name is told apart by type."""

    block_hashes: Hashes
    parent_block_hash: Hash | None
    token_ids: Tokens
    block_size: _Positive
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | Metadata | None = None
    tail_0: ExtraKeys | int | str | None = None
    tail_1: _StoredTail = None
    tail_2: _StoredTail = None
    tail_3: _StoredTail = None
    tail_4: _StoredTail = None
    tail_5: _StoredTail = None

    def named(self) -> Stored:
        """Give the same as a map."""
        metadata = self.lora_name if isinstance(self.lora_name, Metadata) else None
        lora_name = metadata.lora_name if metadata else self.lora_name
        stored = Stored(
            block_hashes=self.block_hashes,
            parent_block_hash=self.parent_block_hash,
            token_ids=self.token_ids,
            block_size=self.block_size,
            lora_id=self.lora_id,
            medium=self.medium,
            lora_name=lora_name,  # type: ignore[arg-type]  # the metadata is told apart above
            cache_salt=metadata.cache_salt if metadata else None,
            extra_keys=self.tail_0 if isinstance(self.tail_0, list) else None,
        )
        tail = (self.tail_0, self.tail_1, self.tail_2, self.tail_3, self.tail_4, self.tail_5)
        stored.block_mm_infos = next((item for item in tail[1:] if isinstance(item, list)), None)
        _read_tail(stored, *tail)
        return stored


class RemovedArray(Struct, array_like=True, tag="BlockRemoved", gc=False):
    """BlockRemoved as an array."""

    block_hashes: Hashes
    medium: str | None = None
    tail_0: _Tail = None
    tail_1: _Tail = None
    tail_2: _Tail = None
    tail_3: _Tail = None

    def named(self) -> Removed:
        """Give the same as a map."""
        removed = Removed(block_hashes=self.block_hashes, medium=self.medium)
        _read_tail(removed, self.tail_0, self.tail_1, self.tail_2, self.tail_3)
        return removed


class ClearedArray(Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    """AllBlocksCleared as an array."""

    medium: str | None = None
    tail_0: _Tail = None
    tail_1: _Tail = None
    tail_2: _Tail = None

    def named(self) -> Cleared:
        """Give the same as a map."""
        cleared = Cleared(medium=self.medium)
        _read_tail(cleared, self.tail_0, self.tail_1, self.tail_2)
        return cleared


def _read_tail(event: Scope, *tail: object) -> None:
    """Read the end of an array, where publishers left out what they did not use.

    The first integer is the group and a second one the window, which does not matter beside the kind. Names of
    owners come behind the locality.
    """
    for item in tail:
        if isinstance(item, int) and event.group_idx is None:
            event.group_idx = item
        elif isinstance(item, str):
            if item in ("LOCAL", "REMOTE"):
                event.locality = item
            elif event.kv_cache_spec_kind is None and event.locality is None:
                event.kv_cache_spec_kind = item


Map = Stored | Removed | Cleared
Array = StoredArray | RemovedArray | ClearedArray
E = TypeVar("E")


class ArrayBatch(Struct, Generic[E], array_like=True, gc=False):
    """A batch as an array; the rank may be missing, and more may follow."""

    ts: float
    events: E
    dp_rank: _Rank | None = None


class MapBatch(Struct, Generic[E], gc=False):
    """A batch as a map."""

    ts: float
    events: E
    data_parallel_rank: _Rank | None = None
    attn_dp_rank: _Rank | None = None

    @property
    def dp_rank(self) -> int | None:
        """The rank, by either engine's name."""
        return self.attn_dp_rank if self.data_parallel_rank is None else self.data_parallel_rank


class _MapTag(Struct, gc=False):
    type: str


class _ArrayTag(Struct, array_like=True, gc=False):
    type: str


Maps = Annotated[list[Map], Meta(max_length=MAX_EVENTS)]
Arrays = Annotated[list[Array], Meta(max_length=MAX_EVENTS)]
Raws = Annotated[list[Raw], Meta(max_length=MAX_EVENTS)]

TAGS: Final = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
_TAG_DECODERS: Final = (msgspec.msgpack.Decoder(_MapTag), msgspec.msgpack.Decoder(_ArrayTag))


def tag_of(raw: Raw) -> str | None:
    """Name the kind of an event that cannot be decoded, ``None`` if not even that can be read."""
    for decoder in _TAG_DECODERS:
        try:
            return decoder.decode(raw).type
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    return None

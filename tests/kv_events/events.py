"""Events as engines write them, with changes."""

from typing import Any

import msgspec

from kv_events.codec import GroupKinds, decode_batch
from kv_events.hashing import pack_tokens
from kv_events.types import BlockStored, EventBatch, KVEvent

encode = msgspec.msgpack.Encoder().encode
TOKENS = list(range(1, 9))
PLAIN = BlockStored((11, 12), None, pack_tokens(TOKENS), 4)


def stored(**changes: Any) -> dict[str, Any]:
    """Give a store of two blocks of four tokens as vLLM writes it, with changes."""
    return {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": None,
        "token_ids": TOKENS,
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **changes,
    }


def stored_array(*end: Any) -> list[Any]:
    """Give the same store as an array, with ``end`` behind the block size."""
    return ["BlockStored", [11, 12], None, TOKENS, 4, *end]


def removed(**changes: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [11], **changes}


def decode(*events: Any, group_kinds: GroupKinds | None = None) -> EventBatch:
    return decode_batch(encode([1.5, events, 3]), group_kinds)


def only(batch: EventBatch) -> KVEvent:
    """Give the one event of a batch that lost nothing."""
    assert (batch.dropped, batch.is_suspect, len(batch.events)) == ({}, False, 1)
    return batch.events[0]

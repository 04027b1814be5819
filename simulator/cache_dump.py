"""The truth about every rank's cache, for tests that compare it with somebody's index."""

from __future__ import annotations

from array import array
from typing import Any

from simulator.cache import Block, Namespace, PrefixCache
from simulator.core import Core
from simulator.kv_encoding import KvFormat, format_of, name_block


def dump_caches(core: Core) -> dict[str, Any]:
    """Return what ``GET /_cache`` shows: all cached blocks by rank, parents before their children.

    Hashes are those of the KV events, bytes as hexadecimal digits. ``next_sequence`` is the number of
    the rank's next batch, ``null`` without a publisher; ``copies`` counts a block and its duplicates.
    """
    form = format_of(core.options)
    publisher = core.publisher
    return {
        "ranks": [
            {
                "dp_rank": scheduler.rank,
                "block_size": scheduler.cache.page_size,
                "num_blocks": scheduler.cache.num_blocks,
                "stored_blocks": scheduler.cache.stored_blocks,
                "next_sequence": None if publisher is None else publisher.ranks[scheduler.rank].next_sequence,
                "blocks": _blocks(scheduler.cache, form),
            }
            for scheduler in core.schedulers
        ]
    }


def _blocks(cache: PrefixCache, form: KvFormat) -> list[dict[str, Any]]:
    return [_block(namespace, block, form) for namespace, block in cache.stored()]


def _block(namespace: Namespace, block: Block, form: KvFormat) -> dict[str, Any]:
    own = name_block(block, namespace, form)
    parent = None if block.parent is None or block.parent.parent is None else block.parent.digest
    return {
        "hash": _shown(form.name(own)),
        "parent_hash": None if parent is None else _shown(form.name(parent)),
        "tokens": array("I", block.token_bytes).tolist(),
        "copies": 1 + len(block.copies),
        **{name: value or None for name, value in namespace._asdict().items()},
    }


def _shown(name: int | bytes) -> int | str:
    return name.hex() if isinstance(name, bytes) else name

"""Policy ``prefix-approximate``: like ``kv-aware``, but what ranks hold is assumed from what they were sent. Pure.

For engines that publish no events, or publish to nobody here. Without token ids the text itself serves: the same text
makes the same tokens.
"""

from typing import Final

import xxhash

from routers.kv_aware import KvAware
from routers.types import PromptBlocks

# Four bytes of English are about one token.
BYTES_PER_TOKEN: Final = 4
CHUNK_BYTES: Final = 256


class PrefixApproximate(KvAware):
    """``kv-aware`` by another source of overlaps: ``PromptBlocks.overlap`` is filled from ``AssumedBlocks`` alone."""

    name = "prefix-approximate"


def text_blocks(text: bytes, chunk_bytes: int = CHUNK_BYTES) -> PromptBlocks:
    """Cut a text into blocks, in place of its tokens, whose number is estimated.

    Args:
        text: All that makes the prompt, in the order in which it does; adapter and cache salt, if any, before it.
        chunk_bytes: Length of a block, at least 4; what is left at the end is none.

    Raises:
        ValueError: The chunks are too short.
    """
    if chunk_bytes < BYTES_PER_TOKEN:
        raise ValueError(f"chunk_bytes is {chunk_bytes}, must be at least {BYTES_PER_TOKEN}")
    hashes: list[int] = []
    parent = 0
    for start in range(0, len(text) - chunk_bytes + 1, chunk_bytes):
        parent = xxhash.xxh3_64_intdigest(text[start : start + chunk_bytes], parent)
        hashes.append(parent)
    return PromptBlocks(chunk_bytes // BYTES_PER_TOKEN, len(text) // BYTES_PER_TOKEN, hashes)

"""What engines announce about their caches, in one form for all engines and releases. Pure data.

Hashes of engines are opaque: they name a block for later removals and for its children. What a block holds is known
from its tokens and its namespace alone.
"""

import enum
from dataclasses import dataclass


class Tier(enum.StrEnum):
    """Where a block lies."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    # That of the enumeration is Python code, and tiers are looked up several times for each event.
    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True)
class Namespace:
    """Which requests may reuse a block, besides its tokens; the base namespace has all fields unset.

    Attributes:
        lora_name: Adapter, by name.
        lora_id: Adapter of a release that gives no name; never equal to the base model.
        salt: Cache salt.
        opaque: Anything else that separates blocks, which no request can name: such blocks are never matched.
    """

    lora_name: str | None = None
    lora_id: int | None = None
    salt: str | None = None
    opaque: str | None = None


BASE = Namespace()


@dataclass(slots=True)
class BlockStored:
    """Blocks that a cache now holds, in order, each the child of the one before.

    Not changed after it is made; not frozen, since making a frozen one takes several times as long.

    Attributes:
        block_hashes: The engine's names, one for each block, each in [0, 2^64).
        parent_hash: Name of the block before the first; ``None`` at a root.
        token_bytes: Tokens of all blocks, four bytes each, little-endian; with ``is_eagle`` one token more.
        block_size: Tokens in a block.
        is_eagle: Each block covers ``block_size + 1`` tokens, of which the last is the next block's first.
        namespace: As far as the event tells; ``None`` leaves it to the parent, and at a root means the base.
        mm_hashes: Digests of media by block, sorted; ``None`` where no block has any.
        tier: Where the blocks lie.
    """

    block_hashes: tuple[int, ...]
    parent_hash: int | None
    token_bytes: bytes
    block_size: int
    is_eagle: bool = False
    namespace: Namespace | None = None
    mm_hashes: tuple[tuple[int, ...], ...] | None = None
    tier: Tier = Tier.DEVICE


@dataclass(slots=True)
class BlockRemoved:
    """Blocks that a cache has given up. Not changed after it is made.

    Attributes:
        block_hashes: The engine's names, each in [0, 2^64).
        tier: Where the blocks lay.
    """

    block_hashes: tuple[int, ...]
    tier: Tier = Tier.DEVICE


@dataclass(slots=True)
class AllBlocksCleared:
    """The cache of one rank is empty. Not changed after it is made.

    Attributes:
        tier: The only tier that is empty; ``None`` for all of them.
    """

    tier: Tier | None = None


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(slots=True)
class EventBatch:
    """One message of an engine's publisher. Not changed after it is made.

    Attributes:
        timestamp_s: The engine's clock, seconds since the epoch.
        events: What could be read and counts, in order.
        dp_rank: Rank that the engine names, ``None`` if it names none.
        dropped: Events that were left out, by reason.
        is_suspect: A store or a removal was among those that could not be read, so that the view of the cache is no
            longer complete.
    """

    timestamp_s: float
    events: list[KVEvent]
    dp_rank: int | None
    dropped: dict[str, int]
    is_suspect: bool = False

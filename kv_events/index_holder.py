"""What one tier of one rank holds: the engine's names of its blocks, and the index keys that they stand for. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import length_hint

from kv_events.types import Tier

SHARDS = 64
SHARD_MASK = SHARDS - 1
# By the topmost of 64 bits: dictionaries look where the lowest ones say, so those must differ within a shard.
SHARD_SHIFT = 58
# Host and disk tiers are a multiple of the device, of a size that engines do not tell.
LOWER_TIER_FACTOR = 8
# Bits below have masks of which the interpreter has one object each, see ``put_new``.
FIRST_BIT = 9
# With so many blocks ``put_new`` saves more than the object that it makes takes: 2 bytes a block.
MANY_BLOCKS = 16

_found: list[object] = [None]
_is_equal = int.__eq__


class _Probe(int):
    """Equal to an integer like any other, but remembers the object that it was found equal to."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        _found[0] = other
        return _is_equal(self, other)


def canonical(shard: dict[int, int], name: int, key: int, sibling: "Holder | None") -> int:
    """Return the very object that is the key in ``shard``, so that all holders share it; ``key`` must be there.

    A dictionary does not give its keys out. Another holder has the object, under the same name if their engines name
    blocks alike; otherwise 48 bytes for each (rank, block) are worth the half microsecond.
    """
    if sibling is not None:
        same = sibling.names[name >> SHARD_SHIFT].get(name)
        if same is not None and same == key:
            return same
    found = _found[0] if _Probe(key) in shard else key
    return found if isinstance(found, int) else key


class Holder:
    """Blocks in one tier of one rank; owned by the index.

    Attributes:
        rank: Worker id and data-parallel rank.
        tier: Where the blocks lie.
        bit: The holder's bit in the masks of the index.
        names: From the engine's name of a block to its key, in shards by the high bits of the name.
        blocks: Entries in ``names``.
        copies: Names of blocks that the engine holds twice.
        extra_names: How many names besides the first stand for a key, where there are any.
    """

    __slots__ = ("bit", "blocks", "copies", "extra_names", "names", "rank", "tier")

    def __init__(self, rank: tuple[str, int], tier: Tier, bit: int) -> None:
        """Hold nothing yet."""
        self.rank = rank
        self.tier = tier
        self.bit = bit
        self.names: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self.blocks = 0
        self.copies: set[int] = set()
        self.extra_names: dict[int, int] = {}

    def is_empty(self) -> bool:
        """Say whether nothing is left."""
        return not self.blocks

    def add_copy(self, name: int, max_copies: int) -> None:
        """Count a block that is stored again, as far as its engine keeps copies."""
        if max_copies > 1:
            self.copies.add(name)

    def add_name(self, key: int) -> None:
        """Count one more name for a key that the holder already has."""
        self.extra_names[key] = self.extra_names.get(key, 0) + 1

    def drop_name(self, key: int) -> bool:
        """Count one name fewer; true if others remain."""
        left = self.extra_names.get(key, 0)
        if left > 1:
            self.extra_names[key] = left - 1
        elif left:
            del self.extra_names[key]
        return left > 0

    def pop_keys(self, max_blocks: int) -> Iterator[int]:
        """Take up to ``max_blocks`` entries out, and give their keys."""
        while self.blocks and max_blocks > 0:
            table = self.names[-1]
            if not table:
                self.names.pop()
                continue
            self.blocks -= 1
            max_blocks -= 1
            yield table.popitem()[1]


@dataclass(slots=True)
class Rank:
    """One rank; owned by the index.

    Attributes:
        capacity_blocks: Blocks that its device can hold at most.
        max_copies: Copies of one block that its engine may hold.
        holders: What it holds, by tier.
    """

    capacity_blocks: int
    max_copies: int
    holders: dict[Tier, Holder] = field(default_factory=dict)

    def room(self, holder: Holder) -> int:
        """Count the blocks that one of its holders can still take."""
        return self.capacity_blocks * (1 if holder.tier is Tier.DEVICE else LOWER_TIER_FACTOR) - holder.blocks


def put_new(holder: Holder, shards: Sequence[dict[int, int]], names: Sequence[int], keys: Sequence[int]) -> int:
    """Put the blocks of a store up to the first that somebody holds; four fifths of the time of the general way.

    Args:
        holder: Who stores, with room for all of them.
        shards: Masks of holders by key, in shards by the high bits of the key.
        names: Of the blocks.
        keys: Of the base namespace, each another one, as those of a chain are.

    Returns:
        How many were put.
    """
    tables = holder.names
    # An object of this call: what ``setdefault`` gives back is this very one only where nothing was before.
    mask = holder.bit + 0
    left = iter(keys)
    # Whoever holds some of the blocks mostly holds the first of them.
    if keys[0] in shards[keys[0] >> SHARD_SHIFT]:
        return 0
    for name, key in zip(names, left, strict=False):
        shard = shards[key >> SHARD_SHIFT]
        if shard.setdefault(key, mask) is mask:
            if tables[name >> SHARD_SHIFT].setdefault(name, key) is key:
                continue
            del shard[key]
        count = len(keys) - length_hint(left) - 1
        break
    else:
        count = len(keys) - length_hint(left)
    holder.blocks += count
    return count

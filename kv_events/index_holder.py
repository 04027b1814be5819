"""What one tier of one rank holds: the engine's names of its blocks, and the index keys that they stand for. Pure."""

from collections.abc import Iterator

from kv_events.types import Tier

SHARDS = 64
SHARD_MASK = SHARDS - 1
# By the topmost of 64 bits: dictionaries look where the lowest ones say, so those must differ within a shard.
SHARD_SHIFT = 58

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

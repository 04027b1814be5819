"""What goes into the prefix index and what comes out, besides the events. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from kv_events.hashing import chained_hashes, namespace_seed
from kv_events.types import BlockStored, Namespace

RankId = tuple[str, int]

# Sequence hashes of the blocks of an event: the event, its namespace, the sequence hash of its parent.
ChainHashes = Callable[[BlockStored, Namespace, int | None], Sequence[int]]


def chain_hashes(event: BlockStored, namespace: Namespace, parent: int | None) -> list[int]:
    """Compute the sequence hashes of an event's blocks, as lookups compute those of a prompt."""
    seed = namespace_seed(namespace)
    if seed is None:
        raise ValueError("blocks of an opaque namespace have no hashes")
    return chained_hashes(event.token_bytes, event.block_size, seed, parent, event.is_eagle, event.mm_hashes)


@dataclass(slots=True)
class ApplyReport:
    """What came of some events.

    Attributes:
        stored: Blocks that are new to the rank, all tiers.
        removed: Blocks that the rank gave up.
        orphans: Stores whose parent is unknown; nothing of them was applied.
        dropped: Blocks, and events, that were left out, by reason.
        is_over_capacity: More blocks than the engine can hold: removals must have been lost.
    """

    stored: int = 0
    removed: int = 0
    orphans: list[BlockStored] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)
    is_over_capacity: bool = False

    def drop(self, reason: str, count: int = 1) -> None:
        """Count what was left out."""
        self.dropped[reason] = self.dropped.get(reason, 0) + count


class Overlap(msgspec.Struct):
    """Leading blocks of a prompt that ranks hold; ranks that hold none are left out.

    Attributes:
        device: By rank, in blocks. This decides.
        host: The same for host memory, counted from the first block too.
        disk: The same for disk and remote storage.
    """

    device: dict[RankId, int] = msgspec.field(default_factory=dict)
    host: dict[RankId, int] = msgspec.field(default_factory=dict)
    disk: dict[RankId, int] = msgspec.field(default_factory=dict)

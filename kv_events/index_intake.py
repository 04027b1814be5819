"""Brings the events of one source into the index: in order, in pieces, orphans included. Pure."""

from collections import deque
from collections.abc import Iterator

from kv_events.index import ApplyReport, PrefixIndex, RankId
from kv_events.orphans import OrphanLot
from kv_events.types import BlockRemoved, BlockStored, KVEvent

# About a millisecond of work.
PIECE_BLOCKS = 512
_DONE: Iterator[None] = iter(())


class RankIntake:
    """The way of one rank's events into the index; the caller adds and removes the rank.

    Attributes:
        rank: Whose events these are.
        orphans: Stores that wait for their parent.
    """

    def __init__(self, index: PrefixIndex, rank: RankId, orphans: OrphanLot | None = None) -> None:
        """Bring the events of ``rank`` into ``index``."""
        self._index = index
        self.rank = rank
        self.orphans = OrphanLot() if orphans is None else orphans

    def clear(self) -> None:
        """Forget all that the rank holds, and what waits."""
        self._index.clear_rank(self.rank)
        self.orphans.clear()

    def apply(self, event: KVEvent, now_s: float, report: ApplyReport) -> Iterator[None]:
        """Apply an event, and the orphans that it frees, a piece at each step of the iterator.

        A small event that frees nothing is applied at once, and the iterator is empty. The report never lists orphans:
        they are parked, or counted as dropped if there is no room.

        Raises:
            KeyError: The rank is not in the index.
        """
        if isinstance(event, BlockStored):
            if len(event.block_hashes) > PIECE_BLOCKS or len(self.orphans):
                return self._store(event, now_s, report)
            if not self._index.store(self.rank, event, report):
                self._park(event, now_s, report, set())
        elif isinstance(event, BlockRemoved):
            unknown = self._index.remove(self.rank, event, report)
            if unknown:
                missing = len(unknown) - self.orphans.remove(unknown, event.tier)
                if missing:
                    report.drop("unknown_hash", missing)
        else:
            self._index.clear(self.rank, event)
            self.orphans.clear(event.tier)
        return _DONE

    def _store(self, event: BlockStored, now_s: float, report: ApplyReport) -> Iterator[None]:
        todo: deque[tuple[BlockStored, set[int]]] = deque((piece, set()) for piece in pieces(event))
        while todo:
            piece, gone = todo.popleft()
            if not self._index.store(self.rank, piece, report, gone):
                self._park(piece, now_s, report, gone)
            elif len(self.orphans):
                # Before anything that comes later, as if they had come in time.
                todo.extendleft(reversed(self.orphans.claim(piece.block_hashes)))
            if todo:
                yield

    def _park(self, event: BlockStored, now_s: float, report: ApplyReport, gone: set[int]) -> None:
        if not self.orphans.park(event, now_s, gone):
            report.drop("orphan_overflow", len(event.block_hashes))


def pieces(event: BlockStored) -> Iterator[BlockStored]:
    """Cut a store into ones of at most ``PIECE_BLOCKS`` blocks, each the child of the one before."""
    total = len(event.block_hashes)
    if total <= PIECE_BLOCKS:
        yield event
        return
    parent, piece_bytes = event.parent_hash, PIECE_BLOCKS * event.block_size * 4
    for start in range(0, total, PIECE_BLOCKS):
        end = start + PIECE_BLOCKS
        first = start * event.block_size * 4
        yield BlockStored(
            block_hashes=event.block_hashes[start:end],
            parent_hash=parent,
            token_bytes=event.token_bytes[first : first + piece_bytes + 4 * event.is_eagle],
            block_size=event.block_size,
            is_eagle=event.is_eagle,
            # A root without a namespace means the base, which its further pieces then inherit.
            namespace=event.namespace,
            mm_hashes=event.mm_hashes[start:end] if event.mm_hashes else None,
            tier=event.tier,
        )
        parent = event.block_hashes[min(end, total) - 1]

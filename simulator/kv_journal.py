"""What happened in one rank's cache since events were last drained.

Pure: it hangs on the cache and waits to be drained.
"""

from __future__ import annotations

from collections.abc import Sequence

from simulator.cache import Block, Lease
from simulator.kv_encoding import Cleared, KvEvent, KvFormat, Removed, Stored, name_block


class KvJournal:
    """Events in the order in which they happened; evictions in a row become one event."""

    def __init__(self, form: KvFormat, block_size: int) -> None:
        self._form = form
        self._block_size = block_size
        self._events: list[KvEvent] = []
        self._removed: list[bytes] = []

    def blocks_stored(self, lease: Lease, blocks: Sequence[Block]) -> None:
        """Note a chain of new blocks."""
        self._end_removals()
        digests = tuple(name_block(block, lease.namespace, self._form) for block in blocks)
        parent = blocks[0].parent
        self._events.append(
            Stored(
                digests=digests,
                parent=parent.digest or None if parent is not None else None,
                token_bytes=b"".join(block.token_bytes for block in blocks),
                block_size=self._block_size,
                namespace=lease.namespace,
                session_id=lease.session_id,
            )
        )

    def block_removed(self, block: Block) -> None:
        """Note an eviction."""
        self._removed.append(block.digest)

    def all_cleared(self) -> None:
        """Note that everything is gone; what was noted before and not drained stays noted."""
        self._end_removals()
        self._events.append(Cleared())

    def drain(self) -> list[KvEvent]:
        """Return what happened and forget it."""
        self._end_removals()
        events, self._events = self._events, []
        return events

    def _end_removals(self) -> None:
        if self._removed:
            self._events.append(Removed(tuple(self._removed)))
            self._removed = []

"""One rank of this node as gateways have to see it: its newest batches, and all that it holds. Pure.

The newest batches lie in a buffer that all gateways share, each with a place of its own in it. Behind them a mirror of
the engine's cache follows, of which a snapshot is made for a gateway that comes late or is too slow: what it needs is
then no longer in the buffer. While a snapshot is made the mirror stands still.
"""

import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

from kv_events.delivery import DeliveryQueue
from kv_events.errors import DeliverySuspect, SourceMisconfigured
from kv_events.index import PrefixIndex
from kv_events.publisher import PublisherSpec, SourceObserver
from kv_events.relay_snapshot import held_blocks, snapshot_parts
from kv_events.relay_wire import Begin, Part
from relay.buffer import MAX_BUFFERED_BYTES, BatchBuffer

logger = logging.getLogger("forebay.relay")


@dataclass(slots=True, weakref_slot=True)
class Snapshot:
    """All that a rank holds at one moment; lives as long as some gateway still needs it.

    Attributes:
        begin: Its head; ``None`` until its making has begun.
        parts: Blocks, in messages and their bodies; grows while it is made.
        is_whole: Nothing is missing.
        lacks_orphans: Blocks that waited for their parents then are not in it.
    """

    begin: Begin | None = None
    parts: list[tuple[Part, bytes]] = field(default_factory=list)
    is_whole: bool = False
    lacks_orphans: bool = False


class SourceMirror:
    """A rank's batches and blocks.

    Attributes:
        dp_rank: Global rank.
        epoch: Counts the beginnings, from 0.
        reason: Why the epoch began.
        first_seq: Number of the epoch's first batch; ``None`` before it.
        is_connected: The rank's publisher is.
        buffer: Newest batches of the epoch.
        overflows: How often the mirror fell behind its buffer and began anew.
        problem: Why nothing of the rank can be mirrored; empty if it can.
    """

    def __init__(
        self,
        spec: PublisherSpec,
        index: PrefixIndex,
        observer: SourceObserver,
        max_bytes: int = MAX_BUFFERED_BYTES,
    ) -> None:
        """Mirror the source of ``spec`` in ``index``."""
        self.dp_rank = spec.source.dp_rank
        self.epoch = 0
        self.reason = "start"
        self.first_seq: int | None = None
        self.is_connected = False
        self.buffer = BatchBuffer(max_bytes)
        self.overflows = 0
        self.problem = ""
        self._rank = (spec.worker_id, spec.source.dp_rank)
        self._index = index
        self._queue = DeliveryQueue(spec, index, observer)
        self._is_complete = False
        # The next batch for the mirror; ``None`` before the first.
        self._next: int | None = None
        # What this batch and earlier ones stored is no more.
        self._clear_after: int | None = None
        self._snapshot: weakref.ref[Snapshot] | None = None
        self._making: Iterator[tuple[Part, bytes]] | None = None

    # What the source does

    def take(self, seq: int, payload: bytes) -> None:
        """Take a batch; one whose number does not follow begins a new epoch."""
        if self.buffer.next_seq not in (None, seq):
            self.begin_epoch("gap")
        if self.first_seq is None:
            self.first_seq = self._next = seq
            self._is_complete = seq == 0
        self.buffer.add(seq, payload)

    def begin_epoch(self, reason: str) -> None:
        """Forget everything: ``restart`` of the publisher, ``gap`` in its batches, ``overflow`` here."""
        self.epoch += 1
        self.reason = reason
        self.first_seq = self._next = None
        self.buffer.clear()
        self._queue.reset()
        if reason == "restart":
            self._queue.new_life()
            self.problem = ""
        self._is_complete = False
        self._clear_after = None
        self._snapshot = self._making = None

    def clear(self, epoch: int, last_seq: int) -> None:
        """The engine's cache was emptied after a batch: forget what it and earlier ones stored; later ones count.

        Of engines that tell so themselves, as they should, this changes nothing for long.
        """
        end = self.buffer.next_seq
        if epoch != self.epoch or self._next is None or end is None or last_seq >= end:
            return
        if self._next > last_seq + 1:
            # Those that came later are applied once more, to nothing; if one is not held any more, all begins anew.
            self._next = last_seq + 1
            self._queue.reset()
        self._clear_after = last_seq
        self._snapshot = self._making = None

    # What gateways need

    @property
    def has_orphans(self) -> bool:
        """Whether blocks wait for their parents; they are in no snapshot."""
        return self._queue.next_expiry_s() is not None

    def snapshot(self) -> Snapshot:
        """Ask for a snapshot; the one that is being made or used, if a gateway can still go on from it."""
        known = self._snapshot() if self._snapshot else None
        if known is not None and (known.begin is None or self._can_follow(known.begin)):
            return known
        found = Snapshot()
        self._snapshot, self._making = weakref.ref(found), None
        return found

    def _can_follow(self, begin: Begin) -> bool:
        next_seq = self.first_seq if begin.last_seq is None else begin.last_seq + 1
        first = self.buffer.first_seq
        return next_seq is None or first is None or next_seq >= first

    # Work in pieces

    def step(self, now_s: float) -> bool:
        """Do about a millisecond of work; false if there was nothing to do."""
        if not len(self._queue):
            if self._clear_after is not None and self._next == self._clear_after + 1:
                self._clear_after = None
                self._queue.reset()
            snapshot = self._snapshot() if self._snapshot else None
            if snapshot is not None and not snapshot.is_whole:
                self._make(snapshot)
                return True
            if not self._queue_next():
                return False
        try:
            self._queue.step(now_s)
        except SourceMisconfigured as exc:
            logger.error("rank %d: %s", self.dp_rank, exc)
            self.problem = str(exc)
            self._forget()
        except DeliverySuspect:
            self._forget()
        except Exception:
            # Whatever a payload brings about, the next one must be read; gateways get it as it came in any case.
            logger.exception("a batch of rank %d could not be mirrored", self.dp_rank)
            self._forget()
        self._is_complete |= self._queue.is_complete
        return True

    def expire(self, now_s: float) -> None:
        """Drop blocks that have waited for too long for their parents."""
        if self._queue.expire(now_s):
            self._is_complete = False

    def _forget(self) -> None:
        # As every gateway does that applies the same payload.
        self._queue.reset(keeps_queue=True)
        self._is_complete = False

    def _queue_next(self) -> bool:
        if self._next is None or self._next == self.buffer.next_seq:
            return False
        payload = self.buffer.get(self._next)
        if payload is None:
            self.overflows += 1
            logger.warning("rank %d: events came faster than they could be mirrored; it begins anew", self.dp_rank)
            self.begin_epoch("overflow")
            return False
        self._next += 1
        if not self.problem:
            self._queue.add(payload)
        return bool(len(self._queue))

    def _make(self, snapshot: Snapshot) -> None:
        if snapshot.begin is None or self._making is None:
            last_seq = None if self._next is None or self._next == self.first_seq else self._next - 1
            snapshot.lacks_orphans = self.has_orphans
            snapshot.begin = Begin(
                dp_rank=self.dp_rank,
                epoch=self.epoch,
                last_seq=last_seq,
                blocks=held_blocks(self._index, self._rank),
                is_complete=self._is_complete and not snapshot.lacks_orphans,
                is_eagle=self._rank in self._index.eagle_ranks,
                group_kinds=dict(self._queue.group_kinds),
            )
            self._making = snapshot_parts(self._index, self._rank)
        part = next(self._making, None)
        if part is None:
            snapshot.is_whole, self._making = True, None
        else:
            snapshot.parts.append(part)

"""Decodes what a source delivers, checks that it can be its own, and applies it in pieces. Pure."""

from collections import deque
from collections.abc import Iterator

from kv_events.codec import GroupKinds, decode_batch
from kv_events.errors import BatchUndecodable, DeliverySuspect, SourceMisconfigured
from kv_events.index import ApplyReport, PrefixIndex
from kv_events.index_intake import PIECE_BLOCKS, RankIntake
from kv_events.publisher import PublisherSpec, SourceObserver
from kv_events.types import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, Tier

# Engines may announce blocks that are not full. A source that announces nothing else has another block size.
MAX_SMALL_BLOCKS = 64
# What an event costs besides its blocks, in blocks.
EVENT_WORK_BLOCKS = 4


class DeliveryQueue:
    """Payloads of one source on their way into the index, in order.

    Attributes:
        is_complete: Since it was last set to false the whole cache was cleared, or replaced.
    """

    def __init__(self, spec: PublisherSpec, index: PrefixIndex, observer: SourceObserver) -> None:
        """Add the ranks of a source to the index; the caller removes them."""
        self._spec = spec
        self._observer = observer
        self._block_size = spec.source.block_size
        self._small_blocks = 0
        self._group_kinds: GroupKinds = {}
        self._payloads: deque[bytes] = deque()
        self._steps: Iterator[None] | None = None
        self._stored_blocks = 0
        self.is_complete = False
        self._intakes: dict[int, RankIntake] = {}
        for rank in spec.ranks():
            index.add_rank(rank, capacity_blocks=spec.capacity_blocks, max_copies=spec.max_copies)
            self._intakes[rank[1]] = RankIntake(index, rank)

    def __len__(self) -> int:
        """Count the payloads that are not applied yet."""
        return len(self._payloads) + (self._steps is not None)

    @property
    def group_kinds(self) -> GroupKinds:
        """Kinds of attention that payloads have told, by group; whoever loads a snapshot puts its own in."""
        return self._group_kinds

    def add(self, payload: bytes) -> None:
        """Queue a payload."""
        self._payloads.append(payload)

    def reset(self, *, keeps_queue: bool = False) -> None:
        """Forget all that is known of the source, and what is queued."""
        if not keeps_queue:
            self._payloads.clear()
            self._steps = None
        self._stored_blocks = 0
        self.is_complete = False
        for intake in self._intakes.values():
            intake.clear()

    def new_life(self) -> None:
        """Forget what held for the publisher's process."""
        self._group_kinds.clear()

    def step(self, now_s: float) -> None:
        """Do about a millisecond of work.

        Raises:
            DeliverySuspect: What is known of the source can no longer be trusted.
            SourceMisconfigured: The source cannot belong to its ranks.
        """
        if self._steps is None:
            self._steps = self._apply(self._payloads.popleft(), now_s)
        try:
            done = next(self._steps, True)
        except BaseException:
            self._steps = None
            raise
        if done:
            self._steps = None

    def expire(self, now_s: float) -> int:
        """Drop the orphans that are too old; returns how many."""
        dropped = sum(intake.orphans.expire(now_s) for intake in self._intakes.values())
        if dropped:
            self._observer.kv_dropped("orphan_expired", dropped)
        return dropped

    def next_expiry_s(self) -> float | None:
        """Give the time at which the next orphan is too old; ``None`` if there is none."""
        times = [intake.orphans.next_expiry_s() for intake in self._intakes.values()]
        return min((time for time in times if time is not None), default=None)

    def _apply(self, payload: bytes, now_s: float) -> Iterator[None]:
        try:
            batch = decode_batch(payload, self._group_kinds)
        except BatchUndecodable as exc:
            self._observer.kv_dropped(str(exc.args[0]), 1)
            raise DeliverySuspect("undecodable") from exc
        source = self._spec.source
        number = source.dp_rank if batch.dp_rank is None else batch.dp_rank - source.first_rank
        intake = self._intakes.get(number)
        if intake is None:
            is_rank = 0 <= number < self._spec.dp_size
            self._observer.kv_dropped("other_rank" if is_rank else "rank_out_of_range", max(1, len(batch.events)))
            return
        report = ApplyReport(dropped=batch.dropped)
        work = 0
        for event in batch.events:
            if isinstance(event, BlockStored) and not self._has_right_size(event, report):
                continue
            yield from intake.apply(event, now_s, report)
            self._count(event)
            work += EVENT_WORK_BLOCKS + (0 if isinstance(event, AllBlocksCleared) else len(event.block_hashes))
            if work >= PIECE_BLOCKS:
                work = 0
                yield
        self._stored_blocks += report.stored
        if self._spec.capacity_blocks and self._stored_blocks >= self._spec.capacity_blocks and len(self._intakes) == 1:
            self.is_complete = True
        for reason, count in report.dropped.items():
            self._observer.kv_dropped(reason, count)
        if batch.is_suspect or report.is_over_capacity:
            raise DeliverySuspect("over_capacity" if report.is_over_capacity else "malformed")

    def _count(self, event: KVEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            kind = "cleared"
            if event.tier in (None, Tier.DEVICE) and len(self._intakes) == 1:
                self.is_complete = True
        else:
            kind = "removed" if isinstance(event, BlockRemoved) else "stored"
        self._observer.kv_event(self._spec.worker_id, kind)

    def _has_right_size(self, event: BlockStored, report: ApplyReport) -> bool:
        if self._block_size is None:
            self._block_size = event.block_size
        if event.block_size == self._block_size:
            self._small_blocks = -1
            return True
        if event.block_size > self._block_size or len(event.block_hashes) > 1:
            raise SourceMisconfigured(f"blocks of {event.block_size} tokens instead of {self._block_size}")
        if self._small_blocks >= 0:
            self._small_blocks += 1
            if self._small_blocks > MAX_SMALL_BLOCKS:
                raise SourceMisconfigured(f"no block has {self._block_size} tokens")
        report.drop("small_block")
        return False

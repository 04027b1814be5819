"""What one gateway gets of each rank, and when: its place in the batches, or a snapshot. Pure."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kv_events.relay_wire import (
    WINDOW_BYTES,
    Cursor,
    End,
    Events,
    Reset,
    Resume,
    cost_bytes,
    encode,
)
from relay.mirror import Snapshot, SourceMirror


@dataclass(slots=True)
class LinkCounts:
    """What one gateway has cost; only ever grows.

    Attributes:
        sessions: Connections that the gateway has accepted.
        messages: Sent.
        sent_bytes: Sent, as the window counts.
        snapshots: Begun; each beyond one a rank and session means that the gateway was too slow, or asked.
    """

    sessions: int = 0
    messages: int = 0
    sent_bytes: int = 0
    snapshots: int = 0


@dataclass(slots=True)
class _Lane:
    """One rank towards one gateway.

    Attributes:
        mirror: Its source.
        epoch: What the gateway was told.
        next_seq: Batch to send next; ``None`` for the epoch's first.
        wants_snapshot: What comes next is no longer in the buffer, or the gateway asked.
        snapshot: That is being sent.
        sent_parts: Messages of it that are sent, its head included.
        lacks_orphans: So does what the gateway has, until another snapshot is sent.
        may_repeat: It was not sent yet.
    """

    mirror: SourceMirror
    epoch: int
    next_seq: int | None
    wants_snapshot: bool
    snapshot: Snapshot | None = None
    sent_parts: int = 0
    lacks_orphans: bool = False
    may_repeat: bool = True


class Lanes:
    """One session with one gateway: what is to be sent, in order, inside the window.

    Attributes:
        sent_bytes: What was given out, as ``cost_bytes`` counts.
        taken_bytes: What of it the gateway has applied.
    """

    def __init__(self, mirrors: Sequence[SourceMirror], cursors: Sequence[Cursor], counts: LinkCounts) -> None:
        """Go on with each rank where the gateway says, or from a snapshot where it knows nothing that still holds."""
        self.sent_bytes = self.taken_bytes = 0
        self._counts = counts
        self._first: deque[list[bytes]] = deque()
        self._lanes: dict[int, _Lane] = {}
        known = {cursor.dp_rank: cursor for cursor in cursors}
        for mirror in mirrors:
            cursor = known.get(mirror.dp_rank)
            lane = _Lane(mirror, mirror.epoch, None, wants_snapshot=True)
            if cursor is not None and cursor.epoch == mirror.epoch:
                lane.next_seq = None if cursor.last_seq is None else cursor.last_seq + 1
                lane.wants_snapshot = not self._has(lane)
            if not lane.wants_snapshot:
                self._first.append(encode(Resume(mirror.dp_rank, mirror.epoch)))
            self._lanes[mirror.dp_rank] = lane
        self._order = deque(self._lanes.values())

    @property
    def has_room(self) -> bool:
        """Something may be sent."""
        return self.sent_bytes - self.taken_bytes < WINDOW_BYTES

    def resync(self, dp_rank: int) -> None:
        """The gateway wants a snapshot; ranks that are not there are none of its business."""
        lane = self._lanes.get(dp_rank)
        if lane is not None:
            lane.wants_snapshot, lane.snapshot, lane.sent_parts = True, None, 0

    def next_message(self) -> list[bytes] | None:
        """Give the frames to send next, each rank in its turn; ``None`` if there is nothing, or no room."""
        if not self.has_room:
            return None
        frames = self._first.popleft() if self._first else None
        for _ in range(len(self._order)):
            if frames is not None:
                break
            lane = self._order[0]
            self._order.rotate(-1)
            frames = self._next_of(lane)
        if frames is not None:
            cost = cost_bytes(frames)
            self.sent_bytes += cost
            self._counts.sent_bytes += cost
            self._counts.messages += 1
        return frames

    def _next_of(self, lane: _Lane) -> list[bytes] | None:
        mirror = lane.mirror
        if lane.epoch != mirror.epoch:
            lane.epoch, lane.next_seq, lane.wants_snapshot, lane.snapshot = mirror.epoch, None, False, None
            lane.lacks_orphans = False
            return encode(Reset(mirror.dp_rank, mirror.epoch, mirror.reason))
        if lane.lacks_orphans and lane.may_repeat and not mirror.has_orphans:
            # Those that the gateway never had may have found their parents since. Once: more would not end.
            lane.wants_snapshot, lane.may_repeat = True, False
        if not lane.wants_snapshot:
            seq = mirror.first_seq if lane.next_seq is None else lane.next_seq
            if seq is None or seq == mirror.buffer.next_seq:
                return None
            payload = mirror.buffer.get(seq)
            if payload is not None:
                lane.next_seq = seq + 1
                return encode(Events(mirror.dp_rank, mirror.epoch, seq), payload)
            lane.wants_snapshot = True
        return self._next_of_snapshot(lane)

    def _next_of_snapshot(self, lane: _Lane) -> list[bytes] | None:
        if lane.snapshot is None:
            lane.snapshot, lane.sent_parts = lane.mirror.snapshot(), 0
        snapshot = lane.snapshot
        if not snapshot.is_whole or snapshot.begin is None:
            return None
        lane.sent_parts += 1
        if lane.sent_parts == 1:
            self._counts.snapshots += 1
            return encode(snapshot.begin)
        if lane.sent_parts <= len(snapshot.parts) + 1:
            part, body = snapshot.parts[lane.sent_parts - 2]
            return encode(part, body)
        last_seq = snapshot.begin.last_seq
        lane.next_seq = None if last_seq is None else last_seq + 1
        lane.wants_snapshot, lane.lacks_orphans, lane.snapshot = False, snapshot.lacks_orphans, None
        return encode(End(lane.mirror.dp_rank))

    def _has(self, lane: _Lane) -> bool:
        """Whether the batch that is due can be had, now or when it comes."""
        buffer = lane.mirror.buffer
        seq = lane.mirror.first_seq if lane.next_seq is None else lane.next_seq
        return seq is None or seq == buffer.next_seq or buffer.get(seq) is not None

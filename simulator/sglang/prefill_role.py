"""The prefill half of an SGLang pair.

A request waits in its room until decode has joined it, is computed, and waits again until its blocks
have been sent. If decode leaves before that, prefill does not notice: the request stays open until it
is aborted, its client leaves, somebody else joins, or ``--transfer-timeout-s`` is over. For as long as
that a room in which prefill failed stays closed: whoever uses its number again fails at once.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from simulator.core import Core
from simulator.faults import FaultTable
from simulator.handoff import take_transfer_fault
from simulator.log import TransferEntry
from simulator.peer_link import Link, Listener, Message
from simulator.sequence import Finish, FinishKind, Sequence
from simulator.sglang.rooms import ABORTED_BY_REQUEST, Room, prefill_failure

_CLOSED = "the room has failed before"
_DEAD = "Failed to get kvcache from prefill instance, it might be dead"


class _Stage(enum.Enum):
    BOOTSTRAP = "bootstrap"
    PREFILL = "prefill"
    INFLIGHT = "inflight"


@dataclass(slots=True, eq=False)
class _Sender:
    """One request in its room."""

    sequence: Sequence
    meeting: _Meeting
    stage: _Stage = _Stage.BOOTSTRAP
    is_ready: bool = False
    """Its transfer may begin as soon as decode is there."""
    forget_deadline: Callable[[], None] = lambda: None

    @property
    def room(self) -> int:
        room: Room = self.sequence.transfer
        return room.number


@dataclass(slots=True, eq=False)
class _Meeting:
    """A room in use: the first decode engine that joined it is served once, later ones never."""

    key: tuple[int, int]
    senders: list[_Sender] = field(default_factory=list)
    joiner: Link | None = None
    is_served: bool = False


class PrefillRole:
    """Rooms, requests in them, and the bootstrap port."""

    pinned_blocks = 0

    def __init__(self, core: Core, listener: Listener, faults: FaultTable) -> None:
        self._core = core
        self._faults = faults
        self._listener = listener
        self._meetings: dict[tuple[int, int], _Meeting] = {}
        self._senders: dict[int, _Sender] = {}
        self._closed_rooms: set[tuple[int, int]] = set()
        listener.on_link = self._take_link

    @property
    def is_busy(self) -> bool:
        """Whether requests wait for decode, before or after their computation."""
        return any(sender.stage is not _Stage.PREFILL for sender in self._senders.values())

    def rank_of(self, sequence: Sequence) -> int | None:
        """Return the rank that goes with the room."""
        room: Room | None = sequence.transfer
        return None if room is None else room.number % self._core.options.dp_size

    def holds(self, sequence: Sequence) -> bool:
        """Enter the room; go on at once if decode is there."""
        room: Room | None = sequence.transfer
        if room is None or room.is_fake:
            return False
        rank = sequence.rank
        assert rank is not None
        if rank != self.rank_of(sequence) and room.prefill_rank != rank:
            reason = f"follow_bootstrap_room conflict: room {room.number} belongs to another rank than {rank}"
            self._core.end(sequence, prefill_failure("bootstrap", sequence.rid, room.number, reason))
            return True
        key = (room.number, rank)
        if key in self._closed_rooms:
            self._core.end(sequence, prefill_failure("bootstrap", sequence.rid, room.number, _CLOSED))
            return True
        meeting = self._meetings.setdefault(key, _Meeting(key))
        sender = self._senders[id(sequence)] = _Sender(sequence, meeting)
        meeting.senders.append(sender)
        sequence.keeps_lease = True
        self._note("waiting", sender)
        if meeting.joiner is not None:
            sender.stage = _Stage.PREFILL
            return False
        self._arm(sender)
        return True

    def keeps(self, sequence: Sequence) -> bool:
        """Keep a computed request until its blocks have been sent."""
        sender = self._senders.get(id(sequence))
        if sender is None:
            return False
        if sequence.finish is not None and sequence.finish.kind is FinishKind.ABORT:
            self._leave(sender, is_failed=True)
            return False
        sender.stage = _Stage.INFLIGHT
        self._arm(sender)
        fault = take_transfer_fault(self._faults, sequence)
        self._note("computed", sender)
        if fault is None:
            self._core.timers.after(0, lambda: self._ready(sender))
        elif fault.kind == "delay":
            self._core.timers.after(fault.number / 1000, lambda: self._ready(sender))
        elif fault.kind == "drop":
            self._core.timers.after(0, lambda: self._complete(sender))
        elif fault.kind == "fail":
            self._fail(sender, "Failed to send kv chunk")
        return True

    def abort(self, matches: Callable[[Sequence], bool], finish: Finish | None = None) -> list[Sequence]:
        """End the waiting requests that match."""
        hit = [s for s in self._senders.values() if s.stage is not _Stage.PREFILL and matches(s.sequence)]
        for sender in hit:
            self._fail(sender, ABORTED_BY_REQUEST)
        return [sender.sequence for sender in hit]

    def waiting(self, rank: int) -> int:
        """Return how many requests wait for decode to join."""
        return self._count(rank, _Stage.BOOTSTRAP)

    def queues(self, rank: int) -> Mapping[str, int]:
        """Return the lengths of both queues."""
        return {
            "prefill_bootstrap": self._count(rank, _Stage.BOOTSTRAP),
            "prefill_inflight": self._count(rank, _Stage.INFLIGHT),
        }

    def release_pins(self) -> None:
        """Do nothing: nothing outlives its request."""

    def describe(self) -> dict[str, Any]:
        """Return the rooms in use."""
        rooms = [
            {
                "room": meeting.key[0],
                "dp_rank": meeting.key[1],
                "is_joined": meeting.joiner is not None,
                "requests": [{"rid": s.sequence.rid, "stage": s.stage.value} for s in meeting.senders],
            }
            for meeting in self._meetings.values()
        ]
        return {"role": "prefill", "rooms": rooms, "pinned": [], "pinned_blocks": 0}

    def stop(self) -> None:
        """Close the port."""
        self._listener.close()
        self._meetings.clear()
        self._senders.clear()
        self._closed_rooms.clear()

    # -- decode engines --------------------------------------------------------------------------

    def _take_link(self, link: Link) -> None:
        link.on_message = lambda message: self._join(link, message)
        link.on_http = self._answer_http

    def _join(self, link: Link, message: Message) -> None:
        number, rank = message.get("room"), message.get("rank")
        if type(number) is not int or not (rank is None or type(rank) is int):
            link.close()
            return
        key = (number, number % self._core.options.dp_size if rank is None else rank)
        link.send({"joined": True})
        if key in self._closed_rooms:
            link.send({"failed": _DEAD})
            return
        meeting = self._meetings.setdefault(key, _Meeting(key))
        if meeting.joiner is not None:
            return  # never served, as a second sample in one room is not
        meeting.joiner = link
        link.on_closed = lambda: self._joiner_left(meeting)
        for sender in meeting.senders:
            if sender.stage is _Stage.BOOTSTRAP:
                sender.forget_deadline()
                sender.stage = _Stage.PREFILL
                self._core.schedule(sender.sequence)
            elif sender.is_ready:
                self._ready(sender)
        self._core.log.changed()

    def _joiner_left(self, meeting: _Meeting) -> None:
        meeting.joiner = None
        self._tidy(meeting)

    def _answer_http(self, line: bytes) -> bytes:
        options = self._core.options
        target = line.split()[1]
        body = b"OK"
        if target.startswith(b"/route"):
            body = orjson.dumps(
                {
                    "attn_tp_size": 1,
                    "attn_cp_size": 1,
                    "dp_size": options.dp_size,
                    "pp_size": 1,
                    "page_size": options.page_size,
                    "kv_cache_dtype": "auto",
                    "follow_bootstrap_room": True,
                    "prefill_http_port": options.port,
                }
            )
        status = b"200 OK" if target.startswith((b"/route", b"/health")) else b"404 Not Found"
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        return head % (status, len(body)) + body

    # -- course of a request ---------------------------------------------------------------------

    def _ready(self, sender: _Sender) -> None:
        sender.is_ready = True
        if sender.meeting.joiner is None or id(sender.sequence) not in self._senders:
            return
        options = self._core.options
        rate = options.transfer_tokens_per_s
        duration_s = len(sender.sequence.prompt) / rate / options.speedup if rate else 0.0
        self._core.timers.after(duration_s, lambda: self._sent(sender))

    def _sent(self, sender: _Sender) -> None:
        meeting = sender.meeting
        if meeting.joiner is None or id(sender.sequence) not in self._senders:
            return
        if not meeting.is_served:
            meeting.is_served = True
            meeting.joiner.send({"cached_tokens": sender.sequence.cached_tokens})
        self._complete(sender)

    def _complete(self, sender: _Sender) -> None:
        if id(sender.sequence) in self._senders:
            self._note("sent", sender)
            self._leave(sender, is_failed=False)
            sender.sequence.times.finished = self._core.timers.now()
            self._core.release(sender.sequence)
            self._core.conclude(sender.sequence)

    def _fail(self, sender: _Sender, reason: str) -> None:
        stage = "transfer" if sender.stage is _Stage.INFLIGHT else "bootstrap"
        self._note("failed", sender)
        self._leave(sender, is_failed=True)
        self._core.end(sender.sequence, prefill_failure(stage, sender.sequence.rid, sender.room, reason))

    def _leave(self, sender: _Sender, *, is_failed: bool) -> None:
        del self._senders[id(sender.sequence)]
        sender.forget_deadline()
        meeting = sender.meeting
        meeting.senders.remove(sender)
        if is_failed:
            if meeting.joiner is not None and not meeting.is_served:
                meeting.joiner.send({"failed": _DEAD})
            options = self._core.options
            self._closed_rooms.add(meeting.key)
            closed_s = options.transfer_timeout_s / options.speedup
            self._core.timers.after(closed_s, lambda: self._closed_rooms.discard(meeting.key))
        self._tidy(meeting)

    def _tidy(self, meeting: _Meeting) -> None:
        # A served joiner closes its link soon; the room is free for a new pair at once.
        if not meeting.senders and (meeting.joiner is None or meeting.is_served):
            if self._meetings.get(meeting.key) is meeting:
                del self._meetings[meeting.key]
            self._core.log.changed()

    def _arm(self, sender: _Sender) -> None:
        sender.forget_deadline()
        limit_s = self._core.options.transfer_timeout_s
        state = "Bootstrapping" if sender.stage is _Stage.BOOTSTRAP else "WaitingForInput"
        reason = f"Request {sender.room} timed out after {limit_s:.1f}s in KVPoll.{state}"
        delay_s = limit_s / self._core.options.speedup
        sender.forget_deadline = self._core.timers.after(delay_s, lambda: self._fail(sender, reason))

    def _count(self, rank: int, stage: _Stage) -> int:
        return sum(s.stage is stage and s.sequence.rank == rank for s in self._senders.values())

    def _note(self, event: str, sender: _Sender) -> None:
        sequence, core = sender.sequence, self._core
        entry = TransferEntry(core.timers.now(), event, sequence.rid, sender.room, sequence.rank, len(sequence.prompt))
        core.log.add_transfer(entry)

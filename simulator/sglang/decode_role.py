"""The decode half of an SGLang pair.

A request first asks prefill's bootstrap port for its room, then waits for the blocks, and only then is
scheduled. A port that nobody listens on, or a prefill engine that dies, is noticed after a while.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from simulator.core import Core
from simulator.faults import FaultTable
from simulator.handoff import take_transfer_fault
from simulator.log import TransferEntry
from simulator.peer_link import Link, Message
from simulator.sequence import Finish, Sequence
from simulator.sglang.rooms import ABORTED_BY_REQUEST, Room, decode_failure

# Measured with 0.5.23: nobody at the bootstrap port; a prefill process killed during the transfer (3 to 12.6 s).
_NO_HANDSHAKE_S = 14.0
_LOST_PREFILL_S = 10.0


class _Stage(enum.Enum):
    PREALLOC = "prealloc"
    TRANSFER = "transfer"


@dataclass(slots=True, eq=False)
class _Receiver:
    """One request that waits for its blocks."""

    sequence: Sequence
    room: Room
    stage: _Stage = _Stage.PREALLOC
    link: Link | None = None
    is_deaf: bool = False
    """A fault keeps it from hearing of the transfer's end."""
    forget_deadline: Callable[[], None] = lambda: None


class DecodeRole:
    """Requests that wait for prefill."""

    pinned_blocks = 0

    def __init__(self, core: Core, faults: FaultTable, dial: Callable[[str, int], Link]) -> None:
        self._core = core
        self._faults = faults
        self._dial = dial
        self._receivers: dict[int, _Receiver] = {}

    @property
    def is_busy(self) -> bool:
        """Whether requests wait for prefill."""
        return bool(self._receivers)

    def rank_of(self, sequence: Sequence) -> int | None:
        """Leave the rank to the engine."""
        return None

    def holds(self, sequence: Sequence) -> bool:
        """Ask prefill for the blocks."""
        room: Room | None = sequence.transfer
        if room is None:
            return False
        if room.is_fake:
            sequence.remote_cached_tokens = 0
            return False
        receiver = self._receivers[id(sequence)] = _Receiver(sequence, room)
        self._note("waiting", receiver)
        limit_s = self._core.options.transfer_timeout_s
        reason = f"Request {room.number} timed out after {limit_s:.1f}s in KVPoll.WaitingForInput"
        self._fail_later(receiver, limit_s, reason)
        fault = take_transfer_fault(self._faults, sequence)
        if fault is None or fault.kind == "drop":
            receiver.is_deaf = fault is not None
            self._join(receiver)
        elif fault.kind == "delay":
            self._core.timers.after(fault.number / 1000, lambda: self._join(receiver))
        elif fault.kind == "fail":
            receiver.stage = _Stage.TRANSFER
            self._fail(receiver, "Failed to get kvcache from prefill instance, it might be dead")
        return True

    def keeps(self, sequence: Sequence) -> bool:
        """Keep nothing: decode's ends are the pair's."""
        return False

    def abort(self, matches: Callable[[Sequence], bool], finish: Finish | None = None) -> list[Sequence]:
        """End the waiting requests that match; prefill is not told."""
        hit = [receiver for receiver in self._receivers.values() if matches(receiver.sequence)]
        for receiver in hit:
            self._fail(receiver, ABORTED_BY_REQUEST)
        return [receiver.sequence for receiver in hit]

    def waiting(self, rank: int) -> int:
        """Return how many requests wait for prefill."""
        return sum(receiver.sequence.rank == rank for receiver in self._receivers.values())

    def queues(self, rank: int) -> Mapping[str, int]:
        """Return the lengths of both queues."""
        stages = [receiver.stage for receiver in self._receivers.values() if receiver.sequence.rank == rank]
        return {
            "decode_prealloc": stages.count(_Stage.PREALLOC),
            "decode_transfer": stages.count(_Stage.TRANSFER),
        }

    def release_pins(self) -> None:
        """Do nothing: blocks are only received here."""

    def describe(self) -> dict[str, Any]:
        """Return the rooms that are waited for."""
        rooms = [
            {
                "room": receiver.room.number,
                "dp_rank": receiver.sequence.rank,
                "is_joined": receiver.stage is _Stage.TRANSFER,
                "requests": [{"rid": receiver.sequence.rid, "stage": receiver.stage.value}],
            }
            for receiver in self._receivers.values()
        ]
        return {"role": "decode", "rooms": rooms, "pinned": [], "pinned_blocks": 0}

    def stop(self) -> None:
        """Close all connections."""
        for receiver in self._receivers.values():
            if receiver.link is not None:
                receiver.link.close()
        self._receivers.clear()

    def _join(self, receiver: _Receiver) -> None:
        if id(receiver.sequence) not in self._receivers:
            return
        room = receiver.room
        link = receiver.link = self._dial(room.host, room.port)
        link.on_message = lambda message: self._hear(receiver, message)
        link.on_closed = lambda: self._lost(receiver)
        link.send({"room": room.number, "rank": room.prefill_rank})

    def _hear(self, receiver: _Receiver, message: Message) -> None:
        if "joined" in message:
            receiver.stage = _Stage.TRANSFER
            self._note("joined", receiver)
        elif receiver.is_deaf:
            return
        elif "failed" in message:
            self._fail(receiver, message["failed"])
        elif "cached_tokens" in message:
            self._note("received", receiver)
            self._leave(receiver)
            receiver.sequence.remote_cached_tokens = message["cached_tokens"]
            self._core.schedule(receiver.sequence)

    def _lost(self, receiver: _Receiver) -> None:
        given = self._core.options.lost_prefill_s
        if receiver.stage is _Stage.PREALLOC:
            self._fail_later(receiver, _NO_HANDSHAKE_S if given is None else given, ABORTED_BY_REQUEST)
            return
        address = f"{receiver.room.host}:{receiver.room.port}"
        reason = f"Lost connection with prefill instance (bootstrap_addr: {address})"
        self._fail_later(receiver, _LOST_PREFILL_S if given is None else given, reason)

    def _fail_later(self, receiver: _Receiver, delay_s: float, reason: str) -> None:
        receiver.forget_deadline()
        timers, speedup = self._core.timers, self._core.options.speedup
        receiver.forget_deadline = timers.after(delay_s / speedup, lambda: self._fail(receiver, reason))

    def _fail(self, receiver: _Receiver, reason: str) -> None:
        self._note("failed", receiver)
        self._leave(receiver)
        stage = "handshake" if receiver.stage is _Stage.PREALLOC else "transfer"
        self._core.end(receiver.sequence, decode_failure(stage, receiver.sequence.rid, receiver.room.number, reason))

    def _leave(self, receiver: _Receiver) -> None:
        del self._receivers[id(receiver.sequence)]
        receiver.forget_deadline()
        if receiver.link is not None:
            receiver.link.close()

    def _note(self, event: str, receiver: _Receiver) -> None:
        sequence, core = receiver.sequence, self._core
        entry = TransferEntry(
            core.timers.now(), event, sequence.rid, receiver.room.number, sequence.rank, len(sequence.prompt)
        )
        core.log.add_transfer(entry)

"""One rank's batches: events are numbered, kept for replays, and sent, unless a scripted fault interferes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import zmq

from simulator.faulting import GARBAGE
from simulator.faults import Fault, FaultTable
from simulator.kv_encoding import Frames, KvEvent, KvFormat, Stored, Unknown, pack_batch, sequence_bytes
from simulator.kv_journal import KvJournal
from simulator.log import EngineLog, KvBatchEntry
from simulator.options import EngineOptions
from simulator.timers import Timers


class PubSocket(Protocol):
    """A PUB socket, or what stands for one."""

    def send_multipart(self, frames: Frames, flags: int, /) -> object:
        """Send a message, without waiting."""


class Wire:
    """The PUB socket of one rank, with batches that faults hold back."""

    def __init__(self, socket: PubSocket, timers: Timers) -> None:
        self._socket = socket
        self._timers = timers
        self._late: list[Frames] = []
        self._swapped: list[Frames] = []
        self._end_delay: Callable[[], None] | None = None

    def send(self, frames: Frames) -> None:
        """Send in order, then what was waiting for a batch to overtake it."""
        if self._end_delay is not None:
            self._late.append(frames)
        else:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        swapped, self._swapped = self._swapped, []
        for other in swapped:
            self.send(other)

    def swap(self, frames: Frames) -> None:
        """Send after the next batch."""
        self._swapped.append(frames)

    def delay(self, frames: Frames, delay_s: float) -> None:
        """Send ``delay_s`` later, and everything that comes meanwhile behind it."""
        self._late.append(frames)
        if self._end_delay is None:
            self._end_delay = self._timers.after(delay_s, self.release)

    def release(self) -> None:
        """Send all that is held back."""
        if self._end_delay is not None:
            self._end_delay()
            self._end_delay = None
        late, self._late = self._late, []
        for frames in late:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        swapped, self._swapped = self._swapped, []
        for frames in swapped:
            self._socket.send_multipart(frames, zmq.NOBLOCK)


class RankPublisher:
    """One rank's numbered batches: journal in, frames out."""

    def __init__(
        self,
        rank: int,
        options: EngineOptions,
        form: KvFormat,
        wire: Wire,
        faults: FaultTable,
        log: EngineLog,
        restart: Callable[[], None],
    ) -> None:
        self.rank = rank
        self.topic = options.kv_topic.encode()
        self.journal = KvJournal(form, options.page_size)
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=options.kv_buffer_batches)
        """Numbers and payloads that a replay can bring back."""
        self.next_sequence = 0
        self.is_silent = False
        self.is_closed = False
        self._form = form
        self._wire = wire
        self._faults = faults
        self._log = log
        self._restart = restart

    def flush(self) -> None:
        """Publish what the journal has, as one batch; nothing if it has nothing."""
        events = self.journal.drain()
        if events and not self.is_closed:
            self._publish(events)

    def reset(self) -> None:
        """End silence, and send what faults have held back."""
        self.is_silent = False
        self._wire.release()

    def _publish(self, events: list[KvEvent]) -> None:
        fault = self._faults.take_for_rank("kv", self.rank)
        kind = "" if fault is None else fault.kind
        if kind == "restart":
            self._restart()  # the batch is lost with the process
            return
        if kind == "renumber":
            self.next_sequence = 0
            self.buffer.clear()
        sequence, at_s = self.next_sequence, time.time()
        self.next_sequence += 1
        payload = pack_batch(self._form, at_s, events, self.rank)
        if kind != "lose":
            self.buffer.append((sequence, payload))
        if kind == "silence":
            self.is_silent = True
        is_sent = not self.is_silent and kind not in ("drop", "lose")
        # Logged first: whoever reads the batch finds it in the log.
        self._log.add_kv_batch(KvBatchEntry(at_s, self.rank, sequence, len(events), is_sent, kind or None))
        if is_sent:
            if fault is not None:
                payload = _distorted(self._form, kind, at_s, events, self.rank) or payload
            self._send([self.topic, sequence_bytes(sequence), payload], fault)

    def _send(self, frames: Frames, fault: Fault | None) -> None:
        kind = "" if fault is None else fault.kind
        if kind == "reorder":
            self._wire.swap(frames)
        elif kind == "delay" and fault is not None:
            self._wire.delay(frames, fault.number / 1000)
        else:
            self._wire.send(frames)
            if kind == "duplicate":
                self._wire.send(frames)


def _distorted(form: KvFormat, kind: str, at_s: float, events: list[KvEvent], rank: int) -> bytes | None:
    """Return the payload that the fault ``kind`` makes of a batch; ``None`` leaves it as it is."""
    if kind == "garbage":
        return GARBAGE
    if kind == "wrong_rank":
        return pack_batch(form, at_s, events, rank + 1)
    if kind == "unknown_tag":
        return pack_batch(form, at_s, [Unknown(), *events], rank)
    if kind == "wrong_block_size":
        wrong = [replace(e, block_size=e.block_size * 2) if isinstance(e, Stored) else e for e in events]
        return pack_batch(form, at_s, wrong, rank)
    return None

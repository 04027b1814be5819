"""The engine behind the HTTP routes: ids, dispatch, aborts, pauses, and the ranks.

This is SGLang's tokenizer process and schedulers in one. The traps of its cancellation are kept
on purpose, see ``abort``.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from simulator.driver import RankDriver
from simulator.handoff import Handoff
from simulator.kv_publisher import KvPublisher
from simulator.log import AbortEntry, EngineLog
from simulator.options import EngineOptions
from simulator.ranks import make_schedulers
from simulator.sequence import Finish, Sequence, SequenceState
from simulator.text import TokenSource
from simulator.timers import Timers


class Generation(Protocol):
    """Who waits for sequences. The callbacks must not raise."""

    sequences: Seq[Sequence]
    is_stream: bool

    def on_progress(self, sequence: Sequence) -> None:
        """``sequence``, which is streamed, has a new token."""

    def on_finished(self, sequence: Sequence) -> None:
        """``sequence`` has ended."""


@dataclass(slots=True, eq=False)
class _Live:
    """One registered id."""

    sequence: Sequence
    generation: Generation
    rank: int | None
    is_dispatched: bool = False
    is_abort_sent: bool = False
    has_client_left: bool = False
    dispatched_s: float = 0.0


class DuplicateRequest(Exception):
    """An id is still live; ``rid`` names it."""

    def __init__(self, rid: str) -> None:
        super().__init__(f"Duplicate request ID detected: {rid}")
        self.rid = rid


class Core:
    """One boot of the engine; a restart makes a new one.

    ``publisher`` gets the caches' events; ``None`` means that nobody does. Whoever made it closes it.
    """

    def __init__(
        self,
        options: EngineOptions,
        loop: asyncio.AbstractEventLoop,
        log: EngineLog,
        publisher: KvPublisher | None = None,
    ) -> None:
        self.options = options
        self.timers = Timers(loop)
        self.log = log
        self.epoch_offset_s = time.time() - time.monotonic()
        self.boot_id = random.SystemRandom().getrandbits(30)
        self.weight_version = options.weight_version
        self.is_paused = False
        self.last_output_s = 0.0
        self.aborts_accepted = 0
        self.requests_total = 0
        self._live: dict[str, _Live] = {}
        self._held: list[_Live] = []
        self._next_rank = 0
        self._on_idle: list[Callable[[], None]] = []
        self.handoff: Handoff | None = None
        """What the role adds; set once, before any request, by whoever made the core."""
        self.publisher = publisher
        self.schedulers = make_schedulers(options, publisher)
        self._drivers = [RankDriver(loop, s, options.speedup, self._deliver) for s in self.schedulers]

    # -- counts ----------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Sequences being computed, all ranks."""
        return sum(scheduler.running for scheduler in self.schedulers)

    @property
    def waiting(self) -> int:
        """Sequences in the ranks' queues, those that wait for another engine included."""
        return sum(self.waiting_on(scheduler.rank) for scheduler in self.schedulers)

    def waiting_on(self, rank: int) -> int:
        """Return how many of them are ``rank``'s."""
        staged = 0 if self.handoff is None else self.handoff.waiting(rank)
        return self.schedulers[rank].waiting + staged

    @property
    def held(self) -> int:
        """Registered sequences that have not been dispatched."""
        return len(self._held)

    @property
    def live_rids(self) -> list[str]:
        """Registered ids."""
        return list(self._live)

    @property
    def is_busy(self) -> bool:
        """Whether any rank has work, or a request waits for another engine."""
        return self.is_computing or (self.handoff is not None and self.handoff.is_busy)

    @property
    def is_computing(self) -> bool:
        """Whether any scheduler has work."""
        return any(scheduler.running or scheduler.waiting for scheduler in self.schedulers)

    @property
    def pinned_blocks(self) -> int:
        """Blocks of ended sequences that are kept for another engine."""
        return 0 if self.handoff is None else self.handoff.pinned_blocks

    # -- requests --------------------------------------------------------------------------------

    def submit(self, generation: Generation, rank: int | None) -> None:
        """Register all sequences of ``generation`` and dispatch them when the engine lets them.

        Raises:
            DuplicateRequest: If an id is live; nothing is registered then.
        """
        for sequence in generation.sequences:
            if sequence.rid in self._live:
                raise DuplicateRequest(sequence.rid)
        self.requests_total += len(generation.sequences)
        entries = [_Live(sequence, generation, rank) for sequence in generation.sequences]
        for entry in entries:
            self._live[entry.sequence.rid] = entry
        delay_ms = self.options.dynamic_batch_tokenizer_ms
        if self.is_paused or delay_ms:
            self._held.extend(entries)
            if delay_ms and not self.is_paused:
                self.timers.after(delay_ms / 1000, lambda: self._dispatch_held(entries))
            self.log.changed()
            return
        for entry in entries:
            self._dispatch(entry)
        self.log.changed()

    def run_aside(self, generation: Generation, sequence: Sequence, rank: int | None = None) -> None:
        """Run a sequence that no client can name, for instance of a health check."""
        sequence.rank = self._pick_rank(rank, sequence)
        self._enqueue(sequence)

    def probe_sequence(self, owner: Generation) -> Sequence:
        """Return a one-token sequence of a health check."""
        source = TokenSource(self.options.seed, [0], None, 0)
        return Sequence(f"HEALTH_CHECK_{uuid.uuid4().hex}", [0], 1, source, owner)

    def client_left(self, generation: Generation) -> None:
        """Do what SGLang does when the client closes its connection.

        A stream is cancelled at once: what has not been dispatched is dropped, the rest aborted by
        id. A unary call is only looked at every few seconds, counted from its dispatch.
        """
        for entry in [e for e in map(self._entry_of, generation.sequences) if e is not None]:
            if not generation.is_stream:
                entry.has_client_left = True
                if entry.is_dispatched:
                    self._poll_later(entry)
            elif entry.is_dispatched:
                self.abort(entry.sequence.rid, source="disconnect")
            else:
                self._held.remove(entry)
                del self._live[entry.sequence.rid]
                entry.sequence.owner = None
        self.log.changed()

    def stream_over(self, generation: Generation) -> None:
        """Repeat the abort of a stream's ids later, as SGLang does: it hits whoever uses them then."""
        rids = [sequence.rid for sequence in generation.sequences]

        def abort_late() -> None:
            for rid in rids:
                if rid in self._live:
                    self.abort(rid, source="late")

        self.timers.after(self.options.late_abort_s, abort_late)

    # -- aborts ----------------------------------------------------------------------------------

    def abort(self, rid: str, *, abort_all: bool = False, source: str = "request") -> None:
        """Abort by id, with SGLang 0.5.23's traps.

        The front end drops an id that is not exactly live, and every abort of an id after the
        first; that first one counts even if the request has not reached its scheduler, which then
        finds nothing. Behind it the schedulers match by prefix.
        """
        is_accepted = abort_all
        if not abort_all:
            entry = self._live.get(rid) if rid else None
            if entry is not None and not entry.is_abort_sent:
                entry.is_abort_sent = True
                is_accepted = True
        hit: list[str] = []
        if is_accepted:
            self.aborts_accepted += 1
            hit = self._abort_in_schedulers(lambda s: abort_all or s.rid.startswith(rid))
        self.log.add_abort(AbortEntry(self.timers.now(), source, rid, abort_all, is_accepted, tuple(hit)))

    def abort_generation(self, generation: Generation) -> None:
        """Abort exactly the sequences of ``generation``, around all filters (a scripted fault)."""
        own = set(map(id, generation.sequences))
        hit = self._abort_in_schedulers(lambda s: id(s) in own)
        self.log.add_abort(AbortEntry(self.timers.now(), "fault", "", False, True, tuple(hit)))

    def _abort_in_schedulers(self, matches: Callable[[Sequence], bool]) -> list[str]:
        hit = [] if self.handoff is None else [s.rid for s in self.handoff.abort(matches)]
        for driver in self._drivers:
            ended, marked = driver.scheduler.abort(matches, self.timers.now())
            driver.deliver_soon(ended)
            hit += [s.rid for s in (*ended, *marked)]
        return hit

    # -- pause, flush, stop ----------------------------------------------------------------------

    def pause(self, mode: str, on_done: Callable[[], None]) -> None:
        """Pause; ``on_done`` is called when it is done, for mode ``abort`` when nothing runs any more."""
        self.is_paused = True
        if mode == "abort":
            self.abort("", abort_all=True, source="pause")
            self.when_idle(on_done)
            return
        for scheduler in self.schedulers:
            scheduler.is_paused = True
            if mode == "retract":
                scheduler.retract_all(self.timers.now())
                scheduler.on_computed()
        self.log.changed()
        on_done()

    def resume(self) -> None:
        """End a pause and dispatch what has been held back."""
        self.is_paused = False
        for driver in self._drivers:
            driver.scheduler.is_paused = False
            driver.wake()
        self._dispatch_held(list(self._held))

    def freeze(self) -> None:
        """Let simulated time stand still on all ranks, for tests that act between two steps."""
        for driver in self._drivers:
            driver.freeze()

    def thaw(self) -> None:
        """Let simulated time go on."""
        for driver in self._drivers:
            driver.thaw()

    def when_idle(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` once no rank has work, at once if so now; returns a function that forgets it."""
        if not self.is_busy:
            callback()
            return lambda: None
        self._on_idle.append(callback)
        return lambda: self._on_idle.remove(callback) if callback in self._on_idle else None

    def clear_caches(self) -> None:
        """Empty the caches; only while nothing runs."""
        if self.handoff is not None:
            self.handoff.release_pins()
        for scheduler in self.schedulers:
            scheduler.cache.clear()
        if self.publisher is not None:
            self.publisher.cleared()

    def stop(self) -> None:
        """Stop all ranks and timers; nothing is delivered any more."""
        self.timers.close()
        if self.handoff is not None:
            self.handoff.stop()
        for driver in self._drivers:
            driver.stop()
        self._live.clear()
        self._held.clear()
        self._on_idle.clear()

    # -- for the role ----------------------------------------------------------------------------

    def schedule(self, sequence: Sequence) -> None:
        """Give ``sequence`` to the scheduler of its rank."""
        assert sequence.rank is not None
        driver = self._drivers[sequence.rank]
        if not driver.scheduler.add(sequence, self.timers.now()):
            driver.deliver_soon([sequence])
        driver.wake()

    def end(self, sequence: Sequence, finish: Finish) -> None:
        """End a sequence that no scheduler has, and tell its caller soon."""
        assert sequence.rank is not None
        if sequence.finish is None:
            sequence.end(finish)
        sequence.finish = finish
        sequence.state = SequenceState.FINISHED
        sequence.times.finished = self.timers.now()
        self.release(sequence)
        self._drivers[sequence.rank].deliver_soon([sequence])

    def release(self, sequence: Sequence) -> None:
        """Give back the blocks of an ended sequence."""
        assert sequence.rank is not None
        driver = self._drivers[sequence.rank]
        driver.scheduler.release(sequence)
        driver.wake()

    def conclude(self, sequence: Sequence) -> None:
        """Tell the caller of an ended sequence."""
        entry = self._entry_of(sequence)
        if entry is not None:
            del self._live[sequence.rid]
        generation: Generation = sequence.owner
        sequence.owner = None  # no cycle is left for the collector
        generation.on_finished(sequence)
        if self._on_idle and not self.is_busy:
            waiting, self._on_idle = self._on_idle, []
            for callback in waiting:
                callback()
        self.log.changed()

    # -- inside ----------------------------------------------------------------------------------

    def _entry_of(self, sequence: Sequence) -> _Live | None:
        entry = self._live.get(sequence.rid)
        return entry if entry is not None and entry.sequence is sequence else None

    def _pick_rank(self, rank: int | None, sequence: Sequence) -> int:
        if rank is None and self.handoff is not None:
            rank = self.handoff.rank_of(sequence)
        if rank is not None:
            return rank
        picked = self._next_rank
        self._next_rank = (picked + 1) % self.options.dp_size
        return picked

    def _dispatch_held(self, entries: list[_Live]) -> None:
        if self.is_paused:
            return
        for entry in entries:
            if entry in self._held:
                self._held.remove(entry)
                self._dispatch(entry)
        self.log.changed()

    def _dispatch(self, entry: _Live) -> None:
        entry.is_dispatched = True
        entry.rank = self._pick_rank(entry.rank, entry.sequence)
        entry.sequence.rank = entry.rank
        entry.dispatched_s = entry.sequence.times.dispatched = self.timers.now()
        self._enqueue(entry.sequence)
        if entry.has_client_left:
            self._poll_later(entry)

    def _enqueue(self, sequence: Sequence) -> None:
        if self.handoff is None or not self.handoff.holds(sequence):
            self.schedule(sequence)

    def _poll_later(self, entry: _Live) -> None:
        period = self.options.unary_disconnect_poll_s
        waited = self.timers.now() - entry.dispatched_s
        rest = period - waited % period if period else 0.0

        def look() -> None:
            if self._live.get(entry.sequence.rid) is entry:
                self.abort(entry.sequence.rid, source="disconnect")

        self.timers.after(rest, look)

    def _deliver(self, sequence: Sequence) -> None:
        self.last_output_s = self.timers.now()
        if sequence.state is SequenceState.FINISHED:
            if self.handoff is None or not self.handoff.keeps(sequence):
                self.conclude(sequence)
                return
        elif sequence.is_streamed:
            sequence.owner.on_progress(sequence)
        self.log.changed()

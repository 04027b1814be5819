"""Owner of everything that goes on after a client has left: aborts, their retries, and reading legs to their ends."""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from backends.base import Backend
from backends.errors import CallClosed, CallInterrupted, UpstreamError
from backends.leg import Leg
from backends.leg_events import End, GivenUp, LegEnd, LegState, LegTimes, Paused, Resumed, Tick, Told
from backends.sse import EventCutter
from backends.tasks import OwnedTasks
from backends.types import Worker
from backends.upstream.base import UpstreamClient, UpstreamRequest
from backends.upstream.fetch import fetch

logger = logging.getLogger("forebay.aborts")

# Limit of one call of the engine's abort route.
ABORT_CALL_TIMEOUT_S = 2.0
# Concurrent calls of one engine's abort route.
MAX_ABORT_CALLS_PER_WORKER = 64
# Legs that are worked on at one time; above it the oldest are closed without further aborts.
MAX_KEPT = 10_000
# The engine takes no aborts: not from this gateway, or from nobody.
NO_ABORT_ROUTE = frozenset({401, 403, 404, 405})
# Sleeps above this are spread, so that many cancelled at one time do not come back at one time.
JITTER_ABOVE_S = 0.2
JITTER = 0.1
_FINISHED = LegEnd.FINISHED
_TO_BE_TOLD = frozenset({LegState.CALLED_OFF, LegState.TELLING})
# Bound of one event of an answer that nobody reads.
MAX_EVENT_BYTES = 64 * 1024 * 1024


class AbortCounters(Protocol):
    """What the supervisor reports."""

    def abort_sent(self, worker_id: str) -> None:
        """One submission of an abort to an engine's route."""

    def abort_confirmed(self) -> None:
        """A leg ended after an abort."""

    def abort_unconfirmed(self) -> None:
        """A leg outlived every abort and was closed, or could not be told."""

    def handoff_abandoned(self) -> None:
        """A decode leg was closed before it had taken the prompt's blocks over."""


class _Work:
    """What goes on for one leg."""

    __slots__ = ("reader", "submissions", "timer")

    def __init__(self) -> None:
        self.timer: asyncio.TimerHandle | None = None
        self.reader: asyncio.Task[None] | None = None
        self.submissions = 0

    @property
    def is_done(self) -> bool:
        """Nothing goes on any more, though the leg may go on at its exchange."""
        return self.timer is None and self.reader is None and not self.submissions


class AbortSupervisor:
    """Keeps legs that are aborted, drained or owed an abort; every task and timer of it is owned, bounded and counted.

    Args:
        client: Sends the aborts.
        counters: Told of every submission and its effect.
        times: Durations of a leg's life.
        call_timeout_s: Limit of one call of an abort route.
        max_calls_per_worker: Concurrent calls of one engine's abort route.
        max_kept: Legs at one time; the oldest is closed for one above it.
        spread: Random number in [-1, 1] for the jitter of retries.
    """

    def __init__(
        self,
        client: UpstreamClient,
        counters: AbortCounters,
        *,
        times: LegTimes | None = None,
        call_timeout_s: float = ABORT_CALL_TIMEOUT_S,
        max_calls_per_worker: int = MAX_ABORT_CALLS_PER_WORKER,
        max_kept: int = MAX_KEPT,
        spread: Callable[[], float] = lambda: random.uniform(-1, 1),
    ) -> None:
        self._client = client
        self._counters = counters
        times = times or LegTimes()
        # One draw for the process: a leg must not pay for it, and legs are not cancelled in step.
        self.times = replace(times, retry_sleeps_s=_spread(times.retry_sleeps_s, spread))
        self._call_timeout_s = call_timeout_s
        self._max_calls_per_worker = max_calls_per_worker
        self._max_kept = max_kept
        self._tasks = OwnedTasks("abort")
        self._kept: dict[Leg, _Work] = {}
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._refusing: set[str] = set()
        self._progress = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        """Number of legs that are still being worked on; when there are none, of calls that are still under way."""
        return len(self._kept) or len(self._tasks)

    def now(self) -> float:
        """The loop's time."""
        return asyncio.get_running_loop().time()

    def paused(self, worker_id: str) -> None:
        """A worker is paused: aborts for it wait."""
        for leg in [leg for leg in self._kept if leg.worker.id == worker_id]:
            leg.on(Paused(self.now()))

    def resumed(self, worker_id: str) -> None:
        """A worker is no longer paused, or gone."""
        for leg in [leg for leg in self._kept if leg.worker.id == worker_id]:
            leg.on(Resumed(self.now()))

    # What legs ask for.

    def _work(self, leg: Leg) -> _Work | None:
        """The work on a leg, begun if there was none; ``None`` if the leg had to be given up instead."""
        work = self._kept.get(leg)
        if work is None:
            if self._is_closed:
                leg.on(GivenUp())
                return None
            if len(self._kept) >= self._max_kept:
                next(iter(self._kept)).on(GivenUp())
            work = self._kept[leg] = _Work()
        return work

    def wake(self, leg: Leg, at: float) -> None:
        """See ``LegKeeper.wake``."""
        if (work := self._work(leg)) is not None:
            if work.timer is not None:
                work.timer.cancel()
            work.timer = asyncio.get_running_loop().call_at(at, self._tick, leg)

    def _tick(self, leg: Leg) -> None:
        self._kept[leg].timer = None
        leg.on(Tick(self.now(), leg.call.written_at, leg.call.is_over))
        self._settle(leg)

    def _settle(self, leg: Leg) -> None:
        work = self._kept.get(leg)
        if work is not None and work.is_done:
            del self._kept[leg]

    def submit(self, leg: Leg, engine_ids: tuple[str, ...]) -> None:
        """See ``LegKeeper.submit``."""
        if (work := self._work(leg)) is not None:
            work.submissions += 1
            self._tasks.spawn(self._submit(leg, work, engine_ids), engine_ids[0])

    def read_on(self, leg: Leg) -> None:
        """See ``LegKeeper.read_on``."""
        if (work := self._work(leg)) is not None:
            work.reader = self._tasks.spawn(self._read_on(leg), f"read {leg.worker.id}")

    def ended(self, leg: Leg, end: End) -> None:
        """See ``LegKeeper.ended``. Submissions under way come to their own ends."""
        work = self._kept.pop(leg, None)
        if work is not None:
            if work.timer is not None:
                work.timer.cancel()
            if work.reader is not None:
                work.reader.cancel()
            self._progress.set()
        if end.how is _FINISHED:
            return
        if end.how is LegEnd.CONFIRMED:
            self._counters.abort_confirmed()
        elif end.how is LegEnd.UNCONFIRMED:
            self._counters.abort_unconfirmed()
        elif end.how is LegEnd.ABANDONED:
            self._counters.handoff_abandoned()
            if leg.on_abandoned is not None:
                leg.on_abandoned()
        if end.error and leg.is_detached:
            logger.warning("worker %s: an answer that nobody waited for broke off: %s", leg.worker.id, end.error)

    # Aborting.

    async def _submit(self, leg: Leg, work: _Work, engine_ids: tuple[str, ...]) -> None:
        """Send one abort for each id, all at once."""
        if len(engine_ids) == 1:
            is_taken = await self._submit_id(leg, engine_ids[0])
        else:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._submit_id(leg, engine_id)) for engine_id in engine_ids]
            is_taken = all(task.result() for task in tasks)
        work.submissions -= 1
        leg.on(Told(self.now(), is_refused=not is_taken))
        self._settle(leg)
        self._progress.set()

    async def _submit_id(self, leg: Leg, engine_id: str) -> bool:
        """Send one abort; false if the engine takes none, since other failures are for retries.

        An engine that takes aborts answers 200 whatever it did.
        """
        worker = leg.worker
        is_owed = leg.is_ended
        slot = self._slots.setdefault(worker.id, asyncio.Semaphore(self._max_calls_per_worker))
        async with slot:
            if leg.is_ended and not is_owed:
                return True  # it ended in the queue
            try:
                request = leg.backend.abort_request(worker, engine_id)
                self._counters.abort_sent(worker.id)
                async with asyncio.timeout(self._call_timeout_s):
                    status, _ = await fetch(self._client, worker.origin, request)
            except (UpstreamError, TimeoutError):
                return True
            except ValueError:
                logger.exception("worker %s: an abort that cannot be sent", worker.id)
                return False
        if status not in NO_ABORT_ROUTE:
            self._refusing.discard(worker.id)
            return True
        if worker.id not in self._refusing:
            self._refusing.add(worker.id)
            logger.warning("worker %s takes no aborts (status %d), so its calls are closed instead", worker.id, status)
        return False

    async def abort_all(self, workers: Sequence[tuple[Worker, Backend]]) -> dict[str, int | str]:
        """Have engines stop everything that they run, whoever sent it, all engines at once.

        Returns:
            By worker the status of its answer, or why there was none; nothing for engines that know no such request.
        """
        statuses: dict[str, int | str] = {}

        async def ask(worker: Worker, request: UpstreamRequest) -> None:
            try:
                self._counters.abort_sent(worker.id)
                async with asyncio.timeout(self._call_timeout_s):
                    status, _ = await fetch(self._client, worker.origin, request)
                statuses[worker.id] = status
            except TimeoutError:
                statuses[worker.id] = "no answer in time"
            except UpstreamError as exc:
                statuses[worker.id] = str(exc)

        async with asyncio.TaskGroup() as group:
            for worker, backend in workers:
                request = backend.abort_all_request(worker)
                if request is not None:
                    group.create_task(ask(worker, request))
        return statuses

    # Reading.

    async def _read_on(self, leg: Leg) -> None:
        """Read and drop. The end of the answer is the only proof that an abort worked."""
        cutter = EventCutter(MAX_EVENT_BYTES)
        while True:
            try:
                await leg.call.head()
                while data := await leg.call.read():
                    if leg.state is LegState.DRAINING:
                        leg.saw(cutter.feed(data))
            except CallInterrupted:
                continue  # one that was meant for an exchange which had not waited yet
            except UpstreamError as exc:
                leg.end(str(exc))  # the engine ended it, if not politely
            except CallClosed:
                pass  # whoever closed it has ended the leg
            else:
                is_missing = leg.state is LegState.DRAINING
                leg.end("it ended before the output for which it was kept" if is_missing else "")
            return

    async def aclose(self, grace_s: float = 1.0) -> None:
        """Give first aborts ``grace_s`` to get out, then end everything; legs are closed and released.

        Legs that come later are closed at once.
        """
        try:
            async with asyncio.timeout(grace_s):
                while any(self._is_untold(leg, work) for leg, work in self._kept.items()):
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            pass
        self._is_closed = True
        for leg in list(self._kept):
            leg.on(GivenUp())
        await self._tasks.aclose()

    @staticmethod
    def _is_untold(leg: Leg, work: _Work) -> bool:
        return leg.state in _TO_BE_TOLD and (work.submissions > 0 or not leg.is_told)


def _spread(sleeps_s: Sequence[float], spread: Callable[[], float]) -> tuple[float, ...]:
    return tuple(s * (1 + JITTER * spread()) if s > JITTER_ABOVE_S else s for s in sleeps_s)

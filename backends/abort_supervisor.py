"""Owner of everything that goes on after a client has left: aborts, their retries, and reading legs to their ends."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from backends.errors import CallClosed, CallInterrupted, UpstreamError
from backends.leg import Leg
from backends.lifecycle import (
    ABORT_AFTER_RESUME_S,
    ABORT_CALL_TIMEOUT_S,
    ABORT_DELAY_S,
    ABORT_RETRY_SLEEPS_S,
    CancelPlan,
)
from backends.tasks import OwnedTasks
from backends.types import Worker
from backends.upstream.base import UpstreamClient
from backends.upstream.fetch import fetch

logger = logging.getLogger("forebay.aborts")

# Concurrent calls of one engine's abort route.
MAX_ABORT_CALLS_PER_WORKER = 64
# How long a closed unary call on a paused engine is remembered for its later abort.
MAX_PAUSE_S = 3600.0
# Legs that are worked on at one time; above it the oldest are closed without further aborts.
MAX_ADOPTED = 10_000
# The engine takes no aborts: not from this gateway, or from nobody.
NO_ABORT_ROUTE = frozenset({401, 403, 404, 405})
# A wait that took less found the engine running.
_PAUSE_SEEN_S = 0.001


class AbortCounters(Protocol):
    """What the supervisor reports."""

    def abort_sent(self, worker_id: str) -> None:
        """One submission of an abort to an engine's route."""

    def abort_confirmed(self) -> None:
        """A leg ended after an abort."""

    def abort_unconfirmed(self) -> None:
        """A leg outlived every abort and was closed."""


class AbortSupervisor:
    """Carries out cancel plans that take time; every task of it is owned, bounded and counted.

    Args:
        client: Sends the aborts.
        counters: Told of every submission and its effect.
        wait_until_resumed: Returns when the worker is no longer paused, at once if it is not.
        delay_s: Earliest abort after the request was written.
        retry_sleeps_s: Sleeps between submissions, at least one; the last is also the wait after the last one.
        call_timeout_s: Limit of one call of an abort route.
        after_resume_s: From a pause's end to the aborts that waited for it.
        max_pause_s: Aborts that wait for the end of a pause are given up after this time.
        max_calls_per_worker: Concurrent calls of one engine's abort route.
        max_adopted: Legs at one time; the oldest is closed for one above it.
    """

    def __init__(
        self,
        client: UpstreamClient,
        counters: AbortCounters,
        wait_until_resumed: Callable[[Worker], Awaitable[None]],
        *,
        delay_s: float = ABORT_DELAY_S,
        retry_sleeps_s: Sequence[float] = ABORT_RETRY_SLEEPS_S,
        call_timeout_s: float = ABORT_CALL_TIMEOUT_S,
        after_resume_s: float = ABORT_AFTER_RESUME_S,
        max_pause_s: float = MAX_PAUSE_S,
        max_calls_per_worker: int = MAX_ABORT_CALLS_PER_WORKER,
        max_adopted: int = MAX_ADOPTED,
    ) -> None:
        self._client = client
        self._counters = counters
        self._wait_until_resumed = wait_until_resumed
        self._delay_s = delay_s
        self._retry_sleeps_s = retry_sleeps_s
        self._call_timeout_s = call_timeout_s
        self._after_resume_s = after_resume_s
        self._max_pause_s = max_pause_s
        self._max_calls_per_worker = max_calls_per_worker
        self._max_adopted = max_adopted
        self._tasks = OwnedTasks("abort")
        self._adopted: dict[asyncio.Task[None], Leg] = {}
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._refusing: set[str] = set()
        self._is_closed = False

    def __len__(self) -> int:
        """Number of legs and late aborts that are still being worked on."""
        return len(self._tasks)

    def adopt(self, leg: Leg, plan: CancelPlan) -> None:
        """Own ``leg`` from now on and carry ``plan`` out; see ``CancelPlan``."""
        if plan is CancelPlan.CLOSE_AND_ABORT_LATER:
            leg.end()
        if self._is_closed:
            leg.end()
            return
        if len(self._adopted) >= self._max_adopted:
            self._give_up(next(iter(self._adopted)))
        if plan is CancelPlan.CLOSE_AND_ABORT_LATER:
            work = self._abort_after_resume(leg)
        elif plan is CancelPlan.ABORT_THEN_CLOSE:
            work = self._abort_all(leg)
        else:
            work = self._abort_and_read(leg)
        task = self._tasks.spawn(work, leg.engine_ids[0])
        self._adopted[task] = leg
        task.add_done_callback(self._done)  # unlike a finally, it also runs for a task that never began

    def _done(self, task: asyncio.Task[None]) -> None:
        leg = self._adopted.pop(task, None)
        if leg is not None:
            leg.end()

    def _give_up(self, task: asyncio.Task[None]) -> None:
        self._adopted.pop(task).end()
        self._counters.abort_unconfirmed()
        task.cancel()

    def abort_attached(self, leg: Leg, engine_ids: Sequence[str]) -> None:
        """Abort ids of ``leg`` while its exchange goes on reading, so that the caller gets the partial answer.

        All of a leg's ids are aborted by the schedule, and the leg is closed when that is over, or at once on an
        engine that takes no aborts; single items once more after the third retry's time, since nothing shows that an
        item has ended, and they go on where no abort is taken. Ids whose aborts are under way are left to those.
        """
        ids = [one for one in engine_ids if one not in leg.aborting]
        if leg.is_ended or leg.is_detached or self._is_closed or not ids:
            return
        is_whole = len(engine_ids) == len(leg.engine_ids)
        work = self._abort_all_attached(leg) if is_whole else self._abort_items(leg, ids)
        leg.aborting.update(ids)
        task = self._tasks.spawn(work, ids[0])
        leg.stop_aborting.append(task.cancel)

    async def _abort_all_attached(self, leg: Leg) -> None:
        await self._until_running(leg)
        await self._abort_by_schedule(leg, asyncio.Event())

    async def _abort_items(self, leg: Leg, engine_ids: Sequence[str]) -> None:
        await self._until_running(leg)
        for sleep_s in (0.0, self._retry_sleeps_s[:3][-1]):
            await asyncio.sleep(sleep_s)
            await self._until_due(leg)
            await self._submit(leg, engine_ids)
        leg.aborting.difference_update(engine_ids)

    async def _until_running(self, leg: Leg) -> None:
        """Wait out a pause, in which an abort would be spent for nothing, and the dispatch that follows it."""
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        await self._wait_until_resumed(leg.worker)
        if loop.time() - began_at > _PAUSE_SEEN_S:
            await asyncio.sleep(self._after_resume_s)

    async def _until_due(self, leg: Leg) -> None:
        """Wait until the request has been with the engine for the delay; one that is not written yet, until it is."""
        loop = asyncio.get_running_loop()
        while not leg.call.is_over:
            written_at = leg.call.written_at
            wait_s = self._delay_s if written_at is None else written_at + self._delay_s - loop.time()
            if written_at is not None and wait_s <= 0:
                return
            await asyncio.sleep(wait_s)

    async def _submit(self, leg: Leg, engine_ids: Sequence[str]) -> bool:
        """Send one abort for each id, all at once; false if the engine takes none, other failures are for retries."""
        if len(engine_ids) == 1:
            return await self._submit_id(leg, engine_ids[0])
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._submit_id(leg, engine_id)) for engine_id in engine_ids]
        return all(task.result() for task in tasks)

    async def _submit_id(self, leg: Leg, engine_id: str) -> bool:
        """Send one abort. An engine that takes it answers 200 whatever it did, so only a refusal says something."""
        worker = leg.worker
        slot = self._slots.setdefault(worker.id, asyncio.Semaphore(self._max_calls_per_worker))
        async with slot:
            self._counters.abort_sent(worker.id)
            try:
                async with asyncio.timeout(self._call_timeout_s):
                    status, _ = await fetch(self._client, worker.origin, leg.backend.abort_request(worker, engine_id))
            except (UpstreamError, TimeoutError):
                return True
        if status not in NO_ABORT_ROUTE:
            self._refusing.discard(worker.id)
            return True
        if worker.id not in self._refusing:
            self._refusing.add(worker.id)
            logger.warning("worker %s takes no aborts (status %d), so its calls are closed instead", worker.id, status)
        return False

    async def _abort_all(self, leg: Leg) -> None:
        await self._until_due(leg)
        if not leg.call.is_over:
            await self._submit(leg, leg.engine_ids)

    async def _abort_and_read(self, leg: Leg) -> None:
        """Abort by the schedule while reading on: the end of the answer is the only proof that an abort worked."""
        was_told = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            aborts = group.create_task(self._abort_by_schedule(leg, was_told))
            if not await self._read_to_end(leg):
                self._counters.abort_unconfirmed()
            elif was_told.is_set():
                self._counters.abort_confirmed()
            aborts.cancel()

    async def _abort_by_schedule(self, leg: Leg, was_told: asyncio.Event) -> None:
        """Submit all ids again and again until the answer has ended or the engine takes none; then close the call.

        Args:
            leg: The request.
            was_told: Set when the first submission goes out.
        """
        for sleep_s in (0.0, *self._retry_sleeps_s):
            await asyncio.sleep(sleep_s)
            await self._until_due(leg)
            if leg.call.is_over:
                return
            was_told.set()
            if not await self._submit(leg, leg.engine_ids):
                break
        else:
            await asyncio.sleep(self._retry_sleeps_s[-1])
        if not leg.call.is_over:  # what has arrived is still the reader's
            leg.call.close()

    async def _read_to_end(self, leg: Leg) -> bool:
        """Read and drop; false if the call had to be closed."""
        while True:
            try:
                await leg.call.head()
                while await leg.call.read():
                    pass
            except CallInterrupted:
                continue  # one that was meant for an exchange which had not waited yet
            except UpstreamError:
                return True  # the engine ended it, if not politely
            except CallClosed:
                return False
            return True

    async def _abort_after_resume(self, leg: Leg) -> None:
        try:
            async with asyncio.timeout(self._max_pause_s):
                await self._wait_until_resumed(leg.worker)
        except TimeoutError:
            self._counters.abort_unconfirmed()
            return
        await asyncio.sleep(self._after_resume_s)
        await self._submit(leg, leg.engine_ids)

    async def aclose(self, grace_s: float = 1.0) -> None:
        """Give first aborts ``grace_s`` to get out, then end everything; legs are closed and released.

        Legs that come later are closed at once.
        """
        await self._tasks.aclose(grace_s)
        self._is_closed = True

"""Owner of everything that goes on after a client has left: aborts, their retries, and reading legs to their ends."""

import asyncio
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

# Concurrent calls of one engine's abort route.
MAX_ABORT_CALLS_PER_WORKER = 64
# How long a closed unary call on a paused engine is remembered for its later abort.
MAX_PAUSE_S = 3600.0


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
        wait_until_resumed: Returns when the worker is no longer paused.
        delay_s: Earliest abort after the request was written.
    """

    def __init__(
        self,
        client: UpstreamClient,
        counters: AbortCounters,
        wait_until_resumed: Callable[[Worker], Awaitable[None]],
        *,
        delay_s: float = ABORT_DELAY_S,
    ) -> None:
        self._client = client
        self._counters = counters
        self._wait_until_resumed = wait_until_resumed
        self._delay_s = delay_s
        self._tasks = OwnedTasks("abort")
        self._slots: dict[str, asyncio.Semaphore] = {}

    def __len__(self) -> int:
        """Number of legs and late aborts that are still being worked on."""
        return len(self._tasks)

    def adopt(self, leg: Leg, plan: CancelPlan) -> None:
        """Own ``leg`` from now on and carry ``plan`` out; see ``CancelPlan``."""
        if plan is CancelPlan.CLOSE_AND_ABORT_LATER:
            leg.end()
            self._tasks.spawn(self._abort_after_resume(leg), leg.engine_ids[0])
        elif plan is CancelPlan.ABORT_THEN_CLOSE:
            self._tasks.spawn(self._abort_then_close(leg), leg.engine_ids[0])
        else:
            self._tasks.spawn(self._abort_and_read(leg), leg.engine_ids[0])

    def abort_attached(self, leg: Leg, engine_ids: Sequence[str]) -> None:
        """Abort ids of ``leg`` while its exchange goes on reading, so that the caller gets the partial answer.

        All of a leg's ids are aborted by the schedule, and the leg is closed when that is over; single items once
        more after the first retry's time, since nothing shows that an item has ended.
        """
        if leg.is_ended:
            return
        if len(engine_ids) == len(leg.engine_ids):
            work = self._abort_by_schedule(leg)
        else:
            work = self._abort_items(leg, engine_ids)
        task = self._tasks.spawn(work, engine_ids[0])
        leg.stop_aborting.append(task.cancel)

    async def _abort_items(self, leg: Leg, engine_ids: Sequence[str]) -> None:
        for sleep_s in (0.0, ABORT_RETRY_SLEEPS_S[2]):
            await asyncio.sleep(sleep_s)
            await self.submit(leg, engine_ids)

    async def submit(self, leg: Leg, engine_ids: Sequence[str] | None = None) -> None:
        """Send one abort for each id, not sooner than the delay; failures are left to the retries.

        Args:
            leg: The request.
            engine_ids: Some of its ids, ``None`` for all.
        """
        written_at = leg.call.written_at
        if written_at is not None:
            wait_s = written_at + self._delay_s - asyncio.get_running_loop().time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
        for engine_id in engine_ids or leg.engine_ids:
            await self.submit_id(leg, engine_id)

    async def submit_id(self, leg: Leg, engine_id: str) -> int:
        """Send one abort for one id; return the engine's status, 0 if it gave none in time."""
        slot = self._slots.setdefault(leg.worker.id, asyncio.Semaphore(MAX_ABORT_CALLS_PER_WORKER))
        async with slot:
            self._counters.abort_sent(leg.worker.id)
            try:
                async with asyncio.timeout(ABORT_CALL_TIMEOUT_S):
                    request = leg.backend.abort_request(leg.worker, engine_id)
                    status, _ = await fetch(self._client, leg.worker.origin, request)
            except (UpstreamError, TimeoutError):
                return 0
            return status

    async def _abort_then_close(self, leg: Leg) -> None:
        try:
            await self.submit(leg)
        finally:
            leg.end()

    async def _abort_and_read(self, leg: Leg) -> None:
        """Abort by the schedule while reading on: the end of the answer is the only proof that an abort worked."""
        try:
            async with asyncio.TaskGroup() as group:
                aborts = group.create_task(self._abort_by_schedule(leg))
                if await self._read_to_end(leg):
                    self._counters.abort_confirmed()
                else:
                    self._counters.abort_unconfirmed()
                aborts.cancel()
        finally:
            leg.end()

    async def _abort_by_schedule(self, leg: Leg) -> None:
        for sleep_s in (0.0, *ABORT_RETRY_SLEEPS_S):
            await asyncio.sleep(sleep_s)
            await self.submit(leg)
        await asyncio.sleep(ABORT_RETRY_SLEEPS_S[-1])
        leg.call.close()

    async def _read_to_end(self, leg: Leg) -> bool:
        """Read and drop; false if the call had to be closed."""
        while True:
            try:
                await leg.call.head()
                while await leg.call.read():
                    pass
            except CallInterrupted:
                continue  # the interruption that took the leg from its exchange
            except UpstreamError:
                return True  # the engine ended it, if not politely
            except CallClosed:
                return False
            return True

    async def _abort_after_resume(self, leg: Leg) -> None:
        try:
            async with asyncio.timeout(MAX_PAUSE_S):
                await self._wait_until_resumed(leg.worker)
        except TimeoutError:
            self._counters.abort_unconfirmed()
            return
        await asyncio.sleep(ABORT_AFTER_RESUME_S)
        await self.submit(leg)

    async def aclose(self, grace_s: float = 1.0) -> None:
        """Give first aborts ``grace_s`` to get out, then end everything; legs are closed and released."""
        await self._tasks.aclose(grace_s)

"""Runs one rank's scheduler in real time on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from simulator.scheduler import Scheduler
from simulator.sequence import Sequence

# With all delays 0 a turn of the loop may run several steps, so that short answers need one turn;
# this bounds the tokens of one turn so that the sockets are looked at often enough.
_TOKENS_PER_TURN = 256
_STEPS_PER_TURN = 32
# A step that is late by more than this is not caught up with: the machine was too slow.
_CATCH_UP_S = 0.05


class RankDriver:
    """Begins and finishes steps, and delivers their news.

    Simulated durations are divided by ``speedup``. ``deliver`` is called for every sequence with
    news, never from inside ``wake``.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        scheduler: Scheduler,
        speedup: float,
        deliver: Callable[[Sequence], None],
    ) -> None:
        self.scheduler = scheduler
        self._loop = loop
        self._speedup = speedup
        self._deliver = deliver
        self._handle: asyncio.Handle | None = None
        self._is_in_step = False
        self._is_frozen = False
        self._due = 0.0
        self._ended: list[Sequence] = []

    def wake(self) -> None:
        """Look for work soon."""
        if self._handle is None and not self._is_frozen:
            self._handle = self._loop.call_soon(self._turn)

    def freeze(self) -> None:
        """Let simulated time stand still; requests still come in, wait and are aborted."""
        self._is_frozen = True
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def thaw(self) -> None:
        """Let time go on; a step that was under way ends at once."""
        self._is_frozen = False
        self._due = 0.0
        self.wake()

    def deliver_soon(self, ended: list[Sequence]) -> None:
        """Deliver sequences that ended outside a step."""
        if ended:
            self._ended.extend(ended)
            self._loop.call_soon(self._deliver_ended)

    def stop(self) -> None:
        """Do nothing any more."""
        if self._handle is not None:
            self._handle.cancel()
        # A handle that never runs keeps wake() from scheduling another one.
        self._handle = asyncio.Handle(self._deliver_ended, (), self._loop)
        self._ended.clear()

    def _deliver_ended(self) -> None:
        self.scheduler.on_computed()
        ended, self._ended = self._ended, []
        for sequence in ended:
            self._deliver(sequence)

    def _turn(self) -> None:
        handle = self._handle
        steps = tokens = 0
        while True:
            now = time.monotonic()
            if self._is_in_step:
                if self._due > now + 1e-4:
                    self._handle = self._loop.call_later(self._due - now, self._turn)
                    return
                self._is_in_step = False
                steps += 1
                for sequence in self.scheduler.finish(now):
                    tokens += 1
                    self._deliver(sequence)
                if self._handle is not handle:
                    return  # stopped or frozen by what it delivered
            if steps >= _STEPS_PER_TURN or tokens >= _TOKENS_PER_TURN:
                self._handle = self._loop.call_soon(self._turn)
                return
            duration = self.scheduler.begin(now)
            if duration is None:
                self._handle = None
                self._due = 0.0
                return
            self._is_in_step = True
            self._due = max(self._due, now - _CATCH_UP_S if self._due else now) + duration / self._speedup

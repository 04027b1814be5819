"""The one owner of everything that the engine does later."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable


class Timers:
    """Callbacks that wait for their time; all of them end with ``close``."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # By number, since a callback that knew its own handle would be a cycle for the collector.
        self._handles: dict[int, asyncio.TimerHandle] = {}
        self._numbers = itertools.count()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._handles)

    def now(self) -> float:
        """Return monotonic time in seconds; a loop's own time may be rounded to milliseconds."""
        return time.monotonic()

    def after(self, delay_s: float, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` in ``delay_s`` seconds; returns a function that cancels it.

        Does nothing after ``close``.
        """
        if self._is_closed:
            return lambda: None
        number = next(self._numbers)
        self._handles[number] = self._loop.call_later(delay_s, self._run, number, callback)
        return lambda: self._cancel(number)

    def close(self) -> None:
        """Cancel what has not run yet, and take nothing new."""
        self._is_closed = True
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()

    def _run(self, number: int, callback: Callable[[], None]) -> None:
        self._handles.pop(number, None)
        callback()

    def _cancel(self, number: int) -> None:
        handle = self._handles.pop(number, None)
        if handle is not None:
            handle.cancel()

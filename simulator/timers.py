"""The one owner of everything that the engine does later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Timers:
    """Callbacks that wait for their time; all of them end with ``close``."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handles: set[asyncio.TimerHandle] = set()
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

        def run() -> None:
            self._handles.discard(handle)
            callback()

        def cancel() -> None:
            self._handles.discard(handle)
            handle.cancel()

        handle = self._loop.call_later(delay_s, run)
        self._handles.add(handle)
        return cancel

    def close(self) -> None:
        """Cancel what has not run yet, and take nothing new."""
        self._is_closed = True
        for handle in self._handles:
            handle.cancel()
        self._handles.clear()

"""Gives the memory of forgotten blocks back between other work of the loop. Shell."""

import asyncio

from kv_events.index import PrefixIndex

# One to two milliseconds of work, then at least as long for everything else.
STEP_BLOCKS = 1_000
PAUSE_S = 0.002


class IndexSweeper:
    """Calls ``PrefixIndex.collect`` as long as there is something to collect. Its owner closes it."""

    def __init__(self, index: PrefixIndex) -> None:
        """Sweep ``index`` on the running loop, when told to."""
        self._index = index
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        """Begin, since a rank was cleared or removed."""
        if self._timer is None:
            self._timer = self._loop.call_later(PAUSE_S, self._step)

    def close(self) -> None:
        """Stop; what is left stays in memory."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _step(self) -> None:
        self._timer = None
        if self._index.collect(STEP_BLOCKS):
            self.wake()

"""Owner of what a request over a pair has going on beside its exchange, and may leave behind when that ends.

Both legs are read here, since prefill has to be read on when the client has its answer or is gone: the transfer of the
prompt's blocks needs it. What is left behind is bounded by the pair machine's own limits, counted, and ended at
shutdown.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from backends.leg_events import Cause
from gateway.tasks import OwnedTasks


class Tail(Protocol):
    """A prefill leg that goes on without its exchange."""

    def cancel(self, cause: Cause) -> None:
        """Stop it; it leaves when that is done."""


class PrefillTails:
    """Process-wide set of readers, and of prefills that nobody waits for.

    ``len`` is the number of the latter.
    """

    def __init__(self) -> None:
        self._readers = OwnedTasks("pair")
        self._tails: set[Tail] = set()
        self._empty: asyncio.Event | None = None

    def __len__(self) -> int:
        """Number of prefills that nobody waits for."""
        return len(self._tails)

    @property
    def readers(self) -> int:
        """Number of legs that are being read."""
        return len(self._readers)

    def read(self, reader: Coroutine[Any, Any, None], label: str) -> None:
        """Run the reader of a leg; it ends when the leg does."""
        self._readers.spawn(reader, label)

    def add(self, tail: Tail) -> None:
        """A prefill goes on alone."""
        self._tails.add(tail)

    def discard(self, tail: Tail) -> None:
        """It has ended, or never went on alone."""
        self._tails.discard(tail)
        if self._empty is not None and not self._tails:
            self._empty.set()
            self._empty = None

    async def wait_empty(self) -> None:
        """Wait until no prefill goes on alone; meant for the time when nothing is admitted any more."""
        while self._tails:
            if self._empty is None:
                self._empty = asyncio.Event()
            await self._empty.wait()

    async def stop(self) -> None:
        """The gateway stops: cancel what is left at its engines."""
        for tail in tuple(self._tails):
            tail.cancel(Cause.SHUTDOWN)
        await asyncio.sleep(0)  # they act in the loop's next turn

    async def aclose(self) -> None:
        """Stop all of it and wait until no reader is left."""
        await self.stop()
        await self._readers.aclose()

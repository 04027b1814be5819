"""A time limit that does not count the time in which this process itself was not run."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_TICK_S = 0.1


@asynccontextmanager
async def patience(limit_s: float) -> AsyncIterator[None]:
    """Like ``asyncio.timeout``, measured in turns of the loop.

    Where dozens of processes share two cores, this one may stand still for seconds while the answer is already there;
    a clock on the wall would then end the wait before the answer is read.

    Raises:
        TimeoutError: The block has not ended while the loop has turned for that long.
    """
    loop = asyncio.get_running_loop()
    left = limit_s / _TICK_S
    handle: asyncio.TimerHandle

    def tick() -> None:
        nonlocal left, handle
        left -= 1
        if left <= 0:
            scope.reschedule(loop.time())
        else:
            handle = loop.call_later(_TICK_S, tick)

    async with asyncio.timeout(None) as scope:
        handle = loop.call_later(_TICK_S, tick)
        try:
            yield
        finally:
            handle.cancel()

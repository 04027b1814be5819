"""Long computations in slices, between which the loop serves others.

A generator does the work, yields wherever it may be interrupted, and returns the result.
"""

import asyncio
import time
from collections.abc import Generator
from typing import TypeVar

_T = TypeVar("_T")
Slices = Generator[None, None, _T]
# Other streams wait this long at most, and one slice more.
HOLD_S = 0.002


async def run(slices: Slices[_T], *, hold_s: float = HOLD_S) -> _T:
    """Do the work on the loop, giving way after every ``hold_s`` seconds.

    Cancelling ends the work between two slices.

    Raises:
        Exception: What the work raises.
    """
    begun = time.perf_counter()
    try:
        while True:
            next(slices)
            if time.perf_counter() - begun >= hold_s:
                await asyncio.sleep(0)
                begun = time.perf_counter()
    except StopIteration as end:
        result: _T = end.value
        return result
    finally:
        slices.close()


def whole(slices: Slices[_T]) -> _T:
    """Do all of the work at once.

    Raises:
        Exception: What the work raises.
    """
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: _T = end.value
            return result

"""CPU time of one call, for benchmarks of single functions."""

import time
from collections.abc import Callable


def least_cpu_us(call: Callable[[], object], repeats: int, repeat_s: float) -> float:
    """Return the CPU time of one ``call`` in us: the least mean of ``repeats`` runs of about ``repeat_s`` each.

    The least is what other work on the machine disturbs the least.
    """
    started = time.thread_time()
    call()
    count = max(1, int(repeat_s / max(time.thread_time() - started, 1e-6)))
    least = float("inf")
    for _ in range(repeats):
        started = time.thread_time()
        for _ in range(count):
            call()
        least = min(least, (time.thread_time() - started) / count)
    return least * 1e6

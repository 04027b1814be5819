"""CPU time and memory of other processes, from ``/proc``; and which core a process runs on."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")
# Core of the process under test, and core of engines and load.
TEST_CORE: Final = 0
LOAD_CORE: Final = 1
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class CpuTime:
    """CPU time that a process has used since it began, all threads together.

    Attributes:
        busy_s: User and system time.
        waited_s: Time in which it could have run but had no core, which tells how busy the core was with others.
    """

    busy_s: float
    waited_s: float

    def since(self, start: "CpuTime") -> "CpuTime":
        """What was used after ``start``."""
        return CpuTime(self.busy_s - start.busy_s, self.waited_s - start.waited_s)


def parse_stat(text: str) -> int:
    """User and system time in clock ticks, all threads, from the text of ``/proc/PID/stat``.

    Raises:
        ValueError: The text is something else.
    """
    # The command stands in parentheses and may hold spaces and parentheses itself.
    _, found, rest = text.rpartition(") ")
    fields = rest.split()
    if not found or len(fields) < 13:
        raise ValueError(f"not the text of a stat file: {text[:80]!r}")
    return int(fields[11]) + int(fields[12])


def parse_schedstat(text: str) -> CpuTime:
    """CPU time of one thread from the text of its ``schedstat``, which counts nanoseconds.

    Raises:
        ValueError: The text is something else.
    """
    fields = text.split()
    if len(fields) != 3:
        raise ValueError(f"not the text of a schedstat file: {text[:80]!r}")
    return CpuTime(int(fields[0]) / 1e9, int(fields[1]) / 1e9)


def parse_rss(text: str) -> int:
    """Resident bytes from the text of ``/proc/PID/smaps_rollup`` or ``/proc/PID/status``.

    Raises:
        ValueError: The text has no such line.
    """
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name in ("Rss", "VmRSS"):
            return int(value.split()[0]) * 1024
    raise ValueError("no resident size in the text")


def cpu_time(pid: int, proc: Path = PROC) -> CpuTime:
    """CPU time of a process: in nanoseconds where the kernel counts so, else in ticks of ``/proc/PID/stat``.

    Both count the same; a tick is 10 ms, which is coarse for short measurements.

    Raises:
        OSError: There is no such process.
    """
    threads = list((proc / str(pid) / "task").iterdir())
    try:
        times = [parse_schedstat((thread / "schedstat").read_text()) for thread in threads]
    except (OSError, ValueError):
        return CpuTime(parse_stat((proc / str(pid) / "stat").read_text()) / _TICKS_PER_S, 0.0)
    return CpuTime(sum(time.busy_s for time in times), sum(time.waited_s for time in times))


def rss_bytes(pid: int, proc: Path = PROC) -> int:
    """Resident memory of a process.

    Raises:
        OSError: There is no such process.
    """
    try:
        return parse_rss((proc / str(pid) / "smaps_rollup").read_text())
    except (OSError, ValueError):  # kernels before 4.14, and processes of other users
        return parse_rss((proc / str(pid) / "status").read_text())


def pin(pid: int, core: int) -> bool:
    """Keep a process on ``core``; ``False`` where that is not possible."""
    with contextlib.suppress(OSError, AttributeError):
        if core in os.sched_getaffinity(pid):
            os.sched_setaffinity(pid, {core})
            return True
    return False

"""Unary load with wrk: an exact number of requests, every answer checked."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks import procfs
from benchmarks.processes import Children, Lines
from benchmarks.procfs import LOAD_CORE, CpuTime
from benchmarks.stage import Target
from benchmarks.stats import Growth, Sample

_SCRIPT: Final = Path(__file__).with_name("load.lua")
# The run ends by its number of requests; this is only what wrk needs to be told.
_WRK_SECONDS: Final = 900
_MARK_TIMEOUT_S: Final = 180.0


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent, and what comes back if all is well.

    Attributes:
        path: Path of the route.
        body: Request body.
        connections: Requests at the same time.
        least_bytes: Shortest answer that is right.
        greatest_bytes: Longest answer that is right.
    """

    path: str
    body: bytes
    connections: int
    least_bytes: int
    greatest_bytes: int


@dataclass(frozen=True, slots=True)
class Reading:
    """State of the process under test at a mark.

    Attributes:
        at: Monotonic seconds.
        cpu: CPU time used so far, ``None`` without such a process.
        rss_bytes: Resident memory, 0 without such a process.
    """

    at: float
    cpu: CpuTime | None
    rss_bytes: int


def read_state(pid: int | None, *, with_memory: bool = False) -> Reading:
    """Look at the process under test now.

    Raises:
        OSError: It is gone.
    """
    if pid is None:
        return Reading(time.monotonic(), None, 0)
    cpu = procfs.cpu_time(pid)
    return Reading(time.monotonic(), cpu, procfs.rss_bytes(pid) if with_memory else 0)


def sample_between(start: Reading, end: Reading, items: int) -> Sample:
    """What was used between two marks."""
    if start.cpu is None or end.cpu is None:
        return Sample(items, end.at - start.at)
    used = end.cpu.since(start.cpu)
    return Sample(items, end.at - start.at, used.busy_s, used.waited_s)


def run_marks(
    children: Children, target: Target, load: Load, *, warm: int, timed: int, marks: int = 1, with_memory: bool = False
) -> list[Reading]:
    """Send ``warm + timed`` requests and read the target's state at ``marks + 1`` equally distant moments.

    Args:
        children: Owns the load generator.
        target: Where requests go.
        load: Which.
        warm: Requests before the first reading, ``>= 1``.
        timed: Requests between the first and the last, a multiple of ``marks``.
        marks: Distances between readings.
        with_memory: Read memory too, which takes the kernel some time.

    Raises:
        BenchmarkFailed: An answer was wrong or missing, or a process ended.
    """
    body = children.temp / "body"
    body.write_bytes(load.body)
    url = f"http://127.0.0.1:{target.port}{load.path}"
    numbers = (warm, timed, marks, load.least_bytes, load.greatest_bytes)
    command = ["wrk", "-t1", f"-c{load.connections}", f"-d{_WRK_SECONDS}", "--timeout", "60", "-s", str(_SCRIPT), url]
    command += ["--", str(body), *map(str, numbers)]
    process = children.start("wrk", command, LOAD_CORE, is_piped=True)
    try:
        lines = Lines(process, children.check)
        readings = []
        for _ in range(marks + 1):
            lines.next_starting("mark", _MARK_TIMEOUT_S)
            readings.append(read_state(target.pid, with_memory=with_memory))
        return readings
    finally:
        children.stop(process)


def measure(children: Children, target: Target, load: Load, requests: int) -> Sample:
    """One timed window of ``requests``, after warming up every connection.

    Raises:
        BenchmarkFailed: See ``run_marks``.
    """
    start, end = run_marks(children, target, load, warm=warm_up(load), timed=requests)
    return sample_between(start, end, requests)


def measure_growth(children: Children, target: Target, load: Load, requests: int, marks: int) -> Growth:
    """Memory of the target over ``requests``.

    Raises:
        BenchmarkFailed: See ``run_marks``.
    """
    timed = requests - requests % marks
    readings = run_marks(children, target, load, warm=2000, timed=timed, marks=marks, with_memory=True)
    return Growth(timed, [reading.rss_bytes for reading in readings])


def requests_for(rate: float, seconds: float, load: Load) -> int:
    """How many requests fill ``seconds`` at ``rate`` per second, at least a few for each connection."""
    return max(round(rate * seconds), 4 * load.connections, 8)


def warm_up(load: Load) -> int:
    """Requests before the timed window."""
    return 2 * load.connections

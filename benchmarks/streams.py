"""Runs the load of event streams and reads what the process under test has used meanwhile."""

import sys
from dataclasses import dataclass
from typing import Final

from benchmarks.processes import BenchmarkFailed, Children, Lines
from benchmarks.procfs import LOAD_CORE
from benchmarks.stage import Target
from benchmarks.stats import Sample, joined
from benchmarks.wrk import Reading, read_state, sample_between

_WAVE_TIMEOUT_S: Final = 120.0
# What is printed, in order, if all is well.
_WORDS: Final = ("start", "begin", "end", "done")


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """What is sent.

    Attributes:
        path: Path of the route.
        body: Request body, the same for all streams.
        streams: Streams at the same time.
        is_whole_wave: The window reaches from the first request to the last ``[DONE]``; otherwise from the moment at
            which all streams run to the moment at which the first one ends.
    """

    path: str
    body: bytes
    streams: int
    is_whole_wave: bool = False


def run_wave(children: Children, target: Target, load: StreamLoad, expected: int) -> tuple[Sample, int]:
    """All streams once.

    Args:
        children: Owns the load generator.
        target: Where requests go.
        load: Which.
        expected: Events of each stream, 0 if not known.

    Returns:
        The sample of the window, and the events of all streams.

    Raises:
        BenchmarkFailed: A stream was not whole, or a process ended.
    """
    body = children.temp / "body"
    body.write_bytes(load.body)
    command = [sys.executable, "-m", "benchmarks.sse_load", "--port", str(target.port), "--path", load.path]
    command += ["--body", str(body), "--streams", str(load.streams), "--expected", str(expected)]
    process = children.start("streams", command, LOAD_CORE, is_piped=True)
    readings: dict[str, tuple[Reading, int]] = {}
    try:
        lines = Lines(process, children.check)
        while "done" not in readings:
            word, _, rest = lines.next(_WAVE_TIMEOUT_S).partition(" ")
            if word not in _WORDS:
                raise BenchmarkFailed(f"{target.name}: {word} {rest}")
            readings[word] = (read_state(target.pid), int(rest))
    finally:
        children.stop(process)
    first, last = ("start", "done") if load.is_whole_wave else ("begin", "end")
    (start, before), (end, after) = readings[first], readings[last]
    if after <= before:
        raise BenchmarkFailed("a stream ended before all had begun: nothing to measure")
    return sample_between(start, end, after - before), readings["done"][1]


def expected_events(children: Children, target: Target, load: StreamLoad) -> int:
    """Events that each stream must have, as the engine itself sends them.

    Raises:
        BenchmarkFailed: Its streams differ.
    """
    _, events = run_wave(children, target, load, 0)
    each, rest = divmod(events, load.streams)
    if rest:
        raise BenchmarkFailed("equal requests were answered with different numbers of events")
    return each


def measure(children: Children, target: Target, load: StreamLoad, expected: int, waves: int) -> Sample:
    """Several waves as one sample.

    Raises:
        BenchmarkFailed: See ``run_wave``.
    """
    return joined([run_wave(children, target, load, expected)[0] for _ in range(waves)])

import signal
import sys
from pathlib import Path

import pytest

from benchmarks.processes import BenchmarkFailed, Children, Lines, interrupts_deferred
from benchmarks.procfs import LOAD_CORE, CpuTime
from benchmarks.stage import Target
from benchmarks.wrk import Load, Reading, requests_for, sample_between


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_children_end_with_the_block(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("sleeper", python("import time; time.sleep(60)"), LOAD_CORE)
        children.check()
        assert child.poll() is None
    assert child.poll() is not None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_for_the_end_of_the_block(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    done = []

    def interrupted() -> None:
        with interrupts_deferred():
            signal.raise_signal(number)
            done.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == ["the rest"]
    assert signal.getsignal(number) is before


def test_a_dead_child_is_reported_with_its_words(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("talker", python("import sys; sys.exit('no such luck')"), LOAD_CORE)
        child.wait(30)
        with pytest.raises(BenchmarkFailed, match="talker ended with 1: no such luck"):
            children.check()


def test_lines_and_their_ends(tmp_path: Path) -> None:
    code = "print('other', flush=True); print('mark 1', flush=True); print('wrong status 500')"
    with Children(tmp_path) as children:
        lines = Lines(children.start("talker", python(code), LOAD_CORE, is_piped=True), lambda: None)
        assert lines.next_starting("mark", 30) == ["mark", "1"]
        with pytest.raises(BenchmarkFailed, match="wrong answer: status 500"):
            lines.next_starting("mark", 30)
        with pytest.raises(BenchmarkFailed, match="closed its output"):
            lines.next_starting("mark", 30)


def test_missing_lines_are_not_waited_for_for_ever(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("sleeper", python("import time; time.sleep(60)"), LOAD_CORE, is_piped=True)
        with pytest.raises(BenchmarkFailed, match="answers are missing"):
            Lines(child, lambda: None).next(0.1)


def test_sample_between_two_readings() -> None:
    start, end = Reading(10.0, CpuTime(1.0, 0.5), 0), Reading(12.0, CpuTime(1.5, 0.6), 0)
    found = sample_between(start, end, 1000)
    assert (found.items, found.wall_s, found.cpu_us) == (1000, 2.0, 500.0)
    assert sample_between(Reading(1.0, None, 0), end, 1).cpu_s is None


def test_every_connection_gets_some_requests() -> None:
    load = Load("/", b"", 256, 0, 1)
    assert requests_for(10.0, 1.0, load) == 1024
    assert requests_for(10_000.0, 3.0, load) == 30_000


def test_direct_has_no_process_under_test() -> None:
    assert Target("direct", 1).pid is None

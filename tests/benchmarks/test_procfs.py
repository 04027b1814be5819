import os
from pathlib import Path

import pytest

from benchmarks import procfs
from benchmarks.procfs import CpuTime

STAT = "4242 (a ) (b) S 1 4242 4242 0 -1 4194560 100 0 0 0 150 25 0 0 20 0 3 0 1000 1000000 512 18446744073709551615"


def test_stat_gives_user_and_system_ticks_whatever_the_command_is_called() -> None:
    assert procfs.parse_stat(STAT) == 175


@pytest.mark.parametrize("text", ["", "4242 (a) S 1 2", "nothing of the kind"])
def test_other_texts_are_no_stat(text: str) -> None:
    with pytest.raises(ValueError, match="stat file"):
        procfs.parse_stat(text)


def test_schedstat_counts_nanoseconds() -> None:
    assert procfs.parse_schedstat("1500000000 250000000 77\n") == CpuTime(1.5, 0.25)
    with pytest.raises(ValueError, match="schedstat"):
        procfs.parse_schedstat("1 2")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("55d0-7ffd ---p 00000000 00:00 0 [rollup]\nRss:          2048 kB\nPss: 1 kB\n", id="smaps_rollup"),
        pytest.param("Name:\tx\nVmHWM:\t  9999 kB\nVmRSS:\t  2048 kB\n", id="status"),
    ],
)
def test_resident_size(text: str) -> None:
    assert procfs.parse_rss(text) == 2 * 1024 * 1024


def test_no_resident_size() -> None:
    with pytest.raises(ValueError, match="resident"):
        procfs.parse_rss("Name:\tkthreadd\n")


def _process(proc: Path, schedstats: list[str | None]) -> None:
    for number, text in enumerate(schedstats):
        thread = proc / "7" / "task" / str(7 + number)
        thread.mkdir(parents=True)
        if text is not None:
            (thread / "schedstat").write_text(text)
    (proc / "7" / "stat").write_text(STAT)


def test_threads_are_added_up(tmp_path: Path) -> None:
    _process(tmp_path, ["1000000000 0 1\n", "500000000 250000000 1\n"])
    assert procfs.cpu_time(7, tmp_path) == CpuTime(1.5, 0.25)


def test_ticks_where_nanoseconds_are_not_counted(tmp_path: Path) -> None:
    _process(tmp_path, ["1000000000 0 1\n", None])
    assert procfs.cpu_time(7, tmp_path) == CpuTime(175 / os.sysconf("SC_CLK_TCK"), 0.0)


def test_this_process_has_used_time_and_memory() -> None:
    assert procfs.cpu_time(os.getpid()).busy_s > 0
    assert procfs.rss_bytes(os.getpid()) > 1024 * 1024


def test_difference() -> None:
    assert CpuTime(3.0, 1.0).since(CpuTime(2.0, 0.5)) == CpuTime(1.0, 0.5)


def test_a_core_that_does_not_exist_is_no_error() -> None:
    before = os.sched_getaffinity(0)
    assert procfs.pin(0, 1_000_000) is False
    assert os.sched_getaffinity(0) == before

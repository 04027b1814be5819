"""The relay's benchmark runs, and measures what it says."""

import re

import pytest

from benchmarks.relay import cost, delay, snapshot


async def test_it_measures_with_small_figures(capsys: pytest.CaptureFixture[str]) -> None:
    await cost(20)
    await delay(5, 200)
    await snapshot(3_000)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["relay:", "gateway:", "delay", "snapshot"]
    figures = [float(text) for line in lines[:2] for text in re.findall(r"(\d+) µs", line)]
    assert len(figures) == 2
    assert all(figures)

"""Pauses, flushes and new weights under load: small in every test run, large in ``make soak``."""

import os
from random import SystemRandom
from typing import Literal

import pytest

from tests.fakes.running import TIME_SCALE
from tests.soak.rl_run import soak

# The short ones draw the same in every run.
SMALL_SEED = int(os.environ.get("SOAK_SEED", "1"))
SEED = int(os.environ.get("SOAK_SEED", "0")) or SystemRandom().randrange(1, 1_000_000)
SECONDS = float(os.environ.get("SOAK_SECONDS", "300"))
SMALL_S = 5.0
SHOWN = 5


@pytest.fixture
def anyio_backend() -> str:
    """Without debug mode, in which the samplers would be the slowest part."""
    return "asyncio"


async def _soak(kind: Literal["sglang", "vllm"], seconds: float, seed: int) -> None:
    print(f"SOAK_SEED={seed} SOAK_SECONDS={seconds:g} {kind}")
    report = await soak(kind, seconds, seed)
    print(report.finishes, report.actions, f"{report.hits} hits, {report.firsts} firsts, {report.held} held back")
    if report.problems:
        shown = "\n\n".join(report.problems[:SHOWN])
        pytest.fail(f"SOAK_SEED={seed}: {len(report.problems)} problems, the first are\n{shown}", pytrace=False)
    # What was to be seen was there; a short one on a slow machine may not get to an abort in time.
    assert report.finishes["length"] > report.finishes["abort"]
    assert report.hits > 0
    assert report.firsts > 0
    assert report.finishes["abort"] > 0 or seconds <= SMALL_S


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.timeout(300 * TIME_SCALE)
async def test_a_short_rollout(kind: Literal["sglang", "vllm"]) -> None:
    await _soak(kind, SMALL_S, SMALL_SEED)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.timeout(7200 * TIME_SCALE)
async def test_a_long_rollout(kind: Literal["sglang", "vllm"]) -> None:
    await _soak(kind, SECONDS, SEED)

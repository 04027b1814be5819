"""The soak, small in every test run and large in ``make soak``."""

import os
from collections.abc import Collection
from pathlib import Path
from random import SystemRandom

import pytest

from tests.fakes.running import TIME_SCALE
from tests.soak.pair_bodies import OFTEN, PAIR_ASKS
from tests.soak.processes import ENGINES, FEWER_ENGINES, FEWER_HALVES, HALVES, PAIR_OPTIONS
from tests.soak.run import JUDGED_FROM, MAX_GROWTH_BYTES, Scene, soak
from tests.soak.saboteur import PAIR_TROUBLE

# The small ones are the same in every run: what is asked, and what is done to the engines, though not quite when.
SMALL_SEED = int(os.environ.get("SOAK_SEED", "1"))
SEED = int(os.environ.get("SOAK_SEED", "0")) or SystemRandom().randrange(1, 1_000_000)
REQUESTS = int(os.environ.get("SOAK_REQUESTS", "20000"))
SMALL = 700
PAIR_REQUESTS = int(os.environ.get("SOAK_REQUESTS", "20000"))
SMALL_PAIRS = 300
SHOWN = 5


@pytest.fixture
def anyio_backend() -> str:
    """Without debug mode, in which the clients would be the slowest part."""
    return "asyncio"


async def _soak(requests: int, seed: int, scene: Scene, directory: Path) -> None:
    print(f"SOAK_SEED={seed} SOAK_REQUESTS={requests}")
    report = await soak(requests, seed, scene, directory)
    print(report)
    if report.problems:
        shown = "\n\n".join(report.problems[:SHOWN])
        pytest.fail(f"SOAK_SEED={seed}: {len(report.problems)} problems, the first are\n{shown}", pytrace=False)
    assert report.outcomes["complete"] > requests / 3, f"SOAK_SEED={seed}: {report}"
    if scene.trouble is PAIR_TROUBLE:
        # Two thirds of them could; the rest finds, at worst, a role that has no worker.
        assert report.paired > requests / 4, f"SOAK_SEED={seed}: {report}"
    if requests >= JUDGED_FROM:
        assert report.growth_bytes < MAX_GROWTH_BYTES, f"SOAK_SEED={seed}: {report}"


@pytest.mark.timeout(300 * TIME_SCALE)
async def test_hundreds_of_mixed_requests(tmp_path: Path) -> None:
    await _soak(SMALL, SMALL_SEED, Scene(FEWER_ENGINES), tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(3600 * TIME_SCALE)
async def test_thousands_of_mixed_requests(tmp_path: Path) -> None:
    await _soak(REQUESTS, SEED, Scene(ENGINES), tmp_path)


def _pairs(engines: Collection[str]) -> Scene:
    return Scene(engines, PAIR_ASKS, OFTEN, PAIR_TROUBLE, PAIR_OPTIONS)


@pytest.mark.timeout(300 * TIME_SCALE)
async def test_hundreds_of_requests_over_pairs(tmp_path: Path) -> None:
    await _soak(SMALL_PAIRS, SMALL_SEED, _pairs(FEWER_HALVES), tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(3600 * TIME_SCALE)
async def test_thousands_of_requests_over_pairs(tmp_path: Path) -> None:
    await _soak(PAIR_REQUESTS, SEED, _pairs(HALVES), tmp_path)

"""Fixtures for all tests; the parts they are made of are in ``tests.fakes``."""

import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest
from blockbuster import BlockBuster
from hypothesis import HealthCheck, settings

from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import RunningGateway, running_gateway

# A job in the background of a shell begins with SIGINT ignored, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# One setting stretches every time limit of the tests, for slow machines.
TIME_SCALE = float(os.environ.get("TEST_TIME_SCALE", "1"))

# How long an example takes says how busy the machine is.
settings.register_profile("timeless", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("timeless")


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, object]]:
    """Plain asyncio in debug mode: slow callbacks and never-awaited coroutines are told."""
    return ("asyncio", {"debug": True})


@pytest.fixture
def blockbuster() -> Iterator[BlockBuster]:
    """Raise when a test blocks the loop; files and processes are the tests' own business."""
    blocker = BlockBuster()
    blocker.activate()
    for name in [name for name in blocker.functions if name.startswith(("io.", "os.", "sqlite3."))]:
        blocker.functions[name].deactivate()
    yield blocker
    blocker.deactivate()


@pytest.fixture
async def engine() -> AsyncIterator[SimulatedEngine]:
    """One simulated SGLang engine without delays."""
    simulated = SimulatedEngine(EngineOptions())
    await simulated.start()
    yield simulated
    await simulated.stop()


@pytest.fixture
async def gateway(engine: SimulatedEngine, blockbuster: BlockBuster) -> AsyncIterator[RunningGateway]:
    """A gateway in front of ``engine``, ready; at the end nothing may be left of any request."""
    async with running_gateway(engine.url) as running:
        yield running

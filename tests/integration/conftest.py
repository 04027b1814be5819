"""Fixtures of the tests over real sockets."""

from collections.abc import AsyncIterator

import pytest
from blockbuster import BlockBuster

from tests.fakes.running import RunningGateway, running_gateway
from tests.fakes.script_engine import ScriptEngine, echo, script_engine


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """One loop for a module, so that tests can share a gateway; without debug mode, which triples their time."""
    return "asyncio"


@pytest.fixture(scope="module")
async def shared_engine(anyio_backend: object) -> AsyncIterator[ScriptEngine]:
    """The engine behind ``scripted``."""
    async with script_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
async def shared_gateway(shared_engine: ScriptEngine) -> AsyncIterator[RunningGateway]:
    """The gateway behind ``front``."""
    async with running_gateway(shared_engine.url) as running:
        yield running


@pytest.fixture
def scripted(shared_engine: ScriptEngine) -> ScriptEngine:
    """An engine whose answers the test writes."""
    shared_engine.script = echo
    shared_engine.requests.clear()
    shared_engine.aborted.clear()
    return shared_engine


@pytest.fixture
async def front(
    shared_gateway: RunningGateway, scripted: ScriptEngine, blockbuster: BlockBuster
) -> AsyncIterator[RunningGateway]:
    """A gateway in front of ``scripted``; at the end nothing may be left of any request."""
    shared_gateway.records.clear()
    yield shared_gateway
    await shared_gateway.settle()

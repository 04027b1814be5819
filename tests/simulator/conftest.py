"""Fixtures of the simulator's own tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from simulator.options import EngineOptions
from simulator.server import SimulatedEngine

StartEngine = Callable[..., Awaitable[SimulatedEngine]]


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    """Return a function that starts an engine with options; all of them are stopped at the end."""
    engines: list[SimulatedEngine] = []

    async def start(**options: object) -> SimulatedEngine:
        engine = SimulatedEngine(EngineOptions(**options))  # type: ignore[arg-type]
        await engine.start()
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        await engine.stop()
        assert engine.open_connections == 0
        assert len(engine.core.timers) == 0

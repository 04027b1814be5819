"""Prefill and decode engines, and a gateway in front of them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import RunningGateway, running_gateway, until
from tests.fakes.wire import Answer, call

TEXT = "Hello world, how are you"
IDS = list(range(1, 41))


@dataclass
class PairFleet:
    """Engines by role, and the gateway in front of them.

    Attributes:
        prefills: Prefill engines.
        decodes: Decode engines.
        gateway: The gateway.
        alone: An engine of the same seed that serves alone, not behind the gateway; the measure of answers.
    """

    prefills: Sequence[SimulatedEngine]
    decodes: Sequence[SimulatedEngine]
    gateway: RunningGateway
    alone: SimulatedEngine

    @property
    def engines(self) -> list[SimulatedEngine]:
        """Those behind the gateway."""
        return [*self.prefills, *self.decodes]

    async def call(self, path: str, body: Any, **more: Any) -> Answer:
        """One request through the gateway."""
        return await call(self.gateway.address, path, body, **more)

    async def direct(self, path: str, body: Any, **more: Any) -> Answer:
        """The same to the engine that serves alone."""
        return await call(("127.0.0.1", self.alone.port), path, body, **more)

    async def settle(self) -> None:
        """Nothing is left of any request, at the gateway and at the engines."""
        await self.gateway.settle()
        engines = self.engines
        await until(lambda: all(map(is_idle, engines)), "idle engines")


def is_idle(engine: SimulatedEngine) -> bool:
    """Whether nothing is left of a transfer or a request."""
    busy = [scheduler.cache.busy_blocks for scheduler in engine.core.schedulers]
    return (
        not engine.live_rooms
        and engine.pinned_blocks == 0
        and (engine.running, engine.waiting, engine.core.is_busy) == (0, 0, False)
        and not any(busy)
    )


@asynccontextmanager
async def pair_fleet(
    prefills: int = 1,
    decodes: int = 1,
    *,
    engine: str = "sglang",
    prefill: Any = None,
    decode: Any = None,
    gateway: Any = None,
    checks_idle: bool = True,
    **options: Any,
) -> AsyncIterator[PairFleet]:
    """Pairs of simulated engines.

    Args:
        prefills: Number of prefill engines.
        decodes: Number of decode engines.
        engine: ``sglang`` or ``vllm``.
        prefill: Options of prefill engines only.
        decode: Options of decode engines only.
        gateway: Settings of the gateway.
        checks_idle: At the end the engines must be idle too.
        options: Options of all engines.
    """
    base: dict[str, Any] = {"engine": engine, "seed": 3, **options}
    started: list[SimulatedEngine] = []

    async def start(**more: Any) -> SimulatedEngine:
        one = SimulatedEngine(EngineOptions(**{**base, **more}))
        await one.start()
        started.append(one)
        return one

    try:
        first = [await start(role="prefill", bootstrap_port=0, **(prefill or {})) for _ in range(prefills)]
        second = [await start(role="decode", **(decode or {})) for _ in range(decodes)]
        alone = await start()
        specs = [f"{one.url},role={role}" for role, group in (("prefill", first), ("decode", second)) for one in group]
        async with running_gateway(*specs, seed=1, **(gateway or {})) as running:
            fleet = PairFleet(first, second, running, alone)
            yield fleet
            await running.settle()
            if checks_idle:
                await fleet.settle()
    finally:
        for one in started:
            await one.stop()

"""Engines that publish KV events, and a gateway that routes by them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.kv_publisher import KvPublisher
from tests.fakes.running import RunningGateway, running_gateway, until
from tests.fakes.script_engine import METADATA, ScriptEngine
from tests.fakes.wire import Answer, call

BLOCK = 16
ANY_PORT = "tcp://127.0.0.1:0"
PROMPT = list(range(1, 10 * BLOCK + 1))
# Long enough to be tokenized.
TEXT = "The water rises behind the weir and falls through the race below it. " * 20


class Fleet:
    """Engines, and the gateway in front of them."""

    def __init__(self, engines: Sequence[SimulatedEngine], gateway: RunningGateway) -> None:
        self.engines = engines
        self.gateway = gateway

    def engine_of(self, answer: Answer) -> SimulatedEngine:
        """Who gave an answer."""
        return next(one for one in self.engines if one.url.endswith(answer.headers["x-forebay-worker"]))

    async def generate(self, ids: list[int], *, tokens: int = 1, **more: Any) -> Answer:
        """One generation from token ids."""
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": tokens}, **more}
        answer = await call(self.gateway.address, "/generate", body)
        assert answer.status == 200
        return answer

    async def settled(self) -> None:
        """Every engine's events have been applied."""
        kv = self.gateway.gateway.kv

        def is_up_to_date() -> bool:
            return all(
                publisher.next_sequence - 1 == kv.position(engine.url.removeprefix("http://"), rank)[1]
                for engine in self.engines
                if engine.core.publisher is not None
                for rank, publisher in enumerate(engine.core.publisher.ranks)
            )

        await until(is_up_to_date, "all events applied")
        await until(lambda: kv.trusts_all(kv.index.ranks()), "all sources trusted")


@asynccontextmanager
async def fleet(
    count: int = 2, *, has_events: bool = True, gateway: Any = None, **options: Any
) -> AsyncIterator[Fleet]:
    """Engines with events, and a gateway that routes by them."""
    engines: list[SimulatedEngine] = []
    events = {"kv_events": ANY_PORT, "replay": ANY_PORT} if has_events else {}
    try:
        for _ in range(count):
            engine = SimulatedEngine(EngineOptions(**{"page_size": BLOCK, **events, **options}))
            await engine.start()
            engines.append(engine)
        urls = [engine.url for engine in engines]
        async with running_gateway(*urls, seed=1, **(gateway or {})) as running:
            yield Fleet(engines, running)
            await running.settle()
    finally:
        for engine in engines:
            await engine.stop()


def announces(engine: ScriptEngine, *publishers: KvPublisher, dp_size: int | None = None, **info: Any) -> None:
    """Have a scripted engine say that these publishers are its ranks', in order."""
    sources = [
        {"dp_rank": rank, "endpoint": one.endpoint, "replay_endpoint": one.replay_endpoint, "block_size": BLOCK}
        for rank, one in enumerate(publishers)
    ]
    engine.metadata["/server_info"] = {
        **METADATA["/server_info"],
        "page_size": BLOCK,
        "dp_size": dp_size or len(publishers),
        "kv_event_sources": sources,
        **info,
    }

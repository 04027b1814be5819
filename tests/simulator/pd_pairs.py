"""Pairs of simulated engines, and requests to both halves."""

from __future__ import annotations

import asyncio
from typing import Any

from simulator.server import SimulatedEngine
from simulator.vllm.connector import Connector
from simulator.vllm.engine import VllmCore
from simulator.vllm.pins import PinTable
from tests.simulator.conftest import StartEngine
from tests.simulator.wire import Answer, ask, parse_answer, request_bytes, send

TEXT = "Hello world, how are you"
Pair = tuple[SimulatedEngine, SimulatedEngine]


async def start_pair(start_engine: StartEngine, **options: Any) -> Pair:
    """Return a prefill and a decode engine; ``prefill`` and ``decode`` hold what only one of them gets."""
    own, other = options.pop("prefill", {}), options.pop("decode", {})
    prefill = await start_engine(**{**options, "role": "prefill", "bootstrap_port": 0, **own})
    decode = await start_engine(**{**options, "role": "decode", **other})
    return prefill, decode


def at(prefill: SimulatedEngine, room: int, **fields: Any) -> dict[str, Any]:
    """Return a native body for both halves of an SGLang pair."""
    tokens = fields.pop("tokens", 6)
    return {
        "text": TEXT,
        "sampling_params": {"max_new_tokens": tokens, **fields.pop("params", {})},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.options.bootstrap_port,
        "bootstrap_room": room,
        **fields,
    }


async def both(pair: Pair, path: str, body: dict[str, Any]) -> tuple[Answer, Answer]:
    """Send ``body`` to both halves at the same time."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(engine.port, path, body)) for engine in pair]
    return tasks[0].result(), tasks[1].result()


def begin(group: asyncio.TaskGroup, engine: SimulatedEngine, path: str, body: Any) -> asyncio.Task[bytes]:
    """Send a request whose answer is read until its end, whatever it is."""
    return group.create_task(send(engine.port, request_bytes(path, body, close=True)))


async def opened(engine: SimulatedEngine, path: str, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request and leave its answer unread."""
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    writer.write(request_bytes(path, body, close=True))
    return reader, writer


def parsed(raw: bytes) -> Answer:
    """Return the answer in ``raw``."""
    answer = parse_answer(raw)
    assert answer is not None
    return answer


async def loads(engine: SimulatedEngine) -> dict[str, Any]:
    """Return what ``/v1/loads`` says of rank 0."""
    answer = await ask(engine.port, "/v1/loads?include=all", method="GET")
    found: dict[str, Any] = answer.json()["loads"][0]
    return found


async def metric(engine: SimulatedEngine, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples that have ``labels``."""
    text = (await ask(engine.port, "/metrics", method="GET")).body.decode()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    assert lines, f"no metric {name}"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in wanted))


def queues(engine: SimulatedEngine) -> dict[str, int]:
    """Return the lengths of an SGLang engine's queues on rank 0."""
    assert engine.core.handoff is not None
    return dict(engine.core.handoff.queues(0))


def connector(engine: SimulatedEngine) -> Connector:
    """Return the connector of a vLLM engine with a role."""
    assert isinstance(engine.core, VllmCore)
    assert engine.core.connector is not None
    return engine.core.connector


def pins(engine: SimulatedEngine) -> PinTable:
    """Return the kept blocks of a vLLM prefill engine."""
    found = connector(engine).pins
    assert found is not None
    return found


def assert_idle(*engines: SimulatedEngine) -> None:
    """Fail if anything is left of a transfer."""
    for engine in engines:
        assert engine.live_rooms == []
        assert engine.pinned_blocks == 0
        assert (engine.running, engine.waiting, engine.core.is_busy) == (0, 0, False)
        assert [scheduler.cache.busy_blocks for scheduler in engine.core.schedulers] == [0] * engine.options.dp_size

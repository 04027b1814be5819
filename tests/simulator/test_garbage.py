"""Nothing of a request is left to the garbage collector: what it frees now and then would pass for a leak."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from simulator.server import SimulatedEngine
from tests.fakes.running import until
from tests.simulator.conftest import StartEngine
from tests.simulator.wire import request_bytes

ROUNDS = 5
TWO = {"max_new_tokens": 3, "n": 2}
CHAT = {"model": "model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("/generate", {"text": "ab", "sampling_params": {"max_new_tokens": 3}}),
    "batch": ("/generate", {"text": ["ab", "cd"], "sampling_params": TWO}),
    "chat": ("/v1/chat/completions", CHAT),
    "completions": ("/v1/completions", {"model": "model", "prompt": ["ab", "cd"], "max_tokens": 3, "n": 2}),
    "messages": ("/v1/messages", CHAT),
    "responses": ("/v1/responses", {"model": "model", "input": "hi", "max_output_tokens": 3}),
    "ids": ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3}}),
    "id twice": ("/generate", {"text": ["ab", "cd"], "rid": ["a", "a"]}),
    "no such rank": ("/generate", {"text": "ab", "routed_dp_rank": 7}),
}
FAULTS = ["reset", "close", "delay:1", "abort_finish", "garbage", "status:500", "huge:2000"]


@pytest.fixture
def anyio_backend() -> str:
    """Without debug mode, which keeps what it tells of."""
    return "asyncio"


async def ask(engine: SimulatedEngine, path: str, body: dict[str, Any], *, leaves: bool = False) -> None:
    """One request over a connection of its own; its answer does not matter."""
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    before = len(engine.log.requests)
    writer.write(request_bytes(path, body))
    try:
        if leaves:
            await engine.wait_for(lambda e: len(e.log.requests) > before)
        else:
            await reader.read()
    except ConnectionResetError:
        pass
    writer.transport.abort()


async def serve(engine: SimulatedEngine, stream: bool) -> None:
    """Every kind of request to its end, with clients that leave, with faults, and while the same id is live."""
    for path, body in ASKED.values():
        wanted = {**body, "stream": stream}
        await ask(engine, path, wanted)
        await ask(engine, path, wanted, leaves=True)
    path, body = ASKED["chat"]
    for do in FAULTS:
        for at in ("headers", "first_event"):
            engine.add_fault(at=at, do=do)
            await ask(engine, path, {**body, "stream": stream})
    engine.freeze()
    held = {"text": "ab", "rid": "same", "stream": stream}
    await ask(engine, "/generate", held, leaves=True)
    await ask(engine, "/generate", held)
    engine.thaw()


def left_behind(found: Seq[object]) -> Counter[str]:
    """The simulator's own objects, by type."""
    names = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in found)
    return Counter({name: count for name, count in names.items() if name.startswith("simulator.")})


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_requests_leave_no_cycles_behind(start_engine: StartEngine, kind: str, stream: bool) -> None:
    engine = await start_engine(
        engine=kind, inter_token_ms=0.2, unary_disconnect_poll_s=0.01, late_abort_s=0.01, kv_events="tcp://127.0.0.1:0"
    )
    await serve(engine, stream)  # what is made once
    gc.collect()
    gc.disable()
    try:
        for _ in range(ROUNDS):
            await serve(engine, stream)
        core = engine.core
        await until(lambda: not (core.is_busy or engine.open_connections or len(core.timers)), "an idle engine")
        await asyncio.sleep(0)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = left_behind(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not found

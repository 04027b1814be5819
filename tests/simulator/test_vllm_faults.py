"""Every fault on vLLM's routes."""

from __future__ import annotations

import asyncio
import json

import pytest

from simulator.server import SimulatedEngine
from tests.simulator.conftest import StartEngine
from tests.simulator.vllm_requests import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    abort,
    body,
    frozen,
    open_request,
    started,
)
from tests.simulator.wire import ask, request_bytes, send

# -- faults ----------------------------------------------------------------------------------------


async def raw(engine: SimulatedEngine, path: str, stream: bool) -> bytes:
    return await send(engine.port, request_bytes(path, body(path, 4, stream=stream), X_Request_Id="X"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("at", "do"),
    [
        *(("headers", do) for do in ("reset", "close", "status:429", "garbage", "delay:5", "huge:9000", "restart")),
        *(("event:1", do) for do in ("reset", "close", "status:500", "garbage", "delay:5", "huge:9000", "restart")),
        *(("end", do) for do in ("reset", "close", "delay:5", "restart")),
        *((at, "abort_finish") for at in ("headers", "event:1")),
    ],
)
async def test_faults(start_engine: StartEngine, stream: bool, at: str, do: str) -> None:
    engine = await started(start_engine, inter_token_ms=1 if do == "abort_finish" else 0)
    for path in (COMPLETIONS, CHAT, GENERATE):
        engine.add_fault(at=at, do=do, match={"rid": "X"})
        assert (await ask(engine.port, path, body(path, 1))).status == 200, "another id"
        received = await raw(engine, path, stream)
        if not stream and at.startswith("event"):
            assert len(engine.fault_list) == 1, "a unary answer has one event only"
            engine.reset()
            continue
        assert not engine.fault_list
        is_whole = received.endswith(b"}" if not stream or at == "headers" else b"data: [DONE]\n\n\r\n0\r\n\r\n")
        if at == "headers" and do in ("delay:5", "abort_finish") and stream:
            is_whole = b"[DONE]" in received
        assert is_whole is not (do in ("reset", "close", "restart") or (do, at) == ("garbage", "headers"))
        if do == "abort_finish":
            is_told = not stream or at == "event:1" or path == GENERATE
            assert (b'"finish_reason":"abort"' in received) is is_told


async def test_faults_of_the_abort_route(start_engine: StartEngine) -> None:
    engine = await started(start_engine, inter_token_ms=1)
    _, writer = await open_request(engine, CHAT, body(CHAT), X_Request_Id="X")
    await engine.wait_for(frozen(1))
    engine.add_fault(at="abort", do="ignore")
    await abort(engine, "chatcmpl-X")
    assert engine.running == 1
    await abort(engine, "chatcmpl-X")
    assert engine.running == 0
    writer.close()


async def test_a_stream_that_hangs_gets_no_comments(start_engine: StartEngine) -> None:
    engine = await started(start_engine, sse_keepalive_interval_s=0.01)
    engine.add_fault(at="event:2", do="hang")
    reader, writer = await open_request(engine, COMPLETIONS, body(COMPLETIONS, 9, stream=True))
    await engine.wait_for(lambda e: not e.running and any(entry.tokens == 9 for entry in e.log.requests))
    await asyncio.sleep(0.05)
    writer.write_eof()
    received = await reader.read()
    writer.close()
    assert (received.count(b"data: "), b"keep-alive" in received) == (2, False)


def test_bodies_are_compact_json() -> None:
    from simulator.vllm import errors

    assert b'": ' not in errors.failure_body("x", 500)
    assert json.loads(errors.failure_event("x", 503)[6:])["error"]["code"] == 503

"""Faults of other gateways that users have reported, each as the experiment that would show it here.

Named by the number of the case. Cases whose feature has a file of tests of its own are there, under the same names.
"""

import asyncio
import gc
import hashlib
import json
import threading
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import PATIENCE_S, TIME_SCALE, RunningGateway, running_gateway
from tests.fakes.script_engine import Reply, ScriptEngine, SeenRequest
from tests.fakes.wire import call, request_bytes, wire

STREAM: dict[str, Any] = {"text": "a", "stream": True}


@pytest.fixture
async def busy() -> AsyncIterator[tuple[RunningGateway, SimulatedEngine]]:
    """A gateway in front of one simulated engine that takes its time."""
    engine = SimulatedEngine(EngineOptions(inter_token_ms=5, max_running=2000))
    await engine.start()
    async with running_gateway(engine.url) as gateway:
        yield gateway, engine
    await engine.stop()


@pytest.mark.parametrize("text", ["水位が上がる".encode() * 40, b"\xff\xfe not text \xc3"], ids=["split", "invalid"])
async def test_field_case_19_split_and_invalid_characters_pass(
    front: RunningGateway, scripted: ScriptEngine, text: bytes
) -> None:
    event = b'data: {"text":"' + text + b'"}\n\n'

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        for at in range(0, len(event), 7):  # in the middle of characters
            await reply.chunk(event[at : at + 7])
        await reply.event(b"[DONE]")
        await reply.end_chunked()

    scripted.script = script
    answer = await call(front.address, "/generate", STREAM)
    assert answer.body == event + b"data: [DONE]\n\n"


async def test_field_case_20_writes_of_4096_bytes_lose_nothing(front: RunningGateway, scripted: ScriptEngine) -> None:
    events = [b'data: {"text":"' + ("漢字" * (40 + at % 9)).encode() + b'"}\n\n' for at in range(200)]
    sent = b"".join(events)

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        for at in range(0, len(sent), 4096):
            await reply.chunk(sent[at : at + 4096])
        await reply.event(b"[DONE]")
        await reply.end_chunked()

    scripted.script = script
    answer = await call(front.address, "/generate", STREAM)
    assert len(answer.events()) == 201
    assert hashlib.sha256(answer.body).digest() == hashlib.sha256(sent + b"data: [DONE]\n\n").digest()


async def test_field_case_22_one_event_of_four_megabytes(front: RunningGateway, scripted: ScriptEngine) -> None:
    payload = b'{"logprobs":[' + b",".join(b"-0.%06d" % at for at in range(420_000)) + b"]}"

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        await reply.event(payload)
        await reply.event(b"[DONE]")
        await reply.end_chunked()

    scripted.script = script
    answer = await call(front.address, "/generate", STREAM)
    assert answer.events() == [payload, b"[DONE]"]


async def test_field_case_38_large_uploads_arrive_unchanged(front: RunningGateway, scripted: ScriptEngine) -> None:
    body = json.dumps({"input_ids": list(range(400_000)), "rid": "x"}).encode()
    for size in (1 << 12, 65_521, 1 << 20):
        async with wire(front.address) as connection:
            head = request_bytes("/generate", b"", headers={"Transfer-Encoding": "chunked"})
            await connection.send(head.replace(b"Content-Length: 0\r\n", b""))
            for at in range(0, len(body), size):
                piece = body[at : at + size]
                await connection.send(b"%x\r\n%b\r\n" % (len(piece), piece))
            await connection.send(b"0\r\n\r\n")
            assert (await connection.answer()).status == 200
        seen = scripted.requests[-1].body
        assert seen.replace(scripted.requests[-1].rid.encode(), b"x") == body.replace(b'", "', b'","').replace(
            b'{"input_ids": ', b'{"input_ids":'
        ).replace(b', "rid": ', b',"rid":')


async def test_field_case_40_every_event_is_forwarded_by_itself(front: RunningGateway, scripted: ScriptEngine) -> None:
    go_on = asyncio.Event()

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        for number in range(20):
            await reply.event(b'{"n":%d}' % number)
            async with asyncio.timeout(PATIENCE_S):
                await go_on.wait()
            go_on.clear()
        await reply.event(b"[DONE]")
        await reply.end_chunked()

    scripted.script = script
    async with wire(front.address) as connection:
        await connection.send(request_bytes("/generate", STREAM))
        await connection.head()
        for number in range(20):  # the engine sends the next one only when this one has arrived
            assert await connection.event() == b'{"n":%d}' % number
            go_on.set()
        assert await connection.event() == b"[DONE]"


async def test_field_case_43_tokens_before_a_disconnect_are_accounted(
    busy: tuple[RunningGateway, SimulatedEngine],
) -> None:
    gateway, _ = busy
    body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 5000, "ignore_eos": True}}
    async with wire(gateway.address) as connection:
        await connection.send(request_bytes("/generate", body))
        await connection.head()
        for _ in range(12):
            await connection.chunk()
        connection.close()
        record = await gateway.record()
    assert record.outcome == "client_closed"
    assert (record.tokens_seen or 0) >= 10


async def test_field_case_97_many_calls_leave_no_memory_and_no_sockets(
    busy: tuple[RunningGateway, SimulatedEngine],
) -> None:
    gateway, engine = busy
    body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}

    async def one(number: int) -> None:
        async with wire(gateway.address) as connection:
            await connection.send(request_bytes("/generate", body))
            if number % 5:
                assert (await connection.answer()).status == 200

    async def wave(size: int) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(size):
                group.create_task(one(number))
        await gateway.settle()
        gateway.records.clear()
        engine.reset()

    for _ in range(3):
        await wave(100)
    tracemalloc.start()
    try:
        await wave(100)
        gc.collect()  # httpx chains exceptions, which are cycles
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(5):
            await wave(100)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 4 * 1024 * 1024
    assert engine.running == engine.waiting == 0


async def test_field_case_101_a_client_that_gives_up_and_retries_has_one_live_call(
    busy: tuple[RunningGateway, SimulatedEngine],
) -> None:
    gateway, engine = busy
    body = {"text": "a", "sampling_params": {"max_new_tokens": 5000, "ignore_eos": True}}
    for _ in range(3):
        async with wire(gateway.address) as connection:
            await connection.send(request_bytes("/generate", body))
            await engine.wait_for(lambda e: e.running == 1, PATIENCE_S)
            connection.close()
            await engine.wait_for(lambda e: e.running == 0, 1.0 * TIME_SCALE)


@pytest.mark.parametrize("reason", [b'"error"', b'"abort"', b'"whatever"', b'{"type":"odd"}', b"null"])
async def test_field_case_109_finish_reasons_pass_untouched(
    front: RunningGateway, scripted: ScriptEngine, reason: bytes
) -> None:
    body = b'{"id":"x","choices":[{"index":0,"finish_reason":' + reason + b"}]}"

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.whole(body)

    scripted.script = script
    answer = await call(front.address, "/v1/chat/completions", {"messages": []})
    assert (answer.status, answer.body) == (200, body)


async def test_field_case_112_an_error_that_is_no_json_passes_as_it_is(
    front: RunningGateway, scripted: ScriptEngine
) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.whole(b"no coffee here", content_type="text/plain", status=418)

    scripted.script = script
    answer = await call(front.address, "/v1/chat/completions", {"messages": []})
    assert (answer.status, answer.headers["content-type"], answer.body) == (418, "text/plain", b"no coffee here")


async def test_field_case_115_streams_and_unary_answers_have_the_same_headers(
    front: RunningGateway, scripted: ScriptEngine
) -> None:
    own = ("x-request-id: theirs", "request-id: r", "x-foo: bar", "set-cookie: a=b", "server-timing: x;dur=1")

    async def script(request: SeenRequest, reply: Reply) -> None:
        if b'"stream": true' in request.body:
            await reply.start_chunked(*own)
            await reply.event(b'{"a":1}')
            await reply.event(b"[DONE]")
            await reply.end_chunked()
        else:
            await reply.whole(b"{}", *own)

    scripted.script = script
    names = {"request-id", "x-foo", "set-cookie", "server-timing", "x-request-id"}
    stream = await call(front.address, "/generate", {**STREAM, "rid": "mine"})
    unary = await call(front.address, "/generate", {"text": "a", "rid": "mine"})
    found = [{name: answer.headers[name] for name in names} for answer in (stream, unary)]
    assert found[0] == found[1]
    assert found[0]["x-request-id"] == "mine"


@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("prompt", ["a", ["a"], [1, 2], [[1, 2], [3]]], ids=["text", "texts", "ids", "lists of ids"])
async def test_field_case_122_every_form_of_prompt_passes(
    front: RunningGateway, scripted: ScriptEngine, prompt: object, is_stream: bool
) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        if not is_stream:
            await reply.whole(b"{}")
            return
        await reply.start_chunked()
        await reply.event(b'{"choices":[]}')
        await reply.event(b"[DONE]")
        await reply.end_chunked()

    scripted.script = script
    body = {"prompt": prompt, "stream": is_stream}
    assert (await call(front.address, "/v1/completions", body)).status == 200
    seen = json.loads(scripted.requests[-1].body)
    assert (seen["prompt"], seen["stream"]) == (prompt, is_stream)


async def test_field_case_127_a_drain_longer_than_the_stream_lets_it_finish(
    busy: tuple[RunningGateway, SimulatedEngine],
) -> None:
    gateway, _ = busy
    body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}
    async with wire(gateway.address) as connection:
        await connection.send(request_bytes("/generate", body))
        await connection.head()
        await connection.chunk()
        gateway.gateway.begin_drain()
        last = b""
        while chunk := await connection.chunk():
            last = chunk
        assert last.endswith(b"data: [DONE]\n\n")
    assert (await gateway.record()).outcome == "complete"


async def test_field_case_130_many_streams_leave_the_gateway_answering(
    busy: tuple[RunningGateway, SimulatedEngine],
) -> None:
    gateway, _ = busy
    body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 20, "ignore_eos": True}}

    async def stream() -> None:
        answer = await call(gateway.address, "/generate", body)
        assert answer.status == 200
        assert answer.body.endswith(b"data: [DONE]\n\n")

    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(stream()) for _ in range(300)]
        while not all(task.done() for task in streams):
            assert (await call(gateway.address, "/health", method="GET")).status == 200
    await gateway.settle()
    assert {record.outcome for record in gateway.records} == {"complete"}


async def test_field_case_133_streams_make_no_threads(busy: tuple[RunningGateway, SimulatedEngine]) -> None:
    gateway, _ = busy
    body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}}
    await call(gateway.address, "/generate", body)
    before = threading.active_count()
    for _ in range(5):
        await call(gateway.address, "/generate", body)
    assert threading.active_count() == before

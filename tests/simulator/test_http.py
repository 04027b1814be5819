"""The HTTP server itself: connections, framing, slow readers."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.simulator.conftest import StartEngine
from tests.simulator.wire import ask, parse_answer, request_bytes, send

BODY = {"text": "abc", "sampling_params": {"max_new_tokens": 2}}


async def read_answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    return head + await reader.readexactly(length)


async def test_keep_alive_and_idle_close(start_engine: StartEngine) -> None:
    engine = await start_engine(keep_alive_s=0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    for _ in range(3):
        writer.write(request_bytes("/generate", BODY, close=False))
        assert b"connection: close" not in (await read_answer(reader)).lower()
    assert engine.open_connections == 1
    assert await reader.read() == b""
    writer.close()
    assert [entry.connection for entry in engine.log.requests] == [1, 1, 1]


async def test_a_slow_answer_is_not_idle(start_engine: StartEngine) -> None:
    engine = await start_engine(keep_alive_s=0.02, inter_token_ms=20)
    assert (await ask(engine.port, "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 4}})).status == 200


async def test_pipelined_requests_are_answered_in_order(start_engine: StartEngine) -> None:
    engine = await start_engine(inter_token_ms=1)
    slow = {"text": "slow", "rid": "slow", "sampling_params": {"max_new_tokens": 10}}
    fast = {"text": "fast", "rid": "fast", "sampling_params": {"max_new_tokens": 1}}
    received = await send(engine.port, request_bytes("/generate", slow, close=False) + request_bytes("/generate", fast))
    assert received.index(b'"id":"slow"') < received.index(b'"id":"fast"')


async def test_many_pipelined_requests(start_engine: StartEngine) -> None:
    engine = await start_engine()
    burst = request_bytes("/ping", method="GET", close=False) * 100 + request_bytes("/ping", method="GET")
    assert (await send(engine.port, burst)).count(b"HTTP/1.1 200 OK") == 101


async def test_expect_continue_and_chunked_body(start_engine: StartEngine) -> None:
    engine = await start_engine()
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    writer.write(head + b"Expect: 100-continue\r\n\r\n")
    assert await reader.readexactly(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
    raw = json.dumps(BODY).encode()
    for part in (raw[:5], raw[5:]):
        writer.write(b"%x\r\n%b\r\n" % (len(part), part))
    writer.write(b"0\r\n\r\n")
    assert (await read_answer(reader)).startswith(b"HTTP/1.1 200 OK")
    writer.close()
    assert engine.log.requests[0].body == raw


@pytest.mark.parametrize("cut", [1, 20, 60, 100])
async def test_requests_in_pieces(start_engine: StartEngine, cut: int) -> None:
    engine = await start_engine()
    raw = request_bytes("/generate", BODY, close=False)
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    writer.write(raw[:cut])
    await writer.drain()
    await asyncio.sleep(0)
    writer.write(raw[cut:])
    assert (await read_answer(reader)).startswith(b"HTTP/1.1 200 OK")
    writer.close()


async def test_what_is_no_http(start_engine: StartEngine) -> None:
    engine = await start_engine()
    received = await send(engine.port, b"\x00\x01nonsense\r\n\r\n")
    assert received.startswith(b"HTTP/1.1 400 Bad Request")
    assert received.endswith(b"Invalid HTTP request received.")


async def test_a_slow_reader_gets_fewer_events_and_everything_in_the_end(start_engine: StartEngine) -> None:
    engine = await start_engine()
    body = {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 3000}}
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port, limit=1024)
    writer.write(request_bytes("/generate", body))
    await engine.wait_for(lambda e: e.core.schedulers[0].totals.finished, timeout_s=20)
    assert engine.log.requests[0].events < 3000
    received = b""
    while data := await reader.read(1 << 20):
        received += data
    writer.close()
    answer = parse_answer(received)
    assert answer is not None
    assert len(answer.events()[-2]["output_ids"]) == 3000
    assert answer.events()[-1] == "[DONE]"


async def test_deltas_of_a_slow_reader_add_up(start_engine: StartEngine) -> None:
    engine = await start_engine(incremental_streaming_output=True)
    body = {"text": "abc", "stream": True, "return_logprob": True, "sampling_params": {"max_new_tokens": 12_000}}
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port, limit=1024)
    writer.write(request_bytes("/generate", body))
    await engine.wait_for(lambda e: e.core.schedulers[0].totals.finished, timeout_s=20)
    received = b""
    while data := await reader.read(1 << 20):
        received += data
    writer.close()
    answer = parse_answer(received)
    assert answer is not None
    events = answer.events()[:-1]
    whole = await ask(engine.port, "/generate", {**body, "stream": False})
    assert [token for event in events for token in event["output_ids"]] == whole.json()["output_ids"]
    assert "".join(event["text"] for event in events) == whole.json()["text"]
    assert sum(len(event["meta_info"]["output_token_logprobs"]) for event in events) == 12_000


async def test_stop_closes_open_exchanges(start_engine: StartEngine) -> None:
    engine = await start_engine(inter_token_ms=10)
    async with asyncio.TaskGroup() as group:
        body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 1000}}
        group.create_task(send(engine.port, request_bytes("/generate", body)))
        await engine.wait_for(lambda e: e.running == 1)
        await engine.stop()
    assert engine.open_connections == 0

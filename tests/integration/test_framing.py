"""Answers as HTTP: what follows on the connection, and how bodies are framed, for every kind of request."""

import asyncio

import pytest

from simulator.server import SimulatedEngine
from tests.fakes.running import PATIENCE_S, RunningGateway
from tests.fakes.script_engine import Reply, ScriptEngine, SeenRequest
from tests.fakes.wire import Wire, request_bytes, wire

UNARY = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}}
STREAM = {**UNARY, "stream": True}


async def test_a_connection_carries_answers_of_all_kinds(gateway: RunningGateway) -> None:
    async with wire(gateway.address) as connection:
        for _ in range(2):
            await connection.send(request_bytes("/generate", UNARY))
            answer = await connection.answer()
            assert (answer.status, answer.is_whole) == (200, True)
            assert "date" in answer.headers
            assert "connection" not in answer.headers
            assert answer.headers["content-length"] == str(len(answer.body))
            await connection.send(request_bytes("/generate", STREAM))
            answer = await connection.answer()
            assert (answer.status, answer.events()[-1]) == (200, b"[DONE]")
            await connection.send(request_bytes("/generate", b"no JSON"))
            assert (await connection.answer()).status == 400
            await connection.send(request_bytes("/health/live", method="GET"))
            await connection.answer()


@pytest.mark.parametrize("body", [UNARY, STREAM, b"no JSON"], ids=["unary", "stream", "refused"])
async def test_a_client_that_wants_the_connection_closed(
    gateway: RunningGateway, body: bytes | dict[str, object]
) -> None:
    async with wire(gateway.address) as connection:
        await connection.send(request_bytes("/generate", body, headers={"Connection": "close"}))
        answer = await connection.answer()
        assert (answer.is_whole, answer.headers["connection"]) == (True, "close")
        assert await connection.is_closed()


async def test_http_1_0(gateway: RunningGateway) -> None:
    async with wire(gateway.address) as connection:
        await connection.send(request_bytes("/generate", UNARY).replace(b"HTTP/1.1", b"HTTP/1.0"))
        answer = await connection.answer()
        assert (answer.status, answer.is_whole, answer.headers["connection"]) == (200, True, "close")
        assert await connection.is_closed()


async def everything(connection: Wire) -> bytes:
    """What comes until the connection is closed."""
    async with asyncio.timeout(PATIENCE_S):
        return await connection.reader.read(-1)


async def test_a_stream_to_http_1_0_ends_with_its_connection(gateway: RunningGateway) -> None:
    async with wire(gateway.address) as connection:
        await connection.send(request_bytes("/generate", STREAM).replace(b"HTTP/1.1", b"HTTP/1.0"))
        status, headers = await connection.head()
        assert (status, headers["connection"]) == (200, "close")
        assert not {"transfer-encoding", "content-length"} & headers.keys()
        events = (await everything(connection)).split(b"\n\n")
    assert [event[:6] for event in events[:-1]] == [b"data: "] * 3
    assert events[-2:] == [b"data: [DONE]", b""]
    assert (await gateway.record()).outcome == "complete"


# Longer than what is read before an answer begins.
LONG_TEXT = b'{"text":"%b"}' % (b"a" * (3 << 20))


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "cut by the engine"])
async def test_a_long_answer_to_http_1_0_is_never_cut_in_silence(
    front: RunningGateway, scripted: ScriptEngine, is_whole: bool
) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked(content_type="application/json")
        await reply.chunk(LONG_TEXT[: 2 << 20])
        if not is_whole:
            reply.reset()
            return
        await reply.chunk(LONG_TEXT[2 << 20 :])
        await reply.end_chunked()

    scripted.script = script
    async with wire(front.address) as connection:
        await connection.send(request_bytes("/generate", UNARY).replace(b"HTTP/1.1", b"HTTP/1.0"))
        status, headers = await connection.head()
        assert (status, "transfer-encoding" in headers) == (200, False)
        if is_whole:
            assert await everything(connection) == LONG_TEXT
        else:
            with pytest.raises(ConnectionResetError):
                await everything(connection)
    assert (await front.record()).outcome == ("complete" if is_whole else "truncated")


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/metrics", "/v1/models", "/v1/models/model", "/server_info", "/workers"]
)
async def test_head_asks_what_get_asks(gateway: RunningGateway, path: str) -> None:
    async with wire(gateway.address) as connection:
        await connection.send(request_bytes(path, method="HEAD"))
        status, headers = await connection.head()
        assert (status, int(headers["content-length"]) > 0) == (200, True)
        await connection.send(request_bytes("/health", method="GET"))
        assert (await connection.answer()).json() == {"status": "ok"}


@pytest.mark.parametrize("path", ["/flush_cache", "/workers/{id}/call/flush_cache"])
async def test_head_does_nothing(gateway: RunningGateway, engine: SimulatedEngine, path: str) -> None:
    worker = next(iter(gateway.gateway.services.fleet)).worker.id
    async with wire(gateway.address) as connection:
        await connection.send(request_bytes(path.format(id=worker), method="HEAD"))
        status, headers = await connection.head()
    assert (status, "allow" in headers) == (405, True)
    assert not [request for request in engine.log.requests if request.path == "/flush_cache"]


async def test_an_answer_to_head_has_no_body(gateway: RunningGateway) -> None:
    async with wire(gateway.address) as connection:
        await connection.send(request_bytes("/generate", method="HEAD"))
        status, headers = await connection.head()
        assert (status, int(headers["content-length"]) > 0) == (405, True)
        await connection.send(request_bytes("/generate", UNARY))
        assert (await connection.answer()).status == 200


@pytest.mark.parametrize("size", [60_000, 200_000])
async def test_pipelined_answers_keep_their_order_whatever_their_size(
    gateway: RunningGateway, engine: SimulatedEngine, size: int
) -> None:
    engine.add_fault(at="headers", do=f"huge:{size}", times=1)
    async with wire(gateway.address) as connection:
        requests = [request_bytes("/generate", body) for body in (UNARY, STREAM, UNARY)]
        await connection.send(b"".join(requests))
        assert len((await connection.answer()).body) == size
        assert (await connection.answer()).events()[-1] == b"[DONE]"
        assert b"meta_info" in (await connection.answer()).body

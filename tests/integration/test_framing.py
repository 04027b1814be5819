"""Answers as HTTP: what follows on the connection, and how bodies are framed, for every kind of request."""

import pytest

from simulator.server import SimulatedEngine
from tests.fakes.running import RunningGateway
from tests.fakes.wire import request_bytes, wire

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

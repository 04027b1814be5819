"""Control calls: one bounded body, and nothing left behind."""

import asyncio

import pytest

from backends.errors import AnswerBroken, AnswerTooLarge
from backends.upstream.base import UpstreamRequest
from backends.upstream.fetch import fetch
from backends.upstream.h1 import H1Client
from tests.backends.upstream.conftest import both_loops as anyio_backend  # noqa: F401
from tests.fakes.raw_server import Connection, answer, answers, chunked, raw_server
from tests.fakes.running import until

GET = UpstreamRequest("GET", "/x", [], [])


async def test_status_and_body(client: H1Client) -> None:
    async with raw_server(answers(answer(b"abc", status=b"404 Not Found"), chunked([b"a" * 70_000, b"b"]))) as server:
        assert await fetch(client, server.origin, GET) == (404, b"abc")
        assert await fetch(client, server.origin, GET, max_bytes=70_001) == (200, b"a" * 70_000 + b"b")
        assert client.idle_connections == 1


async def test_a_body_above_the_bound_ends_the_call(client: H1Client) -> None:
    async with raw_server(answers(chunked([b"abcd", b"e"]))) as server:
        with pytest.raises(AnswerTooLarge) as caught:
            await fetch(client, server.origin, GET, max_bytes=4)
        assert caught.value.limit_bytes == 4


async def test_a_time_limit_closes_the_call(client: H1Client) -> None:
    async with raw_server(answers()) as server:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await fetch(client, server.origin, GET)
        await until(lambda: client.active_connections == 0, "the call is closed")


async def test_what_breaks_off_is_an_error(client: H1Client) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(answer(b"abc")[:-1])

    async with raw_server(script) as server:
        with pytest.raises(AnswerBroken):
            await fetch(client, server.origin, GET)

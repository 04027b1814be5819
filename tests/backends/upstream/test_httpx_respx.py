"""What the httpx client asks of httpx, and how it names what httpx raises, against mocked transports."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
import respx

from backends.errors import (
    AnswerBroken,
    AnswerMalformed,
    CallClosed,
    ConnectFailed,
    ConnectionDropped,
    ConnectTimeout,
    RequestUnsendable,
    UpstreamError,
)
from backends.upstream.base import Origin, UpstreamRequest
from backends.upstream.fetch import fetch
from backends.upstream.httpx_client import HttpxClient
from tests.fakes.running import PATIENCE_S, until

ORIGIN = Origin("http", "engine.example", 30000, "/prefix")
HEADERS = [(b"content-type", b"application/json"), (b"x-session-id", b" s ")]
REQUEST = UpstreamRequest("POST", "/generate?a=%20", HEADERS, [b"{", memoryview(b"}")])


@pytest.fixture
async def client() -> AsyncIterator[HttpxClient]:
    """A client that must hold nothing at the end."""
    one = HttpxClient()
    yield one
    async with asyncio.timeout(PATIENCE_S):
        await one.aclose()
    await until(lambda: one.active_connections == 0, "nothing is active")


async def answer(client: HttpxClient, origin: Origin = ORIGIN, request: UpstreamRequest = REQUEST) -> tuple[int, bytes]:
    async with asyncio.timeout(PATIENCE_S):
        return await fetch(client, origin, request)


@pytest.mark.parametrize("using", ["httpcore", "httpx"])
async def test_request_shape(client: HttpxClient, using: str) -> None:
    with respx.mock(using=using) as mock:
        route = mock.post("http://engine.example:30000/prefix/generate?a=%20").respond(200, json={"text": "x"})
        assert await answer(client) == (200, b'{"text":"x"}')
    sent = route.calls.last.request
    assert sent.headers.raw == [
        (b"host", b"engine.example:30000"),
        (b"content-type", b"application/json"),
        (b"x-session-id", b"s"),
        (b"content-length", b"2"),
    ]
    assert sent.extensions["target"] == b"/prefix/generate?a=%20"
    assert sent.extensions["timeout"] == dict.fromkeys(("connect", "read", "write", "pool"))
    if using == "httpcore":
        assert sent.content == b"{}"


@respx.mock
async def test_the_target_is_sent_even_where_no_url_can_show_it(
    client: HttpxClient, respx_mock: respx.MockRouter
) -> None:
    route = respx_mock.options().respond(204)
    assert await answer(client, Origin("http", "engine.example", 80), UpstreamRequest("OPTIONS", "*", [], [])) == (
        204,
        b"",
    )
    sent = route.calls.last.request
    assert sent.extensions["target"] == b"*"
    assert sent.headers.raw == [(b"host", b"engine.example"), (b"content-length", b"0")]


async def test_head_of_an_answer(client: HttpxClient) -> None:
    with respx.mock as mock:
        mock.post(host="engine.example").respond(
            429, headers=[("Content-Type", "Text/Plain; charset=x"), ("Retry-After", "1")], content=b"busy"
        )
        call = client.send(ORIGIN, REQUEST)
        assert call.written_at is None
        async with asyncio.timeout(PATIENCE_S):
            head = await call.head()
            assert (head.status, head.content_type, head.content_length) == (429, "text/plain", 4)
            assert (b"retry-after", b"1") in head.headers
            assert call.written_at is not None
            assert await call.read() == b"busy"
            assert await call.read() == b""
        assert call.is_complete


async def test_redirects_are_answers(client: HttpxClient) -> None:
    with respx.mock as mock:
        mock.post(host="engine.example").respond(307, headers={"location": "http://other.example/"})
        assert (await answer(client))[0] == 307


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (httpx.ConnectTimeout("x"), ConnectTimeout),
        (httpx.ConnectError("x"), ConnectFailed),
        (httpx.ReadError("x"), ConnectionDropped),
        (httpx.WriteError("x"), ConnectionDropped),
        (httpx.ReadTimeout("x"), ConnectionDropped),
        (httpx.RemoteProtocolError("x"), ConnectionDropped),
        (httpx.LocalProtocolError("x"), RequestUnsendable),
        (httpx.InvalidURL("x"), ConnectFailed),
        (OSError("x"), ConnectFailed),
        (UnicodeError("x"), ConnectFailed),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_errors_before_an_answer(client: HttpxClient, raised: Exception, kind: type[UpstreamError]) -> None:
    with respx.mock as mock:
        mock.post(host="engine.example").mock(side_effect=raised)
        with pytest.raises(kind) as caught:
            await answer(client)
    assert type(caught.value) is kind
    assert isinstance(caught.value.__cause__, Exception)
    assert type(caught.value.__cause__) is type(raised)


class Broken(httpx.AsyncByteStream):
    """A body that fails after its first part."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"part"
        raise self._error


@pytest.mark.parametrize("raised", [httpx.ReadError("x"), httpx.RemoteProtocolError("x"), OSError("x")])
async def test_errors_inside_an_answer(client: HttpxClient, raised: Exception) -> None:
    with respx.mock as mock:
        mock.post(host="engine.example").mock(return_value=httpx.Response(200, stream=Broken(raised)))
        call = client.send(ORIGIN, REQUEST)
        async with asyncio.timeout(PATIENCE_S):
            assert (await call.head()).status == 200
            assert await call.read() == b"part"
            with pytest.raises(AnswerBroken):
                await call.read()


async def test_an_unexpected_error_ends_the_call(client: HttpxClient, caplog: pytest.LogCaptureFixture) -> None:
    with respx.mock as mock:
        mock.post(host="engine.example").mock(side_effect=ZeroDivisionError)
        with pytest.raises(UpstreamError):
            await answer(client)
    assert "failed" in caplog.text


async def test_a_protocol_switch_is_no_answer(client: HttpxClient) -> None:
    with respx.mock as mock:
        mock.post(host="engine.example").respond(101)
        with pytest.raises(AnswerMalformed):
            await answer(client)


async def test_closing_ends_a_mocked_call(client: HttpxClient) -> None:
    with respx.mock as mock:
        mock.post(host="engine.example").respond(200)
        call = client.send(ORIGIN, REQUEST)
        call.close()
        with pytest.raises(CallClosed):
            await call.head()
        await until(lambda: client.active_connections == 0, "nothing is active")
    assert not mock.calls

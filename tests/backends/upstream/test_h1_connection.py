"""Answers as they come off the wire: framing, what breaks, what is no HTTP, and when a connection is used again."""

import asyncio

import pytest

from backends.errors import AnswerBroken, AnswerMalformed, ConnectionDropped, UpstreamError
from backends.upstream.base import AnswerHead, UpstreamRequest
from backends.upstream.h1 import H1Client
from backends.upstream.h1_connection import MAX_HEAD_BYTES, PLAIN_FROM_BYTES
from tests.backends.upstream.conftest import Post, Whole
from tests.backends.upstream.conftest import both_loops as anyio_backend  # noqa: F401
from tests.fakes.raw_server import Connection, RawServer, Script, answer, answers, chunked, raw_server
from tests.fakes.running import until

JSON = (b"content-type", b"application/json")


def replies(*wires: bytes, dribbled: bool = False, reset: bool = False) -> Script:
    """Answer the first request with bytes, then end the connection."""

    async def script(connection: Connection) -> None:
        await connection.request()
        for wire in wires:
            await (connection.dribble(wire) if dribbled else connection.send(wire))
        if reset:
            connection.reset()

    return script


WIRES = [
    pytest.param(answer(b"abc"), AnswerHead(200, [JSON, (b"content-length", b"3")], 3, "application/json"), b"abc",
                 True, id="content-length"),
    pytest.param(answer(b""), AnswerHead(200, [JSON, (b"content-length", b"0")], 0, "application/json"), b"", True,
                 id="empty"),
    pytest.param(chunked([b"ab", b"c" * 17], b"Content-Type: Text/Event-Stream; charset=utf-8"),
                 AnswerHead(200, [(b"transfer-encoding", b"chunked"),
                                  (b"content-type", b"Text/Event-Stream; charset=utf-8")], None, "text/event-stream"),
                 b"ab" + b"c" * 17, True, id="chunked"),
    pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\n"
                 b"X-Sum: 9\r\nContent-Type: text/html\r\n\r\n",
                 AnswerHead(200, [(b"transfer-encoding", b"chunked")], None, ""), b"abc", True,
                 id="chunk extension, and trailers that are no headers"),
    pytest.param(b"HTTP/1.1 200 OK\r\nX:\r\n\r\nabc", AnswerHead(200, [(b"x", b"")], None, ""), b"abc", False,
                 id="until the end of the connection"),
    pytest.param(b"HTTP/1.0 200 OK\r\n\r\n", AnswerHead(200, [], None, ""), b"", False, id="HTTP/1.0, nothing"),
    pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n", AnswerHead(204, [], None, ""), b"", True, id="204"),
    pytest.param(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nContent-Length: 7\r\nA: b\r\n\r\n" + answer(b"x"),
                 AnswerHead(200, [JSON, (b"content-length", b"1")], 1, "application/json"), b"x", True,
                 id="1xx are skipped with their headers"),
    pytest.param(answer(b"x", b"connection: close", status=b"503 Busy"),
                 AnswerHead(503, [(b"connection", b"close"), (b"content-length", b"1")], 1, ""), b"x", False,
                 id="connection: close"),
    pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nConnection: keep-alive\r\n\r\nx\r\n",
                 AnswerHead(200, [(b"content-length", b"1"), (b"connection", b"keep-alive")], 1, ""), b"x", True,
                 id="a stray line break after the answer"),
]  # fmt: skip


@pytest.mark.parametrize("dribbled", [False, True], ids=["at once", "byte by byte"])
@pytest.mark.parametrize(("wire", "head", "body", "is_kept"), WIRES)
async def test_answers(
    wire: bytes,
    head: AnswerHead,
    body: bytes,
    is_kept: bool,
    dribbled: bool,
    client: H1Client,
    post: Post,
    whole: Whole,
) -> None:
    reply = replies(wire, dribbled=dribbled)

    async def script(connection: Connection) -> None:
        await reply(connection)
        if is_kept:
            await connection.hang()

    async with raw_server(script) as server:
        call = post(server.origin)
        assert await whole(call) == (head, body)
        assert call.is_complete
        assert call.is_over
        assert await call.read() == b""
        if not wire.endswith(b"x\r\n"):  # there the stray bytes may come late, when nobody wants any
            assert client.idle_connections == is_kept


LONG = bytes(range(256)) * (3 * PLAIN_FROM_BYTES // 256)


@pytest.mark.parametrize("extra", [b"", answer(b"stolen")], ids=["nothing behind it", "another answer behind it"])
async def test_a_long_body_ends_where_it_says(extra: bytes, client: H1Client, post: Post, whole: Whole) -> None:
    """The parser sees the head of such an answer, and has to be ready for the next one."""
    wire = answer(LONG)
    head_bytes = len(wire) - len(LONG)
    calls = 0

    async def script(connection: Connection) -> None:
        nonlocal calls
        await connection.request()
        await connection.send(wire[:head_bytes])
        await until(lambda: has_head, "the head was read by itself")
        await connection.send(wire[head_bytes:-1])
        await connection.send(wire[-1:] + extra)
        if not extra:
            await connection.request()
            calls += 1
            await connection.send(answer(b"next"))
        await connection.hang()

    has_head = False
    async with raw_server(script) as server:
        call = post(server.origin)
        await call.head()
        has_head = True
        assert (await whole(call))[1] == LONG
        if extra:
            await until(lambda: client.idle_connections == client.active_connections == 0, "it is closed")
        else:
            assert (await whole(post(server.origin)))[1] == b"next"
            assert (calls, len(server.connections)) == (1, 1)


async def test_a_long_body_that_breaks_off_is_an_error(post: Post, whole: Whole) -> None:
    async with raw_server(replies(answer(LONG)[:-1])) as server:
        with pytest.raises(AnswerBroken):
            await whole(post(server.origin))


BROKEN = [
    pytest.param(b"", ConnectionDropped, id="nothing"),
    pytest.param(b"HTTP/1.1 2", AnswerBroken, id="inside the status line"),
    pytest.param(b"HTTP/1.1 200 OK\r\nA: b\r\n", AnswerBroken, id="inside the head"),
    pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n", AnswerBroken, id="after a 1xx"),
    pytest.param(answer(b"abcd")[:-1], AnswerBroken, id="one byte short"),
    pytest.param(answer(b"abcd")[:-4], AnswerBroken, id="no body at all"),
    pytest.param(chunked([b"abc"])[:-5], AnswerBroken, id="no last chunk"),
    pytest.param(chunked([b"abc"])[:-1], AnswerBroken, id="no end of the last chunk"),
    pytest.param(b"SSH-2.0-OpenSSH\r\n", AnswerMalformed, id="another protocol"),
    pytest.param(b"\x16\x03\x01\x02", AnswerMalformed, id="TLS"),
    pytest.param(b"HTTP/1.1 abc\r\n\r\n", AnswerMalformed, id="no status"),
    pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", AnswerMalformed, id="length is no number"),
    pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n", AnswerMalformed,
                 id="two lengths"),
    pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n", AnswerMalformed,
                 id="length and chunks"),
    pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", AnswerMalformed, id="chunk size"),
    pytest.param(b"HTTP/1.1 200 OK\r\nA: b\r\n folded\r\n\r\n", AnswerMalformed, id="folded header"),
    pytest.param(b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n", AnswerMalformed, id="upgrade"),
]  # fmt: skip


@pytest.mark.parametrize(("wire", "error"), BROKEN)
async def test_what_is_no_whole_answer_is_an_error(
    wire: bytes, error: type[UpstreamError], client: H1Client, post: Post, whole: Whole
) -> None:
    async with raw_server(replies(wire)) as server:
        call = post(server.origin)
        with pytest.raises(error):
            await whole(call)
        with pytest.raises(error):
            await call.read()
        assert call.is_over
        assert not call.is_complete
        await until(lambda: client.active_connections == 0, "the connection is gone")
        assert client.idle_connections == 0
        assert len(server.requests) == 1  # a new connection is never resent on


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\n\r\nabc", chunked([b"a"])[:-3]])
async def test_a_reset_is_never_an_end(sent: bytes, post: Post, whole: Whole) -> None:
    async with raw_server(replies(*filter(None, [sent]), reset=True)) as server:
        with pytest.raises(AnswerBroken if sent else ConnectionDropped):
            await whole(post(server.origin))


@pytest.mark.parametrize(
    "extra",
    [
        pytest.param(answer(b"stolen"), id="another answer"),
        pytest.param(b"rubbish", id="garbage"),
        pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n", id="1xx"),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
async def test_bytes_after_the_answer_end_the_connection(
    extra: bytes, at_once: bool, client: H1Client, post: Post, whole: Whole
) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(answer(b"mine") + (extra if at_once else b""))
        if not at_once:
            await client_has_read.wait()
            await connection.send(extra)
        await connection.hang()

    client_has_read = asyncio.Event()
    async with raw_server(script, answers(answer(b"next"))) as server:
        assert (await whole(post(server.origin)))[1] == b"mine"
        client_has_read.set()
        await until(lambda: client.idle_connections == client.active_connections == 0, "the connection is closed")
        assert (await whole(post(server.origin)))[1] == b"next"
        assert len(server.connections) == 2


async def test_an_answer_before_the_request_is_written_is_not_reused(
    client: H1Client, post: Post, whole: Whole
) -> None:
    async def script(connection: Connection) -> None:
        await connection.reader.readuntil(b"\r\n\r\n")  # and nothing of the body
        await connection.send(answer(b"too large", status=b"413 Too Large"))
        connection.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await connection_may_end.wait()

    connection_may_end = asyncio.Event()
    async with raw_server(script) as server:
        head, body = await whole(post(server.origin, b"x" * 20_000_000))
        assert (head.status, body) == (413, b"too large")
        await until(lambda: client.active_connections == 0, "the half-written connection is closed")
        assert client.idle_connections == 0
        connection_may_end.set()


async def test_a_worker_that_closes_without_reading_the_request_ends_the_call(post: Post) -> None:
    async def script(connection: Connection) -> None:
        await connection.reader.readuntil(b"\r\n\r\n")
        connection.reader._transport.pause_reading()  # type: ignore[attr-defined]
        connection.writer.write_eof()
        await connection_may_end.wait()

    connection_may_end = asyncio.Event()
    async with raw_server(script) as server:
        with pytest.raises(ConnectionDropped):
            await post(server.origin, b"x" * 20_000_000).head()
        connection_may_end.set()


@pytest.mark.parametrize(
    "wire",
    [
        pytest.param(b"HTTP/1.1 200 OK\r\n" + b"a: %b\r\n" % (b"b" * 1000) * 300, id="many headers"),
        pytest.param(b"HTTP/1.1 200 OK\r\na: " + b"b" * (MAX_HEAD_BYTES + 70_000), id="one header without end"),
        pytest.param(b"HTTP/1.1 102 Processing\r\n\r\n" * 15_000, id="1xx without end"),
    ],
)
async def test_huge_heads_are_refused(wire: bytes, client: H1Client, post: Post) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(wire)
        await connection.hang()

    async with raw_server(script) as server:
        with pytest.raises(AnswerMalformed, match="head is larger"):
            await post(server.origin).head()
        await until(lambda: client.active_connections == 0, "the connection is gone")


async def test_a_large_head_passes(post: Post, whole: Whole) -> None:
    wire = answer(b"x", *[b"h%d: %b" % (index, b"v" * 1000) for index in range(100)])
    async with raw_server(answers(wire)) as server:
        head, body = await whole(post(server.origin))
        assert len(head.headers) == 101
        assert body == b"x"


@pytest.mark.parametrize("size", [0, 1, 65_000, 64 * 1024, 1_000_000])
async def test_the_request_is_on_the_wire_as_given(size: int, client: H1Client) -> None:
    body: list[bytes | memoryview] = [b"{" + b" " * (size // 2), memoryview(b"\xff" * (size - size // 2))]
    request = UpstreamRequest("POST", "/generate?a=b", [(b"x-a", b"1"), (b"x-a", b"2")], body)
    async with raw_server(answers(answer()), prefix="/engine") as server:
        await client.send(server.origin, request).head()
        seen = server.requests[0]
        assert seen.line == b"POST /engine/generate?a=b HTTP/1.1"
        assert seen.headers == [
            (b"host", server.origin.authority.encode()),
            (b"x-a", b"1"),
            (b"x-a", b"2"),
            (b"content-length", b"%d" % sum(map(len, body))),
        ]
        assert seen.body == b"".join(body)


async def test_ipv6(client: H1Client, post: Post, whole: Whole) -> None:
    try:
        async with raw_server(answers(answer(b"six")), host="::1") as server:
            assert (await whole(post(server.origin)))[1] == b"six"
            assert server.requests[0].headers[0] == (b"host", b"[::1]:%d" % server.origin.port)
    except OSError:
        pytest.skip("no IPv6 here")


def served(server: RawServer) -> list[int]:
    """Requests by connection."""
    return [len(connection.requests) for connection in server.connections]


async def test_connections_are_kept_last_in_first_out(client: H1Client, post: Post, whole: Whole) -> None:
    async with raw_server(answers(*[answer()] * 4)) as server:
        first, second = post(server.origin), post(server.origin)
        await whole(first)
        await whole(second)
        order = [len(connection.requests) for connection in server.connections]
        assert order == [1, 1]
        assert client.idle_connections == 2
        for count in (2, 3, 4):
            await whole(post(server.origin))
            assert sorted(served(server)) == [1, count]  # the same one each time
        assert client.idle_connections == 2

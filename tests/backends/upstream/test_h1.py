"""The pool: what is reused, what is resent, how connecting fails, and how it all ends."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Any

import pytest

from backends.errors import (
    AnswerBroken,
    CallClosed,
    ConnectFailed,
    ConnectionDropped,
    ConnectTimeout,
    RequestUnsendable,
    UpstreamError,
)
from backends.upstream.base import Origin, UpstreamRequest
from backends.upstream.h1 import H1Client
from tests.backends.upstream.conftest import Fails, Post, Whole
from tests.backends.upstream.conftest import both_loops as anyio_backend  # noqa: F401
from tests.fakes.raw_server import Connection, answer, answers, raw_server
from tests.fakes.running import PATIENCE_S, until

GET = UpstreamRequest("GET", "/x", [], [])


def free_origin() -> Origin:
    """An address where nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return Origin("http", "127.0.0.1", sock.getsockname()[1])


async def test_an_idle_connection_is_used_until_its_limit(whole: Whole) -> None:
    client = H1Client(idle_limit_s=0.05)
    async with raw_server(answers(answer(), answer())) as server:
        await whole(client.send(server.origin, GET))
        await whole(client.send(server.origin, GET))
        assert len(server.connections) == 1
        await until(lambda: client.idle_connections == 0, "the idle connection is swept")
        await until(lambda: client.active_connections == 0, "and closed")
        await whole(client.send(server.origin, GET))
        assert len(server.connections) == 2
        await client.aclose()


async def test_sweeping_keeps_what_is_younger(whole: Whole) -> None:
    client = H1Client(idle_limit_s=0.1)
    async with raw_server(answers(answer(), answer())) as server, raw_server(answers(*[answer()] * 9)) as other:
        await whole(client.send(server.origin, GET))
        for _ in range(6):
            await whole(client.send(other.origin, GET))
            await asyncio.sleep(0.02)
        await until(lambda: client.idle_connections == 1, "only the older one goes")
        assert len(other.connections) == 1
        await client.aclose()


async def test_a_connection_past_its_limit_is_not_used_even_if_unswept(whole: Whole) -> None:
    client = H1Client(idle_limit_s=PATIENCE_S)
    async with raw_server(answers(answer(), answer())) as server:
        await whole(client.send(server.origin, GET))
        (idle,) = client._idle[server.origin]
        idle.idle_since -= PATIENCE_S
        await whole(client.send(server.origin, GET))
        assert len(server.connections) == 2
        assert client.idle_connections == 1
        await client.aclose()


async def test_origins_do_not_share_connections(client: H1Client, whole: Whole) -> None:
    async with raw_server(answers(answer(b"a"))) as one, raw_server(answers(answer(b"b"))) as two:
        assert (await whole(client.send(one.origin, GET)))[1] == b"a"
        assert (await whole(client.send(two.origin, GET)))[1] == b"b"
        assert client.idle_connections == 2


async def test_a_connection_that_the_worker_closed_is_forgotten(client: H1Client, post: Post, whole: Whole) -> None:
    async def once(connection: Connection) -> None:
        await connection.request()
        await connection.send(answer())

    async with raw_server(once) as server:
        await whole(post(server.origin))
        await until(lambda: client.idle_connections == 0, "the idle connection is forgotten")
        await whole(post(server.origin))
        assert [len(connection.requests) for connection in server.connections] == [1, 1]


def stale(how: Callable[[Connection], None], partial: bytes = b"") -> Callable[[Connection], Any]:
    """Answer once; the second request on the connection gets nothing, or a few bytes, and the connection's end."""

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(answer(b"first"))
        await connection.request()
        await connection.send(partial)
        how(connection)

    return script


ENDS = [pytest.param(Connection.close, id="FIN"), pytest.param(Connection.reset, id="RST")]


@pytest.mark.parametrize("how", ENDS)
async def test_a_stale_connection_is_replaced_once(
    how: Callable[[Connection], None], client: H1Client, post: Post, whole: Whole
) -> None:
    async with raw_server(stale(how), answers(answer(b"second"))) as server:
        await whole(post(server.origin))
        call = post(server.origin, b'{"again":1}')
        first_written_at = call.written_at
        assert first_written_at is not None
        assert (await whole(call))[1] == b"second"
        assert call.written_at is not None
        assert call.written_at >= first_written_at
        assert [request.body for request in server.requests] == [b"{}", b'{"again":1}', b'{"again":1}']


@pytest.mark.parametrize("how", ENDS)
async def test_a_request_is_resent_only_once(
    how: Callable[[Connection], None], client: H1Client, post: Post, whole: Whole
) -> None:
    async def drop(connection: Connection) -> None:
        await connection.request()
        how(connection)

    async with raw_server(stale(how), drop) as server:
        await whole(post(server.origin))
        with pytest.raises(ConnectionDropped):
            await whole(post(server.origin))
        assert [len(connection.requests) for connection in server.connections] == [2, 1]


async def test_nothing_is_resent_once_a_byte_came(client: H1Client, post: Post, whole: Whole) -> None:
    async with raw_server(stale(Connection.close, b"H"), answers(answer())) as server:
        await whole(post(server.origin))
        with pytest.raises(AnswerBroken):
            await whole(post(server.origin))
        assert len(server.connections) == 1


async def test_a_resend_that_finds_nobody_is_no_proof_that_nothing_was_sent(
    client: H1Client, post: Post, whole: Whole
) -> None:
    async def script(connection: Connection) -> None:
        await stale(Connection.reset)(connection)

    async with raw_server(script) as server:
        await whole(post(server.origin))
        origin = server.origin
        call = post(origin)
        # The listener closes with the block while the second request is on its way.
    with pytest.raises(ConnectionDropped) as caught:
        await whole(call)
    assert not isinstance(caught.value, ConnectFailed)


async def test_closing_while_a_stale_connection_is_replaced(
    client: H1Client, post: Post, whole: Whole, fails: Fails
) -> None:
    async with raw_server(stale(Connection.reset), answers()) as server:
        await whole(post(server.origin))
        call = post(server.origin)
        async with asyncio.TaskGroup() as group:
            group.create_task(fails(call, CallClosed))
            await server.connection(1)
            call.close()
            await until(lambda: client.active_connections == 0, "nothing is left")


async def test_refused(client: H1Client, post: Post) -> None:
    call = post(free_origin())
    with pytest.raises(ConnectFailed) as caught:
        await call.head()
    assert not isinstance(caught.value, ConnectTimeout)
    assert call.written_at is None
    await until(lambda: client.active_connections == client.connecting == 0, "nothing is left")


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 64, "a..b"])
async def test_names_that_are_none(host: str, client: H1Client, post: Post) -> None:
    with pytest.raises(ConnectFailed):
        await post(Origin("http", host, 1)).head()


async def test_connect_timeout() -> None:
    client = H1Client(connect_timeout_s=0.02)
    with socket.socket() as sock:  # a full backlog: the handshake never ends
        sock.bind(("127.0.0.1", 0))
        sock.listen(0)
        address = sock.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        try:
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(address)
            call = client.send(Origin("http", *address), GET)
            assert client.connecting == client.active_connections == 1
            with pytest.raises(ConnectTimeout, match=r"0\.02 s"):
                await call.head()
            assert call.written_at is None
        finally:
            for filler in fillers:
                filler.close()
    await until(lambda: client.connecting == 0, "the attempt is over")
    await client.aclose()


@pytest.mark.parametrize("context", [None, ssl.create_default_context()], ids=["default context", "given context"])
async def test_tls_that_fails_is_a_failed_connection(context: ssl.SSLContext | None) -> None:
    client = H1Client(tls=context)

    async def plain(connection: Connection) -> None:
        await connection.reader.read(1)
        await connection.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with raw_server(plain) as server:
        with pytest.raises(ConnectFailed):
            await client.send(Origin("https", "127.0.0.1", server.origin.port), GET).head()
    await client.aclose()


async def test_what_cannot_be_written_is_the_calls_failure(client: H1Client) -> None:
    async with raw_server(answers(answer())) as server:
        bad = UpstreamRequest("POST", "/x", [(b"x-session-id", b"a\r\nx-forged: 1")], [])
        call = client.send(server.origin, bad)
        assert call.is_over
        with pytest.raises(RequestUnsendable):
            await call.head()
        assert server.connections == []


PHASES = {
    "connected": (b"", ConnectionDropped),
    "in the head": (b"HTTP/1.1 200", AnswerBroken),
    "in the body": (answer(b"abcd")[:-2], AnswerBroken),
}


@pytest.mark.parametrize(("sent", "error"), PHASES.values(), ids=PHASES)
async def test_closing_the_client_ends_calls(sent: bytes, error: type[UpstreamError], fails: Fails) -> None:
    client = H1Client()

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(sent)
        has_sent.set()
        await connection.hang()

    has_sent = asyncio.Event()
    async with raw_server(script) as server, asyncio.timeout(PATIENCE_S):
        call = client.send(server.origin, GET)
        async with asyncio.TaskGroup() as group:
            group.create_task(fails(call, error, "shut down"))
            await has_sent.wait()
            if sent:
                await until(lambda: client._open.copy().pop()._head_bytes > 0, "the bytes have arrived")
            await client.aclose()
        await until(lambda: client.active_connections == 0, "no connection is left")
        with pytest.raises(ConnectFailed, match="closed"):
            await client.send(server.origin, GET).head()


async def test_closing_the_client_ends_a_call_that_is_connecting() -> None:
    client = H1Client()
    call = client.send(free_origin(), GET)
    await client.aclose()
    with pytest.raises(ConnectFailed, match="closed"):
        await call.head()
    assert client.active_connections == 0


async def test_closing_the_client_closes_what_is_idle(whole: Whole) -> None:
    client = H1Client()
    async with raw_server(answers(answer())) as server:
        await whole(client.send(server.origin, GET))
        await client.aclose()
        assert client.idle_connections == 0
        await until(lambda: client.active_connections == 0, "no connection is left")
        connection = server.connections[0]
        await until(connection.reader.at_eof, "the connection is closed")


async def test_an_answer_that_ends_while_the_client_closes_is_not_kept(whole: Whole) -> None:
    client = H1Client()
    async with raw_server(answers(answer())) as server:
        call = client.send(server.origin, GET)
        await call.head()
        (connection,) = client._open
        client._is_closed = True
        client.release(server.origin, connection)
        assert client.idle_connections == 1  # the call's own, from before
        await client.aclose()
        await until(lambda: client.active_connections == 0, "no connection is left")

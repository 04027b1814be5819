"""What only the httpx client has to take care of: the library's pool, its parser, and what it keeps by itself."""

import asyncio
import ssl
from collections.abc import AsyncIterator

import pytest

from backends.errors import AnswerMalformed, ConnectFailed, ConnectionDropped, RequestUnsendable
from backends.tasks import OwnedTasks
from backends.upstream.base import Origin, UpstreamRequest
from backends.upstream.fetch import fetch
from backends.upstream.httpx_call import MAX_BUFFERED_BYTES
from backends.upstream.httpx_client import HttpxClient
from tests.fakes.running import PATIENCE_S, until
from tests.fakes.scripted_peer import PeerServer, peer_server

GET = UpstreamRequest("GET", "/", [], [])
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


@pytest.fixture
async def client() -> AsyncIterator[HttpxClient]:
    """A client whose pool must be empty at the end."""
    one = HttpxClient()
    yield one
    async with asyncio.timeout(PATIENCE_S):
        await one.aclose()
    assert pool_of(one) == (0, 0)


@pytest.fixture
async def server() -> AsyncIterator[PeerServer]:
    """A server on IPv4."""
    async with peer_server() as running:
        yield running


def pool_of(client: HttpxClient) -> tuple[int, int]:
    """Connections that are open or about to be, and requests, in the library's own lists."""
    pool = client._transport._pool
    return sum(not one.is_closed() for one in pool.connections), len(pool._requests)


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_the_pool_is_clean_whenever_a_call_is_closed(client: HttpxClient, scheme: str) -> None:
    async with peer_server(scheme=scheme) as server:
        for turns in range(16):
            call = client.send(server.origin, GET)
            for _ in range(turns):
                await asyncio.sleep(0)
            call.close()
            await until(lambda: client.active_connections == 0, "nothing is active")
            assert pool_of(client) == (0, 0)
        for peer in server.peers:
            await peer.hang()


async def test_the_pool_is_clean_whenever_a_connect_times_out(server: PeerServer) -> None:
    for turns in range(16):
        client = HttpxClient(connect_timeout_s=3600)
        call = client.send(server.origin, GET)
        for _ in range(turns):
            await asyncio.sleep(0)
        if call.written_at is None:
            call._connect_expired()
        call.close()
        await until(lambda client=client: client.active_connections == 0, "nothing is active")  # type: ignore[misc]
        assert pool_of(client) == (0, 0)
        await client.aclose()
    for peer in server.peers:
        await peer.hang()


async def test_the_pool_is_clean_whenever_a_reused_connection_is_left(client: HttpxClient, server: PeerServer) -> None:
    for turns in range(12):
        call = client.send(server.origin, GET)
        if client.idle_connections == 0:
            peer = await server.accept()
        await peer.request()
        await peer.send(OK)
        while await call.read():
            pass
        call = client.send(server.origin, GET)
        for _ in range(turns):
            await asyncio.sleep(0)
        call.close()
        await until(lambda: client.active_connections == 0, "nothing is active")
        assert pool_of(client) == (client.idle_connections, 0)
        if client.idle_connections == 0:
            await peer.hang()


async def test_the_buffer_is_bounded(client: HttpxClient, server: PeerServer, tasks: OwnedTasks) -> None:
    call = client.send(server.origin, GET)
    peer = await server.accept()
    await peer.request()
    size = 8 * MAX_BUFFERED_BYTES
    tasks.spawn(peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + bytes(size)), "body")
    async with asyncio.timeout(PATIENCE_S):
        await call.head()
        await until(lambda: call._room is not None, "the reader is paused")
        total = 0
        while data := await call.read():
            assert len(data) <= MAX_BUFFERED_BYTES
            total += len(data)
    assert total == size


@pytest.fixture
async def tasks() -> AsyncIterator[OwnedTasks]:
    """Tasks beside the test."""
    owned = OwnedTasks("test")
    yield owned
    await owned.aclose()


async def test_bytes_behind_an_answer_spoil_the_connection(client: HttpxClient, server: PeerServer) -> None:
    call = client.send(server.origin, GET)
    peer = await server.accept()
    await peer.request()
    await peer.send(OK + b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nstray")
    assert (await call.head()).status == 200
    while await call.read():
        pass
    call = client.send(server.origin, GET)
    with pytest.raises(AnswerMalformed):
        await call.head()
    await peer.hang()
    assert pool_of(client) == (0, 0)


@pytest.mark.parametrize("greeting", [b"SSH-2.0-x\r\n", b"\xff\0\0\0\0\0\0\0\1\x7f", b"\0\0\x12\x04\0\0\0\0\0"])
async def test_other_protocols_are_told_at_once(client: HttpxClient, server: PeerServer, greeting: bytes) -> None:
    call = client.send(server.origin, GET)
    peer = await server.accept()
    await peer.send(greeting)
    with pytest.raises(AnswerMalformed):
        async with asyncio.timeout(PATIENCE_S):
            await call.head()


async def test_no_cookie_is_kept(client: HttpxClient, server: PeerServer) -> None:
    call = client.send(server.origin, GET)
    peer = await server.accept()
    await peer.request()
    await peer.send(b"HTTP/1.1 200 OK\r\nset-cookie: a=b\r\ncontent-length: 0\r\n\r\n")
    assert (await call.head()).status == 200
    assert not list(client._http.cookies.jar)


async def test_a_name_that_only_this_library_refuses(client: HttpxClient, server: PeerServer) -> None:
    call = client.send(server.origin, UpstreamRequest("GET", "/", [(b"no name", b"x")], []))
    with pytest.raises(RequestUnsendable):
        async with asyncio.timeout(PATIENCE_S):
            await call.head()
    assert call.written_at is None
    assert await (await server.accept()).is_left()


async def test_failures_say_what_the_system_said(client: HttpxClient) -> None:
    async with peer_server() as server:
        origin = server.origin
    with pytest.raises(ConnectFailed, match="Connect call failed"):
        async with asyncio.timeout(PATIENCE_S):
            await client.send(origin, GET).head()


async def test_authorities_are_loaded_for_the_first_https_call(client: HttpxClient, server: PeerServer) -> None:
    assert not client._has_authorities
    call = client.send(Origin("https", "127.0.0.1", server.origin.port), GET)
    assert client._has_authorities
    assert client._tls.verify_mode is ssl.CERT_REQUIRED
    assert client._tls.check_hostname
    assert client._tls.minimum_version >= ssl.TLSVersion.TLSv1_2
    call.close()


async def test_closing_a_client_tells_its_calls(server: PeerServer, tasks: OwnedTasks) -> None:
    client = HttpxClient()
    call = client.send(server.origin, GET)
    await (await server.accept()).request()
    tasks.spawn(client.aclose(), "close")
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(ConnectionDropped, match="shut down"):
            await call.head()
        with pytest.raises(ConnectFailed, match="closed"):
            await fetch(client, server.origin, GET)


async def test_it_tells_nobody_who_waits_in_no_task(client: HttpxClient, server: PeerServer) -> None:
    call = client.send(server.origin, GET)
    assert not call.call_when_ready(lambda: pytest.fail("it said that it would not"))
    peer = await server.accept()
    await peer.request()
    await peer.send(OK)
    await until(lambda: call.is_over, "the whole answer is here")
    assert call.whole() is None
    assert (await call.head()).status == 200
    assert await call.read() == b"ok"
    await until(lambda: call.is_complete and not client.active_connections, "the end of the call")

"""Both HTTP clients for workers keep the same promises, over real sockets and on both event loops."""

import asyncio
import hashlib
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from backends.errors import (
    AnswerBroken,
    AnswerMalformed,
    BackendError,
    CallClosed,
    CallInterrupted,
    ConnectFailed,
    ConnectionDropped,
    ConnectTimeout,
    RequestUnsendable,
    UpstreamError,
)
from backends.tasks import OwnedTasks
from backends.upstream.base import Headers, Origin, UpstreamCall, UpstreamClient, UpstreamRequest
from backends.upstream.fetch import fetch
from backends.upstream.h1 import H1Client
from backends.upstream.httpx_client import HttpxClient
from backends.upstream.lost_peer import TO_WORKERS
from backends.upstream.tls import client_context
from tests.fakes.running import PATIENCE_S, TIME_SCALE, until
from tests.fakes.scripted_peer import Peer, PeerServer, peer_server

CLIENTS: dict[str, Callable[..., UpstreamClient]] = {"h1": H1Client, "httpx": HttpxClient}
TLS_DATA = Path(__file__).parent.parent.parent / "data" / "tls"
# "At once": far below any time limit of either client.
PROMPT_S = 2.0 * TIME_SCALE
MIB = 1024 * 1024
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

Make = Callable[..., UpstreamClient]

# Loops differ in how connections end, so tests of that run on the one that finds mistakes and on the one of production.
UVLOOP = ("asyncio", {"use_uvloop": True})
on_both_loops = pytest.mark.parametrize(
    "anyio_backend", [("asyncio", {"debug": True}), UVLOOP], ids=["asyncio", "uvloop"]
)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The loop of production for all other tests."""
    return UVLOOP


@pytest.fixture(params=sorted(CLIENTS))
def client_name(request: pytest.FixtureRequest) -> str:
    """Which client."""
    name: str = request.param
    return name


@pytest.fixture
async def make(client_name: str) -> AsyncIterator[Make]:
    """Make a client; at the end it is closed and must hold nothing."""
    made: list[UpstreamClient] = []

    def make_one(**options: Any) -> UpstreamClient:
        made.append(CLIENTS[client_name](**options))
        return made[-1]

    yield make_one
    for client in made:
        async with asyncio.timeout(PATIENCE_S):
            await client.aclose()
        await until(lambda client=client: client.active_connections == 0, "no connection is active")  # type: ignore[misc]
        assert (client.connecting, client.idle_connections) == (0, 0)


@pytest.fixture
async def client(make: Make) -> UpstreamClient:
    """A client with default options."""
    return make()


@pytest.fixture
async def server() -> AsyncIterator[PeerServer]:
    """A server on IPv4."""
    async with peer_server() as running:
        yield running


@pytest.fixture
async def tasks() -> AsyncIterator[OwnedTasks]:
    """Tasks beside the test."""
    owned = OwnedTasks("test")
    yield owned
    await owned.aclose()


def get(path: str = "/", headers: Headers | None = None) -> UpstreamRequest:
    return UpstreamRequest("GET", path, headers or [], [])


def post(*body: bytes | memoryview, headers: Headers | None = None) -> UpstreamRequest:
    return UpstreamRequest("POST", "/generate", headers or [], body)


async def rest(call: UpstreamCall) -> bytes:
    """Read to the end."""
    parts = []
    async with asyncio.timeout(PATIENCE_S):
        while data := await call.read():
            parts.append(data)
    return b"".join(parts)


async def head_of(call: UpstreamCall) -> int:
    async with asyncio.timeout(PATIENCE_S):
        return (await call.head()).status


async def one_answer(client: UpstreamClient, server: PeerServer, peer: Peer | None = None) -> Peer:
    """Carry one short exchange through, on a known connection or on a new one."""
    call = client.send(server.origin, get())
    peer = peer or await server.accept()
    await peer.request()
    await peer.send(OK)
    assert await head_of(call) == 200
    assert await rest(call) == b"ok"
    call.close()
    return peer


async def begun(client: UpstreamClient, server: PeerServer, sent: bytes = b"") -> tuple[UpstreamCall, Peer]:
    """Send a request, and have the peer read it and write ``sent``."""
    call = client.send(server.origin, post(b"{}"))
    peer = await server.accept()
    await peer.request()
    await peer.send(sent)
    return call, peer


# Requests on the wire.


@pytest.mark.parametrize(
    "target", ["/", "/a%2Fb%20c/ü%C3%BC".replace("ü", ""), "/p?x=%7B{}|^`\"'&y=[1]&&z#f", "//a/../b?"]
)
async def test_the_request_goes_out_as_it_is(client: UpstreamClient, target: str) -> None:
    headers = [(b"x-b", b"2"), (b"accept", b"*/*"), (b"x-a", b"1"), (b"x-b", b"\xfc; q=0"), (b"x-empty", b"")]
    async with peer_server(prefix="/pre/fix") as server:
        call = client.send(server.origin, UpstreamRequest("POST", target, headers, [b"ab", memoryview(b"cd"), b""]))
        peer = await server.accept()
        seen = await peer.request()
        await peer.send(OK)
        assert await head_of(call) == 200
    assert seen.head == (
        f"POST /pre/fix{target} HTTP/1.1\r\nhost: 127.0.0.1:{server.origin.port}\r\n"
        "x-b: 2\r\naccept: */*\r\nx-a: 1\r\nx-b: \xfc; q=0\r\nx-empty: \r\ncontent-length: 4\r\n\r\n"
    ).encode("latin-1")
    assert seen.body == b"abcd"


@pytest.mark.parametrize(
    ("method", "body", "framing"), [("GET", b"", b""), ("GET", b"x", b"1"), ("POST", b"", b"0"), ("DELETE", b"", b"0")]
)
async def test_only_a_get_without_body_has_no_length(
    client: UpstreamClient, server: PeerServer, method: str, body: bytes, framing: bytes
) -> None:
    client.send(server.origin, UpstreamRequest(method, "/", [], [body] if body else []))
    seen = await (await server.accept()).request()
    assert dict(seen.headers).get(b"content-length", b"") == framing
    assert [name for name, _ in seen.headers if name != b"content-length"] == [b"host"]


@pytest.mark.parametrize(
    "request_",
    [
        get(headers=[(b"x-key", b"a\r\nx-evil: 1")]),
        get(headers=[(b"x-key", b"a\nb")]),
        get(headers=[(b"x-key", b"a\rb")]),
        get(headers=[(b"x-key", b"a\0b")]),
        get(headers=[(b"x-key\r\nx-evil", b"1")]),
        get("/a HTTP/1.1\r\nx-evil: 1\r\n\r\n"),
        get("/a b"),
        get("/ü"),
    ],
    ids=["crlf", "lf", "cr", "nul", "name", "target", "space", "not ascii"],
)
async def test_nothing_ends_a_line_of_the_head_early(
    client: UpstreamClient, server: PeerServer, request_: UpstreamRequest
) -> None:
    call = client.send(server.origin, request_)
    with pytest.raises(RequestUnsendable):
        await head_of(call)
    assert call.is_over
    assert call.written_at is None
    call.close()
    await one_answer(client, server)
    assert server.accepted == 1


async def test_ipv6(client: UpstreamClient) -> None:
    try:
        context = peer_server("::1")
        server = await context.__aenter__()
    except OSError:
        pytest.skip("no IPv6 here")
    try:
        call = client.send(server.origin, get())
        peer = await server.accept()
        assert (b"host", f"[::1]:{server.origin.port}".encode()) in (await peer.request()).headers
        await peer.send(OK)
        assert await head_of(call) == 200
        assert await rest(call) == b"ok"
        assert client.idle_connections == 1
    finally:
        await context.__aexit__(None, None, None)


async def test_a_host_name(client: UpstreamClient) -> None:
    async with peer_server(name="localhost") as server:
        await one_answer(client, server)


async def test_proxy_variables_are_ignored(monkeypatch: pytest.MonkeyPatch, make: Make, server: PeerServer) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    await one_answer(make(), server)


@on_both_loops
async def test_a_large_body_arrives_whole(client: UpstreamClient, server: PeerServer) -> None:
    pieces = [bytes([n]) * MIB for n in range(20)]
    call = client.send(server.origin, post(*pieces))
    peer = await server.accept()
    seen = await peer.request()
    await peer.send(OK)
    assert await head_of(call) == 200
    assert hashlib.sha256(seen.body).digest() == hashlib.sha256(b"".join(pieces)).digest()
    assert await rest(call) == b"ok"
    await one_answer(client, server, peer)


async def test_a_refusal_before_the_whole_body_is_read(client: UpstreamClient, server: PeerServer) -> None:
    call = client.send(server.origin, post(bytes(20 * MIB)))
    peer = await server.accept()
    await peer.head()
    await peer.send(b"HTTP/1.1 413 No\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno")
    peer.writer.write_eof()
    async with asyncio.timeout(PATIENCE_S):
        while await peer.reader.read(MIB):
            pass
    peer.close()
    assert await head_of(call) == 413
    assert await rest(call) == b"no"


# Answers.

FRAMINGS = [
    pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", 200, 5, b"hello", True, id="length"),
    pytest.param(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 200, 0, b"", True, id="empty"),
    pytest.param(CHUNKED + b"5\r\nhello\r\n2;x=y\r\n w\r\n0\r\n\r\n", 200, None, b"hello w", True, id="chunked"),
    pytest.param(CHUNKED + b"1\r\na\r\n0\r\nX-T: 1\r\nX-T: 2\r\n\r\n", 200, None, b"a", True, id="trailers"),
    pytest.param(b"HTTP/1.1 200 OK\r\nx: y\r\n\r\nto the end", 200, None, b"to the end", False, id="until closed"),
    pytest.param(b"HTTP/1.0 200 OK\r\ncontent-length: 3\r\n\r\nold", 200, 3, b"old", False, id="1.0"),
    pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n", 204, None, b"", True, id="204"),
    pytest.param(b"HTTP/1.1 304 Not Modified\r\n\r\n", 304, None, b"", True, id="304"),
    pytest.param(b"HTTP/1.1 307 Go\r\nlocation: /x\r\ncontent-length: 1\r\n\r\nr", 307, 1, b"r", True, id="redirect"),
    pytest.param(b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy", 503, 4, b"busy", True, id="503"),
    pytest.param(b"HTTP/1.1 200\r\ncontent-length: 1\r\n\r\nx", 200, 1, b"x", True, id="no reason"),
    pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n" + OK, 200, 2, b"ok", True, id="100"),
    pytest.param(
        b"HTTP/1.1 103 Hints\r\nlink: x\r\n\r\nHTTP/1.1 102 P\r\n\r\n" + OK, 200, 2, b"ok", True, id="103 and 102"
    ),
    pytest.param(
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nby", 200, 2, b"by", False, id="close"
    ),
    pytest.param(
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc", 200, 3, b"abc", True, id="gzip"
    ),
]  # fmt: skip


@pytest.mark.parametrize(("wire", "status", "length", "body", "is_reusable"), FRAMINGS)
async def test_answers(
    client: UpstreamClient,
    server: PeerServer,
    wire: bytes,
    status: int,
    length: int | None,
    body: bytes,
    is_reusable: bool,
) -> None:
    call, peer = await begun(client, server, wire)
    if not is_reusable:
        peer.close()
    async with asyncio.timeout(PATIENCE_S):
        head = await call.head()
    assert (head.status, head.content_length) == (status, length)
    assert b"x-t" not in dict(head.headers)
    assert await rest(call) == body
    assert call.is_complete
    assert call.is_over
    assert await rest(call) == b""
    call.close()
    assert client.idle_connections == is_reusable
    if is_reusable:
        await one_answer(client, server, peer)
    else:
        await one_answer(client, server)


@on_both_loops
@pytest.mark.parametrize(
    "wire",
    [
        b"HTTP/1.1 103 Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        CHUNKED + b"2;x=y\r\nhe\r\n3\r\nllo\r\n0\r\nx-t: 1\r\n\r\n",
    ],
    ids=["length", "chunked"],
)
async def test_answers_byte_by_byte(client: UpstreamClient, server: PeerServer, wire: bytes) -> None:
    call, peer = await begun(client, server)
    await peer.dribble(wire)
    assert await head_of(call) == 200
    assert await rest(call) == b"hello"
    await one_answer(client, server, peer)


async def test_the_head_as_it_came(client: UpstreamClient, server: PeerServer) -> None:
    call, _ = await begun(
        client,
        server,
        b"HTTP/1.1 200 OK\r\nX-B: 1\r\nSet-Cookie: a=b\r\nContent-Type: Application/JSON ; charset=x\r\n"
        b"x-b:  2 \r\nSet-Cookie: c=d\r\nX-Latin: \xfc\r\nContent-Length: 0\r\n\r\n",
    )
    async with asyncio.timeout(PATIENCE_S):
        head = await call.head()
    assert [(name, value.strip()) for name, value in head.headers] == [
        (b"x-b", b"1"),
        (b"set-cookie", b"a=b"),
        (b"content-type", b"Application/JSON ; charset=x"),
        (b"x-b", b"2"),
        (b"set-cookie", b"c=d"),
        (b"x-latin", b"\xfc"),
        (b"content-length", b"0"),
    ]
    assert head.content_type == "application/json"
    assert await rest(call) == b""
    call = client.send(server.origin, get())
    assert b"cookie" not in dict((await server.peers[0].request()).headers)
    call.close()


async def test_parts_come_as_they_come(client: UpstreamClient, server: PeerServer) -> None:
    call, peer = await begun(client, server, CHUNKED)
    await head_of(call)
    for payload in (b"data: 1\n\n", b"data: 2\n\n"):
        await peer.send(b"9\r\n" + payload + b"\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert await call.read() == payload
        assert not call.is_complete
        assert not call.is_over
    await peer.send(b"0\r\n\r\n")
    assert await rest(call) == b""
    assert call.is_complete


async def test_an_answer_can_be_read_after_it_is_over(client: UpstreamClient, server: PeerServer) -> None:
    call, peer = await begun(client, server, OK)
    await until(lambda: call.is_over, "the answer is here")
    assert not call.is_complete
    await until(lambda: client.idle_connections == 1, "the connection is back")
    await one_answer(client, server, peer)
    assert await head_of(call) == 200
    assert await rest(call) == b"ok"
    assert call.is_complete


# Failures.


async def test_a_refused_connection(client: UpstreamClient) -> None:
    async with peer_server() as server:
        origin = server.origin
    call = client.send(origin, get())
    with pytest.raises(ConnectFailed) as caught:
        await head_of(call)
    assert not isinstance(caught.value, ConnectTimeout)
    assert call.written_at is None
    assert call.is_over
    await until(lambda: client.active_connections == 0, "nothing is active")


@pytest.mark.parametrize("host", ["a..b", "a" * 64 + ".example", "nothing.invalid", "no such host"])
async def test_a_host_that_does_not_exist(client: UpstreamClient, host: str) -> None:
    with pytest.raises(ConnectFailed):
        await head_of(client.send(Origin("http", host, 80), get()))


@on_both_loops
async def test_no_connection_in_time(make: Make, server: PeerServer) -> None:
    client = make(connect_timeout_s=0.1)
    call = client.send(Origin("https", "127.0.0.1", server.origin.port), get())  # the peer never shakes hands
    peer = await server.accept()
    with pytest.raises(ConnectTimeout):
        await head_of(call)
    assert call.written_at is None
    await peer.hang()
    await until(lambda: client.active_connections == 0, "nothing is active")


async def test_the_connect_timeout_ends_with_the_connect(make: Make, server: PeerServer) -> None:
    client = make(connect_timeout_s=0.1)
    call, peer = await begun(client, server)
    await asyncio.sleep(0.2)  # the time itself is what is waited for
    await peer.send(OK)
    assert await head_of(call) == 200


BREAKS = [
    pytest.param(b"", ConnectionDropped, b"", id="nothing"),
    pytest.param(b"HTTP/1.1 20", AnswerBroken, b"", id="in the status line"),
    pytest.param(b"HTTP/1.1 200 OK\r\ncontent-le", AnswerBroken, b"", id="in the head"),
    pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n", AnswerBroken, b"", id="after 1xx"),
    pytest.param(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n", AnswerBroken, b"", id="after the head"),
    pytest.param(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", AnswerBroken, b"abc", id="in the body"),
    pytest.param(CHUNKED + b"3\r\nabc\r\n", AnswerBroken, b"abc", id="between chunks"),
    pytest.param(CHUNKED + b"9\r\nabc", AnswerBroken, b"abc", id="in a chunk"),
    pytest.param(CHUNKED + b"3\r\nabc\r\n0\r\n", AnswerBroken, b"abc", id="before the last line"),
]


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize(("sent", "kind", "body"), BREAKS)
async def test_an_answer_that_breaks_off(
    client: UpstreamClient, server: PeerServer, sent: bytes, kind: type[UpstreamError], body: bytes, is_reset: bool
) -> None:
    call, peer = await begun(client, server, sent)
    seen = b""
    if body:  # what was seen before a reset counts, what was not may be lost
        assert await head_of(call) == 200
        async with asyncio.timeout(PATIENCE_S):
            while len(seen) < len(body):
                seen += await call.read()
    elif b"200 OK\r\ncontent-length" in sent:
        assert await head_of(call) == 200
    elif is_reset and sent:
        await asyncio.sleep(0.05 * TIME_SCALE)  # a reset discards what was not read yet, and nothing tells what was
    if is_reset:
        peer.reset()
    else:
        peer.close()
    with pytest.raises(kind) as caught:  # noqa: PT012 -- whichever of the two waits it reaches
        await head_of(call)
        await rest(call)
    assert type(caught.value) is kind
    assert seen == body
    assert call.is_over
    assert not call.is_complete
    await until(lambda: client.active_connections == 0, "nothing is active")
    assert (client.idle_connections, server.accepted) == (0, 1)


async def test_a_reset_is_no_end_of_a_body(client: UpstreamClient, server: PeerServer) -> None:
    call, peer = await begun(client, server, b"HTTP/1.1 200 OK\r\n\r\nabc")
    await head_of(call)
    async with asyncio.timeout(PATIENCE_S):
        assert await call.read() == b"abc"
    peer.reset()
    with pytest.raises(AnswerBroken):
        await rest(call)


@pytest.mark.parametrize(
    ("wire", "body"),
    [
        pytest.param(b"SSH-2.0-OpenSSH_9\r\n", b"", id="not HTTP"),
        pytest.param(b"\x15\x03\x01\x00\x02\x02\x28", b"", id="TLS alert"),
        pytest.param(b"HTTP/1.1 abc OK\r\n\r\n", b"", id="status"),
        pytest.param(b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n", b"", id="header"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", b"", id="length"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab", b"", id="two lengths"),
        pytest.param(CHUNKED[:-2] + b"content-length: 3\r\n\r\n3\r\nabc\r\n0\r\n\r\n", b"", id="two framings"),
        pytest.param(b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n", b"", id="101"),
        pytest.param(CHUNKED + b"3\r\nabc\r\nzz\r\n", b"abc", id="chunk size"),
        pytest.param(b"HTTP/1.1 200 OK\r\n" + b"x-pad: " + b"p" * MIB, b"", id="endless head"),
    ],
)
async def test_what_is_not_a_valid_answer(
    client: UpstreamClient, server: PeerServer, tasks: OwnedTasks, wire: bytes, body: bytes
) -> None:
    call, peer = await begun(client, server)
    tasks.spawn(quietly(peer.send(wire)), "send")
    seen = b""
    with pytest.raises(AnswerMalformed):  # noqa: PT012 -- the valid part before it is checked
        await head_of(call)
        while True:
            async with asyncio.timeout(PATIENCE_S):
                seen += await call.read()
    assert seen == body
    await peer.hang()
    await until(lambda: client.active_connections == 0, "nothing is active")
    assert client.idle_connections == 0


async def quietly(work: Any) -> None:
    """The other side may leave at any time."""
    try:
        await work
    except OSError:
        pass


# Leaving.

PHASES = {
    "before anything": None,
    "waiting for the head": b"",
    "inside the head": b"HTTP/1.1 200 OK\r\nx",
    "after the head": CHUNKED,
    "inside the body": CHUNKED + b"3\r\nabc\r\n",
}


@on_both_loops
@pytest.mark.parametrize("phase", PHASES)
async def test_close_ends_the_connection_at_once(
    client: UpstreamClient, server: PeerServer, tasks: OwnedTasks, phase: str
) -> None:
    loop = asyncio.get_running_loop()
    sent = PHASES[phase]
    call = client.send(server.origin, post(b"{}"))
    peer = None
    if sent is not None:
        peer = await server.accept()
        await peer.request()
        await peer.send(sent)
        if sent.startswith(CHUNKED):
            await head_of(call)
    ended: asyncio.Future[BaseException | None] = loop.create_future()

    async def wait() -> None:
        try:
            await call.head()
            while await call.read():
                pass
        except BackendError as exc:
            ended.set_result(exc)
        else:
            ended.set_result(None)

    tasks.spawn(wait(), "reader")
    if sent is not None:
        await asyncio.sleep(0)
    closed_at = loop.time()
    call.close()
    call.close()
    assert call.is_over
    assert not call.is_complete
    async with asyncio.timeout(PATIENCE_S):
        assert isinstance(await ended, CallClosed)
    if peer is not None:
        assert await peer.is_left()
    await until(lambda: client.active_connections == 0, "nothing is active")
    assert loop.time() - closed_at < PROMPT_S
    assert client.connecting == 0
    call.close()
    call.interrupt()
    with pytest.raises(BackendError):
        await call.read()
    peer = await one_answer(client, server, None if sent is not None or client.idle_connections == 0 else peer)


@on_both_loops
@pytest.mark.parametrize("turns", range(12))
async def test_close_at_any_turn_of_the_loop_leaves_nothing(
    make: Make,
    server: PeerServer,
    turns: int,
) -> None:
    client = make()
    call = client.send(server.origin, post(b"{}"))
    for _ in range(turns):
        await asyncio.sleep(0)
    call.close()
    with pytest.raises(CallClosed):
        await head_of(call)
    await until(lambda: client.active_connections == 0, "nothing is active")
    for peer in server.peers[client.idle_connections :]:
        await peer.hang()


@on_both_loops
@pytest.mark.parametrize("turns", range(12))
async def test_close_at_any_turn_of_an_answer_leaves_nothing(
    client: UpstreamClient, server: PeerServer, turns: int
) -> None:
    call, peer = await begun(client, server)
    peer.writer.write(OK)
    for _ in range(turns):
        await asyncio.sleep(0)
    call.close()
    await until(lambda: client.active_connections == 0, "nothing is active")
    if client.idle_connections:
        await one_answer(client, server, peer)
    else:
        await peer.hang()


@on_both_loops
async def test_close_while_shaking_hands(client: UpstreamClient, server: PeerServer) -> None:
    call = client.send(Origin("https", "127.0.0.1", server.origin.port), get())
    peer = await server.accept()
    async with asyncio.timeout(PATIENCE_S):
        await peer.reader.readexactly(5)  # the client has begun to
    assert (client.connecting, client.active_connections, call.written_at) == (1, 1, None)
    call.close()
    await peer.hang()
    with pytest.raises(CallClosed):
        await head_of(call)
    await until(lambda: client.active_connections == 0, "nothing is active")


@on_both_loops
async def test_close_inside_an_upload_that_is_not_read(client: UpstreamClient, server: PeerServer) -> None:
    call = client.send(server.origin, post(*[bytes(MIB)] * 20))
    peer = await server.accept()
    await peer.head()
    await until(lambda: call.written_at is not None, "the request is on its way")
    call.close()
    await until(lambda: client.active_connections == 0, "nothing is active", PROMPT_S)
    await peer.hang()


async def test_a_complete_answer_may_be_closed_unread(client: UpstreamClient, server: PeerServer) -> None:
    call, peer = await begun(client, server, OK)
    await until(lambda: client.idle_connections == 1, "the connection is back")
    call.close()
    with pytest.raises(CallClosed):
        await call.read()
    await one_answer(client, server, peer)
    assert not call.is_complete


@on_both_loops
async def test_a_cancelled_reader_leaves_the_call_alive(
    client: UpstreamClient, server: PeerServer, tasks: OwnedTasks
) -> None:
    call, peer = await begun(client, server)

    async def wait() -> None:
        await call.head()

    reader = tasks.spawn(wait(), "reader")
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.wait({reader})
    await peer.send(OK)
    assert await head_of(call) == 200
    assert await rest(call) == b"ok"


# Interruptions.


@on_both_loops
@pytest.mark.parametrize(
    "sent", [None, b"", CHUNKED, CHUNKED + b"3\r\nabc\r\n"], ids=["connect", "head", "read", "data"]
)
async def test_an_interruption_ends_one_wait(client: UpstreamClient, server: PeerServer, sent: bytes | None) -> None:
    loop = asyncio.get_running_loop()
    call = client.send(server.origin, post(b"{}"))
    if sent is None:
        loop.call_soon(call.interrupt)
        with pytest.raises(CallInterrupted):
            await head_of(call)
    peer = await server.accept()
    await peer.request()
    if sent is not None:
        await peer.send(sent)
        if sent.startswith(CHUNKED):
            await head_of(call)
        if sent.endswith(b"abc\r\n"):
            async with asyncio.timeout(PATIENCE_S):
                assert await call.read() == b"abc"
        loop.call_soon(call.interrupt)
        with pytest.raises(CallInterrupted):
            async with asyncio.timeout(PATIENCE_S):
                await (call.read() if sent.startswith(CHUNKED) else call.head())
    assert not call.is_over
    await peer.send((b"" if sent and sent.startswith(CHUNKED) else CHUNKED) + b"3\r\nend\r\n0\r\n\r\n")
    assert await head_of(call) == 200
    assert await rest(call) == b"end"
    await one_answer(client, server, peer)


async def test_an_interruption_waits_for_the_next_wait(client: UpstreamClient, server: PeerServer) -> None:
    call, peer = await begun(client, server)
    call.interrupt()
    call.interrupt()
    with pytest.raises(CallInterrupted):
        await head_of(call)
    await peer.send(OK)
    assert await head_of(call) == 200
    call.interrupt()
    with pytest.raises(CallInterrupted):
        await rest(call)
    assert await rest(call) == b"ok"


async def test_another_task_reads_on_after_an_interruption(
    client: UpstreamClient, server: PeerServer, tasks: OwnedTasks
) -> None:
    call, peer = await begun(client, server)
    told: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def first() -> None:
        try:
            await call.head()
        except CallInterrupted:
            told.set_result(None)

    tasks.spawn(first(), "first reader")
    await asyncio.sleep(0)
    call.interrupt()
    await peer.send(OK)
    assert await head_of(call) == 200
    assert await rest(call) == b"ok"
    async with asyncio.timeout(PATIENCE_S):
        await told


# Keeping connections.


@on_both_loops
async def test_a_connection_is_used_again(client: UpstreamClient, server: PeerServer) -> None:
    peer = None
    for _ in range(5):
        peer = await one_answer(client, server, peer)
        assert (client.active_connections, client.idle_connections) == (0, 1)
    assert server.accepted == 1


async def test_origins_do_not_share_connections(client: UpstreamClient) -> None:
    async with peer_server() as one, peer_server() as other:
        first = await one_answer(client, one)
        second = await one_answer(client, other)
        await one_answer(client, one, first)
        await one_answer(client, other, second)


@on_both_loops
async def test_idle_connections_are_closed_in_time(make: Make, server: PeerServer) -> None:
    client = make(idle_limit_s=0.1)
    peer = await one_answer(client, server)
    assert await peer.is_left()
    await until(lambda: client.idle_connections == 0, "nothing is idle")
    await one_answer(client, server)


async def test_a_connection_closed_while_idle_is_replaced(client: UpstreamClient, server: PeerServer) -> None:
    peers = []
    calls = [client.send(server.origin, get()) for _ in range(8)]
    for _ in calls:
        peer = await server.accept()
        await peer.request()
        peers.append(peer)
    assert (client.active_connections, client.idle_connections) == (8, 0)
    for peer in peers:
        await peer.send(OK)
    assert [await rest(call) for call in calls] == [b"ok"] * 8
    assert client.idle_connections == 8
    for peer in peers:
        peer.close()
    calls = [client.send(server.origin, get()) for _ in range(8)]
    for _ in calls:
        peer = await server.accept()
        await peer.request()
        await peer.send(OK)
    assert [await rest(call) for call in calls] == [b"ok"] * 8
    assert server.accepted == 16


@on_both_loops
@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
async def test_a_stale_connection_is_replaced_once(client: UpstreamClient, server: PeerServer, is_reset: bool) -> None:
    stale = await one_answer(client, server)
    call = client.send(server.origin, post(b"{}"))
    await stale.request()
    first_written_at = call.written_at
    assert first_written_at is not None
    if is_reset:
        stale.reset()
    else:
        stale.close()
    peer = await server.accept()
    assert (await peer.request()).body == b"{}"
    await peer.send(OK)
    assert await head_of(call) == 200
    assert await rest(call) == b"ok"
    assert call.written_at is not None
    assert call.written_at >= first_written_at
    assert server.accepted == 2


async def test_a_replacement_is_not_replaced(client: UpstreamClient, server: PeerServer, tasks: OwnedTasks) -> None:
    # Two idle connections, so that the second attempt could meet another stale one.
    calls = [client.send(server.origin, get()) for _ in range(2)]
    peers = [await server.accept() for _ in calls]
    for peer in peers:
        await peer.request()
        await peer.send(OK)
    assert [await rest(call) for call in calls] == [b"ok"] * 2

    async def leave_at_a_request(peer: Peer) -> None:
        try:
            await peer.request()
        except asyncio.IncompleteReadError:
            return  # the client has put it away
        peer.close()

    for peer in peers:
        tasks.spawn(leave_at_a_request(peer), "leave")
    call = client.send(server.origin, post(b"{}"))
    fresh = await server.accept()
    await fresh.request()
    fresh.close()
    with pytest.raises(ConnectionDropped):
        await head_of(call)
    assert server.accepted == 3


@pytest.mark.parametrize("sent", [b"H", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\n"])
async def test_after_a_byte_of_the_answer_nothing_is_resent(
    client: UpstreamClient, server: PeerServer, sent: bytes
) -> None:
    peer = await one_answer(client, server)
    call = client.send(server.origin, post(b"{}"))
    await peer.request()
    await peer.send(sent)
    peer.close()
    with pytest.raises(AnswerBroken):
        await head_of(call)
    assert server.accepted == 1


async def test_a_replacement_that_cannot_connect_is_no_proof(client: UpstreamClient) -> None:
    async with peer_server() as server:
        peer = await one_answer(client, server)
        call = client.send(server.origin, post(b"{}"))
        await peer.request()
    with pytest.raises(ConnectionDropped):
        await head_of(call)
    assert call.written_at is not None


async def test_a_closed_call_is_not_resent(client: UpstreamClient, server: PeerServer) -> None:
    peer = await one_answer(client, server)
    call = client.send(server.origin, post(b"{}"))
    await peer.request()
    peer.close()
    call.close()
    with pytest.raises(CallClosed):
        await head_of(call)
    await until(lambda: client.active_connections == 0, "nothing is active")
    await one_answer(client, server)
    assert server.accepted == 2


@pytest.mark.parametrize("is_joined", [True, False], ids=["with the answer", "later"])
async def test_an_answer_to_nothing_is_never_given_to_the_next(
    client: UpstreamClient, server: PeerServer, is_joined: bool
) -> None:
    stray = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nstray"
    call, peer = await begun(client, server, OK + stray if is_joined else OK)
    assert await rest(call) == b"ok"
    if not is_joined:
        await peer.send(stray)
        await until(lambda: client.idle_connections == 0, "the connection is no longer to be used")
    call = client.send(server.origin, get())
    await until(lambda: call.is_over or server.accepted == 2, "another connection, or an error")
    if server.accepted == 2:
        fresh = await server.accept()
        await fresh.request()
        await fresh.send(OK)
        assert await rest(call) == b"ok"
    else:
        with pytest.raises(UpstreamError):
            await head_of(call)
    await until(lambda: client.active_connections == 0, "nothing is active")


# Backpressure.


@on_both_loops
async def test_an_unread_answer_stalls_the_worker(
    client: UpstreamClient, server: PeerServer, tasks: OwnedTasks
) -> None:
    call, peer = await begun(client, server, b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (20 * MIB))
    await head_of(call)
    sent = hashlib.sha256()
    sent_bytes = 0

    async def write() -> None:
        nonlocal sent_bytes
        peer.writer.transport.set_write_buffer_limits(high=64 * 1024)
        for number in range(320):
            piece = bytes([number % 256]) * 65536
            sent.update(piece)
            peer.writer.write(piece)
            await peer.writer.drain()
            sent_bytes += len(piece)

    writing = tasks.spawn(write(), "write")
    before = -1
    while before != sent_bytes:
        before = sent_bytes
        await asyncio.wait({writing}, timeout=0.3 * TIME_SCALE)
    assert not writing.done()
    assert sent_bytes < 16 * MIB  # what kernel buffers take; the client's share is seen below
    async with asyncio.timeout(PATIENCE_S):
        first = await call.read()
    assert len(first) <= MIB
    received = hashlib.sha256(first)
    async with asyncio.timeout(PATIENCE_S):
        while data := await call.read():
            assert len(data) <= MIB
            received.update(data)
    assert received.digest() == sent.digest()
    await one_answer(client, server, peer)


def socket_at(address: object) -> socket.socket:
    """A copy of this process's socket that has the address."""
    for number in os.listdir("/proc/self/fd"):
        try:
            found = socket.socket(fileno=os.dup(int(number)))
        except OSError:  # no socket
            continue
        if found.getsockname() == address:
            return found
        found.close()
    raise AssertionError(f"no socket at {address}")


@on_both_loops
async def test_the_kernel_asks_whether_the_worker_is_there(client: UpstreamClient, server: PeerServer) -> None:
    call, peer = await begun(client, server)
    with socket_at(peer.writer.get_extra_info("peername")) as sock:
        assert [sock.getsockopt(level, name) for level, name, _ in TO_WORKERS] == [value for _, _, value in TO_WORKERS]
        assert len(TO_WORKERS) == 5
    call.close()


@on_both_loops
async def test_close_while_the_worker_is_stalled(client: UpstreamClient, server: PeerServer, tasks: OwnedTasks) -> None:
    call, peer = await begun(client, server, CHUNKED)
    await head_of(call)

    async def write() -> None:
        for _ in range(640):
            peer.writer.write(b"8000\r\n" + bytes(0x8000) + b"\r\n")
            await quietly(peer.writer.drain())

    writing = tasks.spawn(write(), "write")
    await asyncio.wait({writing}, timeout=0.3 * TIME_SCALE)
    assert not writing.done()
    call.close()
    await until(lambda: client.active_connections == 0, "nothing is active", PROMPT_S)
    await peer.hang()
    with pytest.raises(CallClosed):
        await call.read()


# Accounts.


@on_both_loops
async def test_accounts(client: UpstreamClient, server: PeerServer) -> None:
    loop = asyncio.get_running_loop()
    assert (client.active_connections, client.connecting, client.idle_connections) == (0, 0, 0)
    sent_at = loop.time()
    call = client.send(server.origin, post(b"{}"))
    assert call.written_at is None
    assert client.active_connections == 1
    peer = await server.accept()
    await peer.request()
    assert call.written_at is not None
    assert sent_at <= call.written_at <= loop.time()
    assert (client.active_connections, client.connecting, client.idle_connections) == (1, 0, 0)
    await peer.send(OK)
    assert await rest(call) == b"ok"
    assert (client.active_connections, client.connecting, client.idle_connections) == (0, 0, 1)
    call = client.send(server.origin, get())
    assert client.active_connections == 1
    await peer.request()
    assert (client.active_connections, client.connecting, client.idle_connections) == (1, 0, 0)
    call.close()
    await until(lambda: client.active_connections == 0, "nothing is active")
    assert client.idle_connections == 0


async def test_many_at_once(make: Make, server: PeerServer, tasks: OwnedTasks) -> None:
    client = make(idle_limit_s=PATIENCE_S)

    async def serve() -> None:
        while True:
            tasks.spawn(echo(await server.accept()), "echo")

    async def echo(peer: Peer) -> None:
        while True:
            try:
                seen = await peer.request()
            except asyncio.IncompleteReadError:
                return
            await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(seen.body) + seen.body)

    tasks.spawn(serve(), "serve")
    for _ in range(2):
        bodies = [b"%d" % number * 100 for number in range(12)]
        calls = [client.send(server.origin, post(body)) for body in bodies]
        assert [await rest(call) for call in calls] == bodies
        assert client.active_connections == 0
    assert server.accepted == client.idle_connections == 12


@on_both_loops
async def test_closing_the_client_ends_every_call(make: Make, server: PeerServer) -> None:
    client = make()
    idle = await one_answer(client, server)
    busy = client.send(server.origin, get())
    await idle.request()
    waiting, waiting_peer = await begun(client, server)
    reading, reading_peer = await begun(client, server, CHUNKED)
    await head_of(reading)
    connecting = client.send(Origin("https", "127.0.0.1", server.origin.port), get())
    shaking = await server.accept()
    async with asyncio.timeout(PATIENCE_S):
        await client.aclose()
        for call, kind in (
            (busy, ConnectionDropped),
            (waiting, ConnectionDropped),
            (reading, AnswerBroken),
            (connecting, ConnectFailed),
        ):
            with pytest.raises(kind):
                await call.read()
            assert call.is_over
    for peer in (idle, waiting_peer, reading_peer, shaking):
        await peer.hang()
    with pytest.raises(ConnectFailed):
        await head_of(client.send(server.origin, get()))
    await until(lambda: client.active_connections == 0, "nothing is active")


async def test_fetch(client: UpstreamClient, server: PeerServer, tasks: OwnedTasks) -> None:
    async def serve() -> None:
        peer = await server.accept()
        while True:
            await peer.request()
            await peer.send(OK)

    tasks.spawn(serve(), "serve")
    for _ in range(3):
        async with asyncio.timeout(PATIENCE_S):
            assert await fetch(client, server.origin, get()) == (200, b"ok")
    assert server.accepted == 1


# TLS.


def server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS_DATA / "localhost.crt", TLS_DATA / "localhost.key")
    return context


def trusting() -> ssl.SSLContext:
    return client_context(TLS_DATA / "localhost.crt")


@on_both_loops
async def test_tls(make: Make) -> None:
    client = make(tls=trusting())
    async with peer_server(tls=server_context(), name="localhost") as server:
        peer = await one_answer(client, server)
        assert peer.writer.get_extra_info("ssl_object").version() in ("TLSv1.2", "TLSv1.3")
        await one_answer(client, server, peer)
        call = client.send(server.origin, post(bytes(4 * MIB)))
        assert len((await peer.request()).body) == 4 * MIB
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (4 * MIB))
        tasks = OwnedTasks("send")
        tasks.spawn(peer.send(bytes(4 * MIB)), "body")
        assert len(await rest(call)) == 4 * MIB
        await tasks.aclose()
        call = client.send(server.origin, get())
        await peer.request()
        call.close()
        await peer.hang()
        await until(lambda: client.active_connections == 0, "nothing is active")


async def test_tls_with_insecure_asks_for_no_name(make: Make) -> None:
    async with peer_server(tls=server_context()) as server:
        await one_answer(make(tls=client_context(insecure=True)), server)


@on_both_loops
async def test_tls_refuses_another_name(make: Make) -> None:
    async with peer_server(tls=server_context(), name="127.0.0.1") as server:
        call = make(tls=trusting()).send(server.origin, get())
        with pytest.raises(ConnectFailed, match="certificate"):
            await head_of(call)
        assert call.written_at is None


async def test_tls_refuses_an_unknown_authority(make: Make) -> None:
    async with peer_server(tls=server_context(), name="localhost") as server:
        call = make().send(server.origin, get())
        with pytest.raises(ConnectFailed, match="certificate"):
            await head_of(call)


async def test_tls_towards_plain_http(make: Make, server: PeerServer, tasks: OwnedTasks) -> None:
    call = make(tls=trusting()).send(Origin("https", "localhost", server.origin.port), get())
    peer = await server.accept()
    await peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    peer.close()
    with pytest.raises(ConnectFailed):
        await head_of(call)
    assert call.written_at is None


async def test_tls_peer_that_leaves_inside_the_handshake(make: Make, server: PeerServer) -> None:
    call = make(tls=trusting()).send(Origin("https", "localhost", server.origin.port), get())
    peer = await server.accept()
    peer.reset()
    with pytest.raises(ConnectFailed):
        await head_of(call)


def test_contexts_check_what_they_should(tmp_path: Path) -> None:
    for context in (client_context(), trusting()):
        assert context.check_hostname
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert len(trusting().get_ca_certs()) == 1
    assert client_context(insecure=True).verify_mode is ssl.CERT_NONE
    with pytest.raises(OSError):  # noqa: PT011 -- which one is the system's affair
        client_context(tmp_path / "none.pem")

"""Requests that are held back: nothing is written before their time, and then they are calls like any other."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from backends.errors import CallClosed, CallEnded, CallInterrupted, ConnectFailed
from backends.upstream.base import AnswerHead, Origin, UpstreamCall, UpstreamClient, UpstreamRequest
from backends.upstream.h1 import H1Client
from backends.upstream.h1_call import H1Call
from backends.upstream.held_call import HeldCall
from backends.upstream.httpx_client import HttpxClient
from tests.backends.upstream.test_conformance import rest
from tests.fakes.running import PATIENCE_S, until
from tests.fakes.scripted_peer import PeerServer, peer_server

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n"
REQUEST = UpstreamRequest("POST", "/generate", [], [b"{}"])


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


class Scene:
    """A call that is held, and what is behind it.

    Attributes:
        call: See above.
        sent: Calls that it has sent.
        left: How often it has said that it was closed before.
        server: The worker.
    """

    def __init__(self, client: UpstreamClient, server: PeerServer, origin: Origin | None = None) -> None:
        self.server = server
        self.sent: list[UpstreamCall] = []
        self.left = 0

        def send() -> UpstreamCall:
            self.sent.append(client.send(origin or server.origin, REQUEST))
            return self.sent[-1]

        def on_left() -> None:
            self.left += 1

        self.call = HeldCall(send, on_left)

    async def answered(self, body: bytes = b"abcdef") -> None:
        """Let it go, and have the worker answer."""
        self.call.send_now()
        peer = await self.server.accept()
        await peer.request()
        await peer.send(HEAD + body)

    async def untouched(self) -> None:
        """Nothing has come to the worker, not even a connection: one that is made now is the first."""
        _, writer = await asyncio.open_connection(self.server.origin.host, self.server.origin.port)
        await self.server.accept()
        writer.close()
        await writer.wait_closed()
        assert (self.sent, self.server.accepted) == ([], 1)


@pytest.fixture(params=[H1Client, HttpxClient])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[UpstreamClient]:
    one: UpstreamClient = request.param()
    yield one
    await one.aclose()
    await until(lambda: one.active_connections == 0, "no connection is active")


@pytest.fixture
async def scene(client: UpstreamClient) -> AsyncIterator[Scene]:
    async with peer_server() as server:
        scene = Scene(client, server)
        yield scene
        scene.call.close()


# What waits for it, and what it gets once it has gone and was answered.
WAITS: dict[str, Callable[[HeldCall], Coroutine[Any, Any, object]]] = {
    "head": lambda call: call.head(),
    "read": lambda call: call.read(),
    "pass_on": lambda call: call.pass_on(lambda data: False),
}


async def waiting(call: HeldCall) -> None:
    """Let somebody wait for a call."""
    await until(lambda: call._waiter is not None, "somebody waits")


async def test_nothing_is_sent_before_its_time(scene: Scene) -> None:
    call = scene.call
    assert (call.written_at, call.is_complete, call.is_over, call.whole()) == (None, False, False, None)
    assert not call.call_when_ready(lambda: None)
    call.drop_whole()
    async with asyncio.TaskGroup() as group:
        head = group.create_task(call.head())
        await waiting(call)
        await scene.untouched()
        assert not head.done()
        await scene.answered()
    assert head.result().status == 200
    assert await rest(call) == b"abcdef"
    assert (len(scene.sent), scene.left) == (1, 0)


@pytest.mark.parametrize("name", WAITS)
async def test_who_waits_gets_what_the_call_gives(scene: Scene, name: str) -> None:
    taken: list[bytes] = []

    def take(data: bytes) -> bool:
        taken.append(data)
        return True

    async def run() -> object:
        return await (scene.call.pass_on(take) if name == "pass_on" else WAITS[name](scene.call))

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        found = group.create_task(run())
        await waiting(scene.call)
        await scene.answered()
    body = await rest(scene.call)  # what comes with the end is left to be read
    if name == "head":
        assert isinstance(head := found.result(), AnswerHead)
        assert (head.content_length, body) == (6, b"abcdef")
    elif name == "read":
        assert (found.result(), body) == (b"abcdef", b"")
    else:
        assert b"".join(taken) + body == b"abcdef"
    assert scene.call.is_complete


async def test_what_is_known_of_a_call_is_known_once_it_has_gone(scene: Scene) -> None:
    call = scene.call
    call.send_now()
    call.send_now()
    assert len(scene.sent) == 1
    peer = await scene.server.accept()
    await peer.request()
    assert call.written_at == scene.sent[0].written_at is not None
    assert (call.is_complete, call.is_over) == (False, False)
    ready = asyncio.Event()
    is_told = call.call_when_ready(ready.set)
    assert is_told is isinstance(scene.sent[0], H1Call)
    await peer.send(HEAD + b"abcdef")
    if is_told:
        async with asyncio.timeout(PATIENCE_S):
            await ready.wait()
        found = call.whole()
        assert found is not None
        assert (found[0].status, found[1], call.is_over, call.is_complete) == (200, b"abcdef", True, False)
        call.drop_whole()
    else:
        await call.head()
        await rest(call)
    assert (call.is_complete, call.is_over) == (True, True)


async def test_a_failure_is_the_waiter_s(client: UpstreamClient) -> None:
    async with peer_server() as server:
        origin = server.origin
    scene = Scene(client, server, origin)  # nobody listens there any more
    scene.call.send_now()
    with pytest.raises(ConnectFailed):
        await scene.call.head()
    assert scene.call.is_over
    scene.call.close()
    assert scene.left == 0


# Closing.


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.parametrize("is_waited_for", [False, True])
async def test_what_is_closed_before_is_never_sent(scene: Scene, name: str, is_waited_for: bool) -> None:
    call = scene.call

    async def fails() -> None:
        with pytest.raises(CallClosed):
            await WAITS[name](call)

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        if is_waited_for:
            group.create_task(fails())
            await waiting(call)
        for _ in range(2):
            call.close()
    assert scene.left == 1
    assert (call.written_at, call.is_complete, call.is_over) == (None, False, True)
    call.send_now()
    call.interrupt()
    for _ in range(2):
        await fails()
    await scene.untouched()
    assert (call.whole(), call.call_when_ready(lambda: None)) == (None, False)
    assert scene.left == 1


async def test_one_that_has_left_may_be_told_to_go_by_what_it_left(client: UpstreamClient) -> None:
    sent: list[bool] = []

    def send() -> UpstreamCall:
        sent.append(True)
        raise AssertionError("sent after it was closed")

    call = HeldCall(send, lambda: call.send_now())
    call.close()
    assert (sent, call.is_over) == ([], True)


async def test_what_is_closed_after_it_has_gone_is_closed_as_ever(scene: Scene) -> None:
    scene.call.send_now()
    peer = await scene.server.accept()
    await peer.request()

    async def fails() -> None:
        with pytest.raises(CallClosed):
            await scene.call.head()

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        group.create_task(fails())
        await asyncio.sleep(0)
        scene.call.close()
    assert await peer.is_left()
    assert scene.call.is_over
    assert scene.left == 0


async def test_a_waiter_that_is_cancelled_leaves_the_call_to_others(scene: Scene) -> None:
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        first = group.create_task(scene.call.head())
        await waiting(scene.call)
        first.cancel()
        await asyncio.wait([first])
        second = group.create_task(scene.call.head())
        await until(lambda: scene.call._waiter is not None and not scene.call._waiter.done(), "another one waits")
        await scene.answered()
    assert second.result().status == 200


# Interrupting.


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.parametrize("is_waited_for", [False, True])
async def test_an_interruption_is_told_once_and_then_it_goes_on(scene: Scene, name: str, is_waited_for: bool) -> None:
    call = scene.call

    async def interrupted() -> None:
        with pytest.raises(CallInterrupted):
            await WAITS[name](call)

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        for _ in range(2):
            if is_waited_for:
                told = group.create_task(interrupted())
                await waiting(call)
                call.interrupt()
                await told
            else:
                call.interrupt()
                call.interrupt()
                await interrupted()
        head = group.create_task(call.head())
        await waiting(call)
        await scene.answered()
    assert head.result().status == 200
    assert await rest(call) == b"abcdef"


@pytest.mark.parametrize("is_waited_for", [False, True])
async def test_an_interruption_is_not_lost_where_it_goes_at_the_same_moment(scene: Scene, is_waited_for: bool) -> None:
    call = scene.call

    async def interrupted() -> None:
        with pytest.raises(CallInterrupted):
            await call.head()

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        if is_waited_for:
            group.create_task(interrupted())
            await waiting(call)
        call.interrupt()
        await scene.answered()
        if not is_waited_for:
            await interrupted()
    assert (await call.head()).status == 200
    assert await rest(call) == b"abcdef"


async def test_an_interruption_after_it_has_gone_is_the_call_s(scene: Scene) -> None:
    scene.call.send_now()
    scene.call.interrupt()
    with pytest.raises(CallInterrupted):
        await scene.call.head()
    peer = await scene.server.accept()
    await peer.request()
    await peer.send(HEAD + b"abcdef")
    assert (await scene.call.head()).status == 200


async def test_closing_outlasts_an_interruption(scene: Scene) -> None:
    scene.call.interrupt()
    scene.call.close()
    for _ in range(2):
        with pytest.raises(CallEnded) as caught:
            await scene.call.head()
        assert type(caught.value) is CallClosed

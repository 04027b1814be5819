"""Answers that are handed over as they arrive, by both HTTP clients alike."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from backends.errors import AnswerBroken, AnswerTooLarge, CallClosed, CallEnded, CallInterrupted
from backends.upstream.base import UpstreamCall, UpstreamClient, UpstreamRequest
from backends.upstream.h1 import H1Client
from backends.upstream.httpx_client import HttpxClient
from tests.backends.upstream.test_conformance import rest
from tests.fakes.running import PATIENCE_S, until
from tests.fakes.scripted_peer import Peer, peer_server

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


class Scene:
    """A call whose answer has begun, its worker, and what was handed over."""

    def __init__(self, call: UpstreamCall, peer: Peer) -> None:
        self.call = call
        self.peer = peer
        self.taken: list[bytes] = []

    def take(self, data: bytes) -> bool:
        self.taken.append(data)
        return True

    async def passes(self, *pieces: bytes) -> None:
        """Have the worker send pieces, each when the one before has been handed over."""
        for piece in pieces:
            count = len(self.taken)
            await self.peer.send(piece)
            await until(lambda count=count: len(self.taken) > count, "the piece is handed over")  # type: ignore[misc]


@pytest.fixture(params=[H1Client, HttpxClient])
async def scene(request: pytest.FixtureRequest) -> AsyncIterator[Scene]:
    client: UpstreamClient = request.param()
    async with peer_server() as server:
        call = client.send(server.origin, UpstreamRequest("POST", "/generate", [], [b"{}"]))
        peer = await server.accept()
        await peer.request()
        await peer.send(HEAD)
        await call.head()
        yield Scene(call, peer)
        call.close()
        await client.aclose()


async def test_all_of_an_answer_is_handed_over_or_left_to_be_read(scene: Scene) -> None:
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(scene.call.pass_on(scene.take))
        await scene.passes(b"a", b"b", b"c")
        assert not waiting.done()
        await scene.peer.send(b"def")
    assert b"".join(scene.taken) + await rest(scene.call) == b"abcdef"
    assert scene.call.is_complete


async def test_what_came_before_is_handed_over_first(scene: Scene) -> None:
    await scene.peer.send(b"ab")
    assert await scene.call.read() == b"ab"
    await scene.peer.send(b"c")
    async with asyncio.TaskGroup() as group:
        group.create_task(scene.call.pass_on(scene.take))
        await until(lambda: scene.taken == [b"c"], "it is handed over")
        await scene.peer.send(b"def")


async def test_who_refuses_reads_on(scene: Scene) -> None:
    def take(data: bytes) -> bool:
        scene.take(data)
        return len(scene.taken) < 2

    async with asyncio.TaskGroup() as group:
        group.create_task(scene.call.pass_on(take))
        await scene.passes(b"a", b"b")
    await scene.peer.send(b"cdef")
    assert await rest(scene.call) == b"cdef"
    assert scene.taken == [b"a", b"b"]


async def test_an_error_of_the_taker_is_told_to_who_waits(scene: Scene) -> None:
    def take(data: bytes) -> bool:
        raise AnswerTooLarge(1)

    await scene.peer.send(b"a")
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(AnswerTooLarge):
            await scene.call.pass_on(take)
    await scene.peer.send(b"bcdef")
    assert await rest(scene.call) == b"bcdef"


async def test_an_answer_that_breaks_off_is_for_the_reader_to_find(scene: Scene) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(scene.call.pass_on(scene.take))
        await scene.passes(b"a")
        scene.peer.writer.close()
    with pytest.raises(AnswerBroken):
        await rest(scene.call)


@pytest.mark.parametrize("ended", [CallInterrupted, CallClosed])
async def test_a_call_that_ends_hands_nothing_over_any_more(scene: Scene, ended: type[CallEnded]) -> None:
    async def wait() -> None:
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(ended):
                await pass_on_and_read()

    async def pass_on_and_read() -> None:
        await scene.call.pass_on(scene.take)
        await scene.call.read()

    async with asyncio.TaskGroup() as group:
        group.create_task(wait())
        await scene.passes(b"a")
        (scene.call.interrupt if ended is CallInterrupted else scene.call.close)()
        if ended is CallInterrupted:  # another one reads on, at once
            await scene.peer.send(b"bcdef")
            assert await rest(scene.call) == b"bcdef"
    assert scene.taken == [b"a"]

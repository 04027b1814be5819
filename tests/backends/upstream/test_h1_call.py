"""One call: closing and interrupting it in every phase, handing it to another reader, and backpressure."""

import asyncio

import pytest

from backends.errors import CallClosed, CallInterrupted
from backends.upstream.base import AnswerHead
from backends.upstream.h1 import H1Client
from backends.upstream.h1_call import PAUSE_READING_BYTES, H1Call
from tests.backends.upstream.conftest import Fails, Post, Whole
from tests.backends.upstream.conftest import both_loops as anyio_backend  # noqa: F401
from tests.fakes.raw_server import Connection, answer, answers, raw_server
from tests.fakes.running import PATIENCE_S, until

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n"


class Stage:
    """A server that goes on step by step, as the test says."""

    def __init__(self) -> None:
        self.has_request = asyncio.Event()
        self.may_go_on = asyncio.Event()
        self.begun = b""
        self.rest = HEAD + b"abcdef"

    def begin_with(self, size: int) -> None:
        """Send so many bytes of the answer by itself, the rest when told."""
        self.begun, self.rest = self.rest[:size], self.rest[size:]

    async def __call__(self, connection: Connection) -> None:
        await connection.request()
        await connection.send(self.begun)
        self.has_request.set()
        await self.may_go_on.wait()
        await connection.send(self.rest)
        await connection.hang()


PHASES = [
    pytest.param(0, id="written"),
    pytest.param(20, id="in the head"),
    pytest.param(len(HEAD), id="before the body"),
    pytest.param(len(HEAD) + 3, id="in the body"),
]


async def arrived(client: H1Client, stage: Stage, call: H1Call, size: int) -> None:
    """Wait until the server's first bytes have been taken in."""
    await stage.has_request.wait()
    body = size - len(HEAD)
    if body >= 0:
        await until(lambda: call._head is not None and call._buffered_bytes == body, "bytes arrive")
    elif size:
        (connection,) = client._open
        await until(lambda: connection._head_bytes == size, "bytes arrive")


@pytest.mark.parametrize("size", PHASES)
@pytest.mark.parametrize("is_waiting", [True, False], ids=["waiting", "busy elsewhere"])
async def test_close(size: int, is_waiting: bool, client: H1Client, post: Post, whole: Whole, fails: Fails) -> None:
    stage = Stage()
    stage.begin_with(size)
    async with raw_server(stage, answers(answer())) as server, asyncio.timeout(PATIENCE_S):
        call = post(server.origin)
        async with asyncio.TaskGroup() as group:
            if is_waiting:
                group.create_task(fails(call, CallClosed))
            await arrived(client, stage, call, size if not is_waiting else min(size, len(HEAD)))
            call.close()
            if not is_waiting:
                group.create_task(fails(call, CallClosed))
        call.close()
        assert call.is_over
        assert not call.is_complete
        await until(lambda: client.active_connections == 0, "the connection is closed")
        assert client.idle_connections == 0
        assert await server.connections[0].reader.read() == b""
        await whole(post(server.origin))


async def test_close_while_connecting(client: H1Client, post: Post) -> None:
    async with raw_server(answers(answer())) as server:
        call = post(server.origin)
        assert client.connecting == 1
        call.close()
        with pytest.raises(CallClosed):
            await call.head()
        await until(lambda: client.connecting == client.active_connections == 0, "nothing is left")
        assert server.requests == []
        assert call.written_at is None


async def test_close_after_a_whole_answer_gives_the_connection_back(client: H1Client, post: Post, whole: Whole) -> None:
    async with raw_server(answers(answer(b"x"), answer(b"y"))) as server:
        call = post(server.origin)
        await whole(call)
        call.close()
        assert await call.read() == b""
        assert call.is_complete
        assert client.idle_connections == 1
        assert (await whole(post(server.origin)))[1] == b"y"
        assert len(server.connections) == 1


async def test_close_with_unread_bytes_is_no_end_of_the_answer(client: H1Client, post: Post) -> None:
    async with raw_server(answers(answer(b"abc"))) as server:
        call = post(server.origin)
        await call.head()
        await until(lambda: call.is_over, "the whole answer is here")
        assert not call.is_complete
        call.close()
        with pytest.raises(CallClosed):
            await call.read()
        assert client.idle_connections == 1  # the connection itself was clean


@pytest.mark.parametrize("size", PHASES)
async def test_interrupt_then_read_on(size: int, client: H1Client, post: Post, whole: Whole, fails: Fails) -> None:
    stage = Stage()
    stage.begin_with(size)
    async with raw_server(stage) as server, asyncio.timeout(PATIENCE_S):
        call = post(server.origin)
        async with asyncio.TaskGroup() as group:
            group.create_task(fails(call, CallInterrupted))
            await stage.has_request.wait()
            if size >= len(HEAD):
                await until(lambda: call._head is not None and not call._parts, "it waits for the body")
            call.interrupt()
        stage.may_go_on.set()
        rest = b"abcdef"[max(size - len(HEAD), 0) :]
        head, body = await whole(call)
        assert head == AnswerHead(200, [(b"content-length", b"6")], 6, "")
        assert body == rest
        assert client.idle_connections == 1


async def test_interrupt_while_connecting(client: H1Client, post: Post, whole: Whole) -> None:
    async with raw_server(answers(answer(b"x"))) as server:
        call = post(server.origin)
        call.interrupt()
        call.interrupt()
        with pytest.raises(CallInterrupted):
            await call.head()
        assert (await whole(call))[1] == b"x"


async def test_interrupt_comes_before_data_and_loses_none(client: H1Client, post: Post, whole: Whole) -> None:
    async with raw_server(answers(answer(b"abc"))) as server:
        call = post(server.origin)
        await call.head()
        await until(lambda: call.is_over, "the answer is here")
        call.interrupt()
        with pytest.raises(CallInterrupted):
            await call.read()
        assert await call.read() == b"abc"
        assert await call.read() == b""


async def test_a_successor_reads_on_while_the_interrupted_reader_is_busy(
    client: H1Client, post: Post, whole: Whole
) -> None:
    stage = Stage()
    stage.begin_with(len(HEAD) + 1)

    async def first_reader() -> None:
        await call.head()
        assert await call.read() == b"a"
        await client_reads_again.wait()  # it writes to its slow client
        with pytest.raises(CallInterrupted):
            await call.read()

    client_reads_again = asyncio.Event()
    async with raw_server(stage) as server, asyncio.timeout(PATIENCE_S):
        call = post(server.origin)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(first_reader())
            await stage.has_request.wait()
            await until(lambda: call._head is not None and not call._parts, "the first reader is busy")
            call.interrupt()
            second = group.create_task(whole(call))
            await asyncio.sleep(0)
            client_reads_again.set()
            await first
            stage.may_go_on.set()
            assert (await second)[1] == b"bcdef"


async def test_unread_bytes_are_bounded(client: H1Client, post: Post) -> None:
    size = 20_000_000
    sent = 0

    async def script(connection: Connection) -> None:
        nonlocal sent
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        piece = bytes(100_000)
        while sent < size:
            await connection.send(piece)
            sent += len(piece)
        await connection.hang()

    async with raw_server(script) as server, asyncio.timeout(PATIENCE_S):
        call = post(server.origin)
        await call.head()
        await until(lambda: call._buffered_bytes >= PAUSE_READING_BYTES, "the buffer is full")
        (connection,) = client._open
        assert connection._is_paused
        before = -1
        while before != sent:  # until the kernel's buffers are full too
            before = sent
            await asyncio.sleep(0.05)
        assert call._buffered_bytes <= PAUSE_READING_BYTES + 256 * 1024
        assert sent < size
        received = 0
        while data := await call.read():
            assert len(data) <= PAUSE_READING_BYTES + 256 * 1024
            received += len(data)
        assert received == size
        assert client.idle_connections == 1


async def test_a_paused_call_can_be_closed(client: H1Client, post: Post) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.send(answer(bytes(5_000_000)))

    async with raw_server(script) as server:
        call = post(server.origin)
        await call.head()
        await until(lambda: call._buffered_bytes >= PAUSE_READING_BYTES, "the buffer is full")
        call.close()
        await until(lambda: client.active_connections == 0, "the connection is closed")


async def test_a_reused_connection_is_not_paused(client: H1Client, post: Post, whole: Whole) -> None:
    large = bytes(2 * PAUSE_READING_BYTES)
    async with raw_server(answers(*[answer(large)] * 3)) as server:
        for _ in range(3):
            call = post(server.origin)
            await until(lambda call=call: call._buffered_bytes >= PAUSE_READING_BYTES, "the buffer is full")  # type: ignore[misc]
            assert (await whole(call))[1] == large
        assert len(server.connections) == 1


async def test_calls_do_not_wait_for_each_other(client: H1Client, post: Post, whole: Whole) -> None:
    stage = Stage()
    async with raw_server(stage, answers(answer(b"quick"))) as server:
        slow = post(server.origin)
        await stage.has_request.wait()
        assert (await whole(post(server.origin)))[1] == b"quick"
        assert client.active_connections == 1
        stage.may_go_on.set()
        assert (await whole(slow))[1] == b"abcdef"
        assert client.idle_connections == 2


# One who waits in no task.


class Told:
    """Counts calls, and notes what there was to see at the last."""

    def __init__(self, client: H1Client, call: H1Call) -> None:
        self.count = 0
        self.found: tuple[AnswerHead, bytes] | None = None
        self.idle_connections = 0
        self._client = client
        self._call = call
        assert call.call_when_ready(self)

    def __call__(self) -> None:
        self.count += 1
        self.found = self._call.whole()
        self.idle_connections = self._client.idle_connections


@pytest.mark.parametrize("body", [b"abc", b"", b"x" * 1000], ids=len)
@pytest.mark.parametrize("is_dropped", [True, False], ids=["taken", "read"])
async def test_an_answer_in_one_piece_is_told_when_its_connection_is_free(
    body: bytes, is_dropped: bool, client: H1Client, post: Post, whole: Whole
) -> None:
    async with raw_server(answers(*[answer(body)] * 3)) as server:
        for _ in range(3):
            call = post(server.origin)
            told = Told(client, call)
            await until(lambda: told.count > 0, "it is told")  # noqa: B023 -- called in this round
            assert told.found is not None
            assert (told.found[0].status, told.found[1], told.idle_connections) == (200, body, 1)
            assert call.whole() == told.found
            if is_dropped:
                call.drop_whole()
                assert call.is_complete
                assert await call.read() == b""
            else:
                assert await whole(call) == told.found
            call.close()
            assert told.count == 1
        assert len(server.connections) == 1


async def test_the_next_request_may_be_sent_as_an_answer_is_told(client: H1Client, post: Post, whole: Whole) -> None:
    async with raw_server(answers(answer(b"x"), answer(b"y"))) as server:
        first = post(server.origin)
        sent: list[H1Call] = []
        assert first.call_when_ready(lambda: sent.append(post(server.origin)))
        await until(lambda: bool(sent), "it is told")
        assert (await whole(sent[0]))[1] == b"y"
        assert len(server.connections) == 1


@pytest.mark.parametrize("size", [20, len(HEAD), len(HEAD) + 3], ids=["in the head", "the head", "in the body"])
async def test_a_part_of_an_answer_is_told_once(size: int, client: H1Client, post: Post, whole: Whole) -> None:
    stage = Stage()
    stage.begin_with(size)
    async with raw_server(stage) as server:
        call = post(server.origin)
        told = Told(client, call)
        await until(lambda: told.count == 1, "it is told")
        assert told.found is None
        stage.may_go_on.set()
        assert (await whole(call))[1] == b"abcdef"
        assert told.count == 1


@pytest.mark.parametrize("how", ["close", "interrupt", "reset"])
async def test_the_end_of_a_call_is_told_once(how: str, client: H1Client, post: Post) -> None:
    async def server_ends(connection: Connection) -> None:
        await connection.request()
        if how == "reset":
            connection.reset()
        else:
            getattr(call, how)()
            await connection.hang()

    async with raw_server(server_ends) as server:
        call = post(server.origin)
        told = Told(client, call)
        await until(lambda: told.count == 1, "it is told")
        assert told.found is None
        assert not call.call_when_ready(told)
        call.close()
        assert told.count == 1


async def test_junk_behind_an_answer_does_not_hold_it_back(client: H1Client, post: Post) -> None:
    stage = Stage()
    stage.rest += b"\0\0junk"
    stage.may_go_on.set()
    async with raw_server(stage) as server:
        told = Told(client, post(server.origin))
        await until(lambda: told.count == 1, "it is told")
        assert told.found is not None
        assert told.found[1] == b"abcdef"
        await until(lambda: client.idle_connections == client.active_connections == 0, "the connection is closed")


async def test_an_answer_that_ends_with_its_connection_is_told(client: H1Client, post: Post, whole: Whole) -> None:
    async def ends(connection: Connection) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 200 OK\r\n\r\nabc")
        connection.close()

    async with raw_server(ends) as server:
        call = post(server.origin)
        Told(client, call)
        assert (await whole(call))[1] == b"abc"

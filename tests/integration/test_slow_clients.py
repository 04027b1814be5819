"""``--client-timeout-s``: clients that send requests too slowly, in parts, or never; and those that do not."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable

import pytest

from tests.fakes.running import PATIENCE_S, TIME_SCALE, RunningGateway, running_gateway
from tests.fakes.script_engine import Reply, ScriptEngine, SeenRequest
from tests.fakes.wire import Wire, call, request_bytes, wire

LIMIT_S = 0.3 * TIME_SCALE
HEAD_END = b"\r\n\r\n"
WHOLE = request_bytes("/generate", {"text": "a" * 4000})
HEAD = WHOLE[: WHOLE.index(HEAD_END) + len(HEAD_END)]
CHUNKED = b"POST /generate HTTP/1.1\r\nHost: gateway\r\nTransfer-Encoding: chunked\r\n\r\n"
EXPECTS = request_bytes("/generate", b"{" + b" " * 99, headers={"Expect": "100-continue"})
CONTROL = request_bytes("/abort_request", {"rid": "x" * 100})
TIMED_OUT = 'forebay_requests_total{model="unknown",outcome="timeout",route="/generate",status="408"} '


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, object]]:
    """The loop of the real process, which runs its timers first."""
    return ("asyncio", {"use_uvloop": True})


@pytest.fixture(scope="module")
async def short_gateway(shared_engine: ScriptEngine) -> AsyncIterator[RunningGateway]:
    """A gateway with little patience, in front of the scripted engine."""
    async with running_gateway(shared_engine.url, client_timeout_s=LIMIT_S) as running:
        yield running


@pytest.fixture
async def short(short_gateway: RunningGateway, scripted: ScriptEngine) -> AsyncIterator[RunningGateway]:
    """The same, with no records; at the end nothing may be left of any request or connection."""
    short_gateway.records.clear()
    yield short_gateway
    await short_gateway.settle()


async def assert_refused(connection: Wire, part: str) -> str:
    """The client is told which part of its request was missing; then the connection ends. The request's id."""
    answer = await connection.answer()
    assert (answer.status, answer.headers["connection"]) == (408, "close")
    error = answer.json()["error"]
    assert part in error.pop("message")
    public_id = answer.headers["x-request-id"]
    assert error == {"type": "timeout", "code": 408, "param": None, "request_id": public_id}
    assert await connection.is_closed()
    return public_id


async def timed_out(gateway: RunningGateway) -> float:
    """How many requests are counted as come too slowly."""
    lines = (await call(gateway.address, "/metrics", method="GET")).body.decode().splitlines()
    return sum(float(line.removeprefix(TIMED_OUT)) for line in lines if line.startswith(TIMED_OUT))


async def test_a_connection_without_a_request_is_closed_after_one_limit(short: RunningGateway) -> None:
    async with wire(short.address) as connection:
        assert await connection.is_closed()
    assert not short.records


@pytest.mark.parametrize("sent", [b"POST /gen", WHOLE[:60], HEAD[:-2]], ids=["line", "header", "no end"])
@pytest.mark.parametrize("before", [b"", request_bytes("/generate", {"text": "a"})], ids=["first", "second"])
async def test_half_a_head(short: RunningGateway, before: bytes, sent: bytes) -> None:
    async with wire(short.address) as connection:
        if before:
            await connection.send(before)
            assert (await connection.answer()).status == 200
        await connection.send(sent)
        await assert_refused(connection, "head")
    assert len(short.records) == bool(before)  # what never became a request has no line


@pytest.mark.parametrize(
    ("sent", "bytes_in"),
    [
        pytest.param(HEAD, 0, id="none of it"),
        pytest.param(WHOLE[:-10], len(WHOLE) - len(HEAD) - 10, id="nearly all"),
        pytest.param(CHUNKED + b"100\r\nabc", 3, id="half a chunk"),
        pytest.param(CHUNKED + b"3\r\nabc\r\n", 3, id="no last chunk"),
        pytest.param(EXPECTS[:-50], 50, id="told to go on"),
    ],
)
async def test_half_a_body_is_counted_and_logged_once(
    short: RunningGateway, scripted: ScriptEngine, sent: bytes, bytes_in: int
) -> None:
    count = await timed_out(short)
    async with wire(short.address) as connection:
        await connection.send(sent.replace(b"Host:", b"X-Request-Id: mine\r\nHost:"))
        assert await assert_refused(connection, "body") == "mine"
    record = await short.record()
    await short.settle()
    assert (record.status, record.outcome, record.request_id) == (408, "timeout", "mine")
    assert (record.bytes_in, record.bytes_out > 0, "bytes/s" in (record.error or "")) == (bytes_in, True, True)
    assert len(short.records) == 1
    assert await timed_out(short) == count + 1
    assert not scripted.requests


async def test_a_request_without_an_id_is_logged_under_the_one_that_it_was_told(short: RunningGateway) -> None:
    async with wire(short.address) as connection:
        await connection.send(request_bytes("/generate", {"text": "a"}, headers={"X-Request-Id": "before"}))
        assert (await connection.answer()).status == 200
        await connection.send(WHOLE[:-10])
        public_id = await assert_refused(connection, "body")
    assert [record.request_id for record in short.records] == ["before", public_id]


async def test_half_a_body_of_a_control_route(short: RunningGateway) -> None:
    async with wire(short.address) as connection:
        await connection.send(CONTROL[:-20])
        await assert_refused(connection, "body")
    assert not short.records


@pytest.mark.parametrize(
    ("at_once", "dripped", "part"),
    [pytest.param(b"", HEAD, "head", id="head"), pytest.param(HEAD, WHOLE[len(HEAD) :], "body", id="body")],
)
async def test_bytes_one_by_one_gain_no_time(short: RunningGateway, at_once: bytes, dripped: bytes, part: str) -> None:
    async with wire(short.address) as connection, asyncio.TaskGroup() as group:
        await connection.send(at_once)
        dripping = group.create_task(send_slowly(connection, dripped, 1, LIMIT_S / 10))
        await assert_refused(connection, part)
        dripping.cancel()


async def send_slowly(connection: Wire, data: bytes, size: int, pause_s: float) -> None:
    """Send ``data`` piece by piece, until the other side has closed."""
    for at in range(0, len(data), size):
        try:
            await connection.send(data[at : at + size])
        except ConnectionError:
            return
        await asyncio.sleep(pause_s)


async def test_a_body_that_keeps_coming_has_time(short: RunningGateway) -> None:
    async with wire(short.address) as connection:
        for _ in range(2):
            await send_slowly(connection, WHOLE, 250, LIMIT_S / 4)  # four limits
            assert (await connection.answer()).status == 200
    assert [record.outcome for record in short.records] == ["complete"] * 2


async def test_between_two_requests_there_is_another_limit(short: RunningGateway) -> None:
    async with wire(short.address) as connection:
        for _ in range(2):
            await connection.send(WHOLE)
            assert (await connection.answer()).status == 200
            await asyncio.sleep(3 * LIMIT_S)


@pytest.mark.parametrize(
    ("more", "cut"),
    [
        pytest.param(0, 0, id="nothing"),
        pytest.param(1, len(WHOLE) - 40, id="half a head"),
        pytest.param(1, 10, id="half a body"),
        pytest.param(20, 10, id="more than is read"),
    ],
)
async def test_an_answer_under_way_is_not_cut_for_what_comes_behind(
    short: RunningGateway, scripted: ScriptEngine, more: int, cut: int
) -> None:
    may_end = asyncio.Event()

    async def script(request: SeenRequest, reply: Reply) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await may_end.wait()
        await reply.whole(b'{"text":"late"}')

    scripted.script = script
    everything = WHOLE * (1 + more)
    async with wire(short.address) as connection:
        await connection.send(everything[: len(everything) - cut])
        await asyncio.sleep(3 * LIMIT_S)
        may_end.set()
        await connection.send(everything[len(everything) - cut :])
        for _ in range(1 + more):
            assert (await connection.answer()).status == 200
    assert {record.outcome for record in short.records} == {"complete"}


async def test_the_rest_of_a_body_that_was_refused_gets_no_second_answer(short: RunningGateway) -> None:
    async with wire(short.address) as connection, asyncio.TaskGroup() as group:
        await connection.send(HEAD.replace(b"POST", b"PATCH"))
        sending = group.create_task(send_slowly(connection, WHOLE[len(HEAD) :], 20, LIMIT_S / 2))
        assert (await connection.answer()).status == 405
        assert await connection.is_closed()
        sending.cancel()
    assert [record.status for record in short.records] == [405]


async def test_empty_lines_keep_no_connection(short: RunningGateway) -> None:
    async with wire(short.address) as connection:
        await connection.send(WHOLE)
        assert (await connection.answer()).status == 200
        await connection.send(b"\r\n")
        assert await connection.is_closed()


def stand_still(then: Callable[[], None], for_s: float) -> None:
    """Have the loop stand still in the middle of what it reads, and do something meanwhile."""
    loop, (ours, theirs) = asyncio.get_running_loop(), socket.socketpair()

    def readable() -> None:
        loop.remove_reader(ours)
        ours.close()
        theirs.close()
        then()
        time.sleep(for_s)

    loop.add_reader(ours, readable)
    theirs.send(b"now")


async def test_a_gateway_that_was_not_run_in_time_reads_before_it_judges(short: RunningGateway) -> None:
    with socket.create_connection(short.address) as client:
        client.sendall(WHOLE[:-10])
        await asyncio.sleep(1.5 * LIMIT_S)  # one look has been
        stand_still(lambda: client.sendall(WHOLE[-10:]), LIMIT_S)
        assert (await short.record()).status == 200
        assert client.recv(12, socket.MSG_DONTWAIT) == b"HTTP/1.1 200"


async def test_0_is_off(scripted: ScriptEngine) -> None:
    async with running_gateway(scripted.url, client_timeout_s=0) as patient, wire(patient.address) as connection:
        await asyncio.sleep(3 * LIMIT_S)
        for part in (WHOLE[:40], WHOLE[40:-10]):
            await connection.send(part)
            await asyncio.sleep(3 * LIMIT_S)
        await connection.send(WHOLE[-10:])
        assert (await connection.answer()).status == 200


async def test_a_connection_is_looked_at_for_as_long_as_it_is_open(short: RunningGateway) -> None:
    """Two slow bodies at once, and one client that has left before its time: each ends once."""
    async with wire(short.address) as first, wire(short.address) as second, wire(short.address) as left:
        for connection in (first, second, left):
            await connection.send(WHOLE[:-1])
        left.reset()
        await assert_refused(first, "body")
        await assert_refused(second, "body")
    await short.settle()
    assert sorted(record.outcome for record in short.records) == ["client_closed", "timeout", "timeout"]


async def test_what_is_no_chunk_gets_no_second_answer(short: RunningGateway) -> None:
    async with wire(short.address) as connection:
        await connection.send(CHUNKED.replace(b"POST", b"PATCH"))
        assert (await connection.answer()).status == 405
        await connection.send(b"no size\r\n")
        assert await connection.is_closed()
    assert [record.status for record in short.records] == [405]


async def test_what_is_no_chunk_is_logged_as_it_was_answered(short: RunningGateway) -> None:
    async with wire(short.address) as connection:
        await connection.send(CHUNKED + b"3\r\nabc\r\nno size\r\n")
        assert (await connection.answer()).status == 400
        assert await connection.is_closed()
    record = await short.record()
    assert (record.status, record.outcome, len(short.records)) == (400, "rejected", 1)

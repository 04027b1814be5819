"""``--sse-keepalive-s``: signs of life in silent streams, and nothing but those."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.fakes.running import RunningGateway, running_gateway
from tests.fakes.script_engine import Reply, Script, ScriptEngine, SeenRequest, script_engine
from tests.fakes.wire import Wire, call, request_bytes, wire

KEEPALIVE_S = 0.05
COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
STREAM: dict[str, Any] = {"text": "hi", "messages": [], "stream": True, "rid": "mine"}


def event(text: str) -> bytes:
    """One event of any dialect's."""
    return (
        b"data: "
        + json.dumps({"text": text, "choices": [{"index": 0, "text": text}], "meta_info": {}}).encode()
        + b"\n\n"
    )


@pytest.fixture(scope="module")
async def alive_gateway(shared_engine: ScriptEngine) -> AsyncIterator[RunningGateway]:
    """A gateway that sends comments, in front of the scripted engine."""
    async with running_gateway(shared_engine.url, sse_keepalive_s=KEEPALIVE_S) as running:
        yield running


@pytest.fixture
async def alive(alive_gateway: RunningGateway, scripted: ScriptEngine) -> AsyncIterator[RunningGateway]:
    """The same, with no records; at the end nothing may be left of any request."""
    alive_gateway.records.clear()
    yield alive_gateway
    await alive_gateway.settle()


class Pauses:
    """A script in steps: a number is a silence that lasts for so many comments, bytes are written.

    Attributes:
        goes_on: Set by the client for each silence that it has seen enough of.
    """

    def __init__(self, *steps: bytes | int, how: str = "end", head_first: bool = True) -> None:
        self.steps = steps
        self.goes_on = asyncio.Semaphore(0)
        self.how = how
        self.head_first = head_first

    async def __call__(self, request: SeenRequest, reply: Reply) -> None:
        has_head = self.head_first
        if has_head:
            await reply.start_chunked()
        for step in self.steps:
            if isinstance(step, int):
                async with asyncio.timeout(5):
                    await self.goes_on.acquire()
                continue
            if not has_head:
                await reply.start_chunked()
                has_head = True
            await reply.chunk(step)
        if self.how == "end":
            await reply.end_chunked()
        else:
            getattr(reply, self.how)()


async def comments(connection: Wire, count: int) -> None:
    """Read so many comments, each a chunk of its own."""
    for _ in range(count):
        assert await connection.chunk() == COMMENT


async def rest(connection: Wire) -> bytes:
    """Everything up to the end of the stream, without comments."""
    parts = []
    while part := await connection.chunk():
        parts.append(part)
    return b"".join(parts).replace(COMMENT, b"")


@pytest.mark.parametrize("cut", [1, 6, 20, -2, -1])
async def test_case_26_comments_come_between_whole_events_only(
    alive: RunningGateway, scripted: ScriptEngine, cut: int
) -> None:
    script = Pauses(event("one"), event("two")[:cut], 2, event("two")[cut:], DONE)
    scripted.script = script
    async with wire(alive.address) as connection:
        await connection.send(request_bytes("/generate", STREAM))
        assert (await connection.head())[0] == 200
        assert await connection.chunk() == event("one")
        await comments(connection, 2)
        script.goes_on.release()
        assert await rest(connection) == event("two") + DONE
    assert (await alive.record()).outcome == "complete"


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("path", ["/generate", CHAT])
async def test_the_first_comment_commits_200_before_the_first_event(
    alive: RunningGateway, scripted: ScriptEngine, path: str, head_first: bool
) -> None:
    script = Pauses(2, event("late"), DONE, head_first=head_first)
    scripted.script = script
    async with wire(alive.address) as connection:
        await connection.send(request_bytes(path, STREAM))
        status, headers = await connection.head()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert headers["x-request-id"] == "mine"
        assert headers["x-forebay-worker"]
        await comments(connection, 2)
        script.goes_on.release()
        assert await rest(connection) == event("late") + DONE
    assert (await alive.record()).outcome == "complete"


def refusing(status: int) -> Script:
    """A script that refuses when told to."""
    goes_on = asyncio.Event()

    async def script(request: SeenRequest, reply: Reply) -> None:
        await goes_on.wait()
        body = b'{"object":"error","message":"no","type":"x","code":%d}' % status
        await reply.whole(body, status=status)

    script.goes_on = goes_on  # type: ignore[attr-defined]
    return script


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/generate", 400, "invalid_request"),
        ("/generate", 503, "unavailable"),
        (CHAT, 500, "engine_error"),
        (MESSAGES, 400, "invalid_request"),
        (RESPONSES, 500, "engine_error"),
    ],
)
async def test_from_the_first_comment_on_errors_are_events(
    alive: RunningGateway, scripted: ScriptEngine, path: str, status: int, kind: str
) -> None:
    script = refusing(status)
    scripted.script = script
    async with wire(alive.address) as connection:
        await connection.send(request_bytes(path, STREAM))
        assert (await connection.head())[0] == 200
        await comments(connection, 1)
        script.goes_on.set()  # type: ignore[attr-defined]
        tail = await rest(connection)
    if path in (MESSAGES, RESPONSES):
        assert tail.startswith(b"event: error\ndata: {")
        assert DONE not in tail
    else:
        assert tail.endswith(DONE)
        error = json.loads(tail.removesuffix(DONE).removeprefix(b"data: "))["error"]
        assert (error["type"], error["message"], error["request_id"]) == (kind, "no", "mine")
    assert kind.encode() in tail
    record = await alive.record()
    assert (record.status, record.error) == (200, "no")
    assert record.outcome == ("rejected" if status == 400 else "engine_error")


@pytest.mark.parametrize("error", [b'{"error":{"message":"no","code":400}}', b'{"error":{"message":"no","code":503}}'])
async def test_an_error_event_that_comes_first_is_an_event_then(
    alive: RunningGateway, scripted: ScriptEngine, error: bytes
) -> None:
    script = Pauses(1, b"data: " + error + b"\n\n", DONE)
    scripted.script = script
    async with wire(alive.address) as connection:
        await connection.send(request_bytes(CHAT, STREAM))
        assert (await connection.head())[0] == 200
        await comments(connection, 1)
        script.goes_on.release()
        tail = await rest(connection)
    assert tail.endswith(DONE)
    assert tail.count(DONE) == 1
    assert json.loads(tail.removesuffix(DONE).removeprefix(b"data: "))["error"]["message"] == "no"


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_from_the_first_comment_on_nothing_is_retried(how: str) -> None:
    goes_on = asyncio.Event()

    async def script(request: SeenRequest, reply: Reply) -> None:
        await goes_on.wait()
        getattr(reply, how)()

    async with (
        script_engine(script) as one,
        script_engine(script) as other,
        running_gateway(one.url, other.url, sse_keepalive_s=KEEPALIVE_S) as front,
    ):
        async with wire(front.address) as connection:
            await connection.send(request_bytes("/generate", STREAM))
            assert (await connection.head())[0] == 200
            await comments(connection, 1)
            goes_on.set()
            tail = await rest(connection)
        assert json.loads(tail.removesuffix(DONE).removeprefix(b"data: "))["error"]["code"] == 503
        assert len(one.requests) + len(other.requests) == 1
        assert (await front.record()).attempts == 1


@pytest.mark.parametrize("how", ["close", "reset", "end"])
async def test_a_stream_that_breaks_after_a_comment_says_so(
    alive: RunningGateway, scripted: ScriptEngine, how: str
) -> None:
    script = Pauses(event("one"), 1, event("two")[:9], how=how)
    scripted.script = script
    async with wire(alive.address) as connection:
        await connection.send(request_bytes("/generate", STREAM))
        await connection.head()
        assert await connection.chunk() == event("one")
        await comments(connection, 1)
        script.goes_on.release()
        tail = await rest(connection)
    assert tail.startswith(b'data: {"error":')
    assert tail.endswith(DONE)
    assert (await alive.record()).outcome == "truncated"


@pytest.mark.parametrize("content_type", ["text/html", "application/json"])
async def test_another_content_type_after_a_comment_is_an_error_event(
    alive: RunningGateway, scripted: ScriptEngine, content_type: str
) -> None:
    goes_on = asyncio.Event()

    async def script(request: SeenRequest, reply: Reply) -> None:
        await goes_on.wait()
        await reply.whole(b'{"text":"a"}', content_type=content_type)

    scripted.script = script
    async with wire(alive.address) as connection:
        await connection.send(request_bytes("/generate", STREAM))
        await connection.head()
        await comments(connection, 1)
        goes_on.set()
        tail = await rest(connection)
    assert b'"type":"engine_protocol"' in tail
    assert tail.endswith(DONE)


async def test_unary_answers_have_no_signs_of_life(alive: RunningGateway, scripted: ScriptEngine) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await asyncio.sleep(4 * KEEPALIVE_S)  # silence is what is tested
        await reply.whole(b'{"text":"a"}')

    scripted.script = script
    answer = await call(alive.address, "/generate", {"text": "hi"})
    assert (answer.status, answer.body) == (200, b'{"text":"a"}')


async def test_off_by_default(front: RunningGateway, scripted: ScriptEngine) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        await reply.chunk(event("a"))
        await asyncio.sleep(4 * KEEPALIVE_S)  # silence is what is tested
        await reply.chunk(DONE)
        await reply.end_chunked()

    scripted.script = script
    assert front.gateway.settings.sse_keepalive_s == 0
    assert (await call(front.address, "/generate", STREAM)).body == event("a") + DONE


@pytest.mark.parametrize("before", [True, False])
async def test_a_client_that_leaves_during_silence_is_noticed(
    alive: RunningGateway, scripted: ScriptEngine, before: bool
) -> None:
    closed = asyncio.Event()

    async def script(request: SeenRequest, reply: Reply) -> None:
        if not before:
            await reply.start_chunked()
            await reply.chunk(event("a"))
        await reply.gone()
        closed.set()

    scripted.script = script
    async with wire(alive.address) as connection, asyncio.timeout(5):
        await connection.send(request_bytes("/generate", STREAM))
        await connection.head()
        if not before:
            assert await connection.chunk() == event("a")
        await comments(connection, 2)
        connection.close()
        await closed.wait()
    assert (await alive.record()).outcome == "client_closed"


def openai_style(body: bytes) -> list[bytes]:
    """Events as the official Python client cuts them: at blank lines, comments skipped, data lines joined."""
    found: list[bytes] = []
    data: list[bytes] = []
    for line in body.splitlines():
        if not line:
            if data:
                found.append(b"\n".join(data))
            data = []
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        else:
            assert line.startswith(b":")
    return found


async def test_case_25_naive_readers_see_every_event(alive: RunningGateway, scripted: ScriptEngine) -> None:
    texts = [str(number) for number in range(4)]
    steps = [step for text in texts for step in (1, event(text)[:8], 1, event(text)[8:])]
    script = Pauses(*steps, DONE)
    scripted.script = script
    received = b""
    async with wire(alive.address) as connection:
        await connection.send(request_bytes(CHAT, STREAM))
        await connection.head()
        while part := await connection.chunk():
            received += part
            if part == COMMENT:
                script.goes_on.release()
    expected = [event(text).removeprefix(b"data: ").removesuffix(b"\n\n") for text in texts] + [b"[DONE]"]
    assert openai_style(received) == expected
    # The simplest reader of all: every line that begins with "data: ".
    assert [line[6:] for line in received.split(b"\n") if line.startswith(b"data: ")] == expected
    assert received.count(COMMENT) >= 8


async def test_a_worker_that_is_aborted_during_silence_still_ends_the_stream(
    alive: RunningGateway, scripted: ScriptEngine
) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        await reply.chunk(event("a"))
        async with asyncio.timeout(5):
            while request.rid not in scripted.aborted:  # noqa: ASYNC110 -- the engine has no event for it
                await asyncio.sleep(0.005)
        await reply.chunk(b'data: {"meta_info":{"finish_reason":{"type":"abort","message":"Aborted"}}}\n\n' + DONE)
        await reply.end_chunked()

    scripted.script = script
    async with wire(alive.address) as connection:
        await connection.send(request_bytes("/generate", STREAM))
        await connection.head()
        assert await connection.chunk() == event("a")
        await comments(connection, 1)
        assert (await call(alive.address, "/abort_request", {"rid": "mine"})).json()["aborted"] == ["mine"]
        assert (await rest(connection)).endswith(DONE)
    assert (await alive.record()).outcome == "aborted"

"""What engines answer and what clients get: framing, bounds, breaks, headers."""

import asyncio
import hashlib
import json
import random
import socket
from typing import Any

import pytest

from gateway.document import BUFFER_BYTES
from simulator.server import SimulatedEngine
from tests.fakes.running import RunningGateway, running_gateway
from tests.fakes.script_engine import Reply, Script, ScriptEngine, SeenRequest, script_engine
from tests.fakes.wire import call, request_bytes, wire

DONE = b"[DONE]"
UNARY: dict[str, Any] = {"text": "hi", "rid": "mine"}
STREAM: dict[str, Any] = {"text": "hi", "rid": "mine", "stream": True}
CAP = 200_000
FLAT: dict[str, Any] = {"return_flat_raw_output_top_logprobs": True, "return_logprob": True, "top_logprobs_num": 2}


def event(text: str, rid: str = "mine", **more: Any) -> bytes:
    """The payload of one event."""
    return json.dumps({"text": text, "meta_info": {"id": rid}, **more}, ensure_ascii=False).encode()


def error_of(payload: bytes) -> dict[str, Any]:
    """The error in an error event."""
    error = json.loads(payload)["error"]
    assert set(error) == {"message", "type", "code", "param", "request_id"}
    assert error["request_id"] == "mine"
    assert isinstance(error, dict)
    return error


# Flat log-probabilities.


async def test_flat_output_in_a_stream_is_refused_before_any_engine_sees_it(
    gateway: RunningGateway, engine: SimulatedEngine
) -> None:
    answer = await call(gateway.address, "/generate", {**STREAM, **FLAT})
    assert (answer.status, answer.json()["error"]["type"]) == (400, "invalid_request")
    assert engine.log.requests_to("/generate") == []
    assert (await gateway.record()).outcome == "rejected"


async def test_flat_output_goes_upstream_unary_and_comes_back_unchanged(
    front: RunningGateway, scripted: ScriptEngine
) -> None:
    flat = b'"output_top_logprobs_val_flat":[-0.10,-1e-7,-3.0000000000000001],"output_top_logprobs_shape":[1,3]}}'

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.whole(b'{"text":"x","meta_info":{"id":"%b",%b' % (request.rid.encode(), flat))

    scripted.script = script
    answer = await call(front.address, "/generate", {**UNARY, **FLAT, "stream": False})
    assert answer.body == b'{"text":"x","meta_info":{"id":"mine",' + flat
    seen = scripted.requests[0]
    assert json.loads(seen.body)["stream"] is False
    assert seen.header("accept") == "application/json"


# Bounds of a unary answer.


def body_of(size: int, rid: str) -> bytes:
    """A JSON body of exactly that size."""
    start, end = b'{"meta_info":{"id":"%b"},"text":"' % rid.encode(), b'"}'
    return start + b"x" * (size - len(start) - len(end)) + end


def sized(size: int, framing: str) -> Script:
    """Answer with a body of ``size`` bytes."""

    async def script(request: SeenRequest, reply: Reply) -> None:
        body = body_of(size, request.rid)
        if framing == "length":
            await reply.whole(body)
        elif framing == "close":
            await reply.head("Content-Type: application/json", "Connection: close")
            await reply.raw(body)
            reply.close()
        else:
            await reply.start_chunked(content_type="application/json")
            for start in range(0, size, 65536):
                await reply.chunk(body[start : start + 65536])
            await reply.end_chunked()

    return script


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
@pytest.mark.parametrize("over", [-1, 0, 1])
async def test_a_unary_answer_is_bounded(scripted: ScriptEngine, framing: str, over: int) -> None:
    scripted.script = sized(CAP + over, framing)
    rid = "r" * 32
    async with running_gateway(scripted.url, max_response_bytes=CAP) as front:
        answer = await call(front.address, "/generate", {**UNARY, "rid": rid})
        record = await front.record()
        if over <= 0:
            assert answer.status == 200
            assert answer.body == body_of(CAP + over, rid)
            assert answer.headers["content-length"] == str(CAP + over)
            return
        assert answer.status == 502
        assert answer.json()["error"]["type"] == "response_too_large"
        assert record.outcome == "engine_error"


LONG_CAP = 3 * BUFFER_BYTES


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
@pytest.mark.parametrize("size", [BUFFER_BYTES, BUFFER_BYTES + 1, LONG_CAP - 1, LONG_CAP])
async def test_a_long_unary_answer_is_sent_on_while_it_is_read(scripted: ScriptEngine, framing: str, size: int) -> None:
    scripted.script = sized(size, framing)
    rid = "some id of thirty-two characters"
    async with running_gateway(scripted.url, max_response_bytes=LONG_CAP) as front:
        answer = await call(front.address, "/generate", {**UNARY, "rid": rid})
        assert answer.status == 200
        assert answer.is_whole
        assert hashlib.sha256(answer.body).digest() == hashlib.sha256(body_of(size, rid)).digest()
        assert (await front.record()).outcome == "complete"


async def test_a_long_answer_is_chunked_where_ids_change_its_length(
    front: RunningGateway, scripted: ScriptEngine
) -> None:
    scripted.script = sized(2 * BUFFER_BYTES, "length")
    answer = await call(front.address, "/generate", {**UNARY, "rid": "short"})
    assert "content-length" not in answer.headers
    assert answer.is_whole
    assert len(answer.body) == 2 * BUFFER_BYTES - 32 + len("short")
    assert answer.json()["meta_info"]["id"] == "short"


@pytest.mark.parametrize(("framing", "status"), [("length", 502), ("chunked", 200), ("close", 200)])
async def test_a_long_answer_above_the_bound_is_never_taken_for_whole(
    scripted: ScriptEngine, framing: str, status: int
) -> None:
    scripted.script = sized(LONG_CAP + 1, framing)
    async with running_gateway(scripted.url, max_response_bytes=LONG_CAP) as front:
        answer = await call(front.address, "/generate", UNARY)
        record = await front.record()
    assert answer.status == status
    if status == 502:
        assert answer.json()["error"]["type"] == "response_too_large"
        assert record.outcome == "engine_error"
    else:
        assert not answer.is_whole
        assert record.outcome == "truncated"


@pytest.mark.parametrize("size", [1000, 2 * BUFFER_BYTES])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_body_shorter_than_announced_is_never_taken_for_whole(
    front: RunningGateway, scripted: ScriptEngine, size: int, how: str
) -> None:
    may_break = asyncio.Event()

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.head("Content-Type: application/json", f"Content-Length: {size}")
        await reply.raw(body_of(size, request.rid)[: size * 6 // 10])
        await may_break.wait()
        getattr(reply, how)()

    scripted.script = script
    async with wire(front.address) as connection:
        await connection.send(request_bytes("/generate", UNARY))
        if size < BUFFER_BYTES:
            may_break.set()
            answer = await connection.answer()
            assert (answer.status, answer.json()["error"]["type"]) == (502, "engine_error")
        else:
            status, headers = await connection.head()
            may_break.set()
            answer = await connection.body(status, headers)
            assert not answer.is_whole
    assert (await front.record()).outcome == ("engine_error" if size < BUFFER_BYTES else "truncated")


# The client's bytes reach the engine, and the engine's the client, as they are.

SPELLINGS = [
    "1.0", "1e5", "1E+2", "-0", "-0.0", "9007199254740993", "123456789012345678901234567890", "0.1000000000000000055",
    "1e400", '"\\u0041\\ud83d\\ude00\\/"', '"é漢😀"', "null", "true", "[ ]", "{ }",
    '{"b":1, "a" : {"rid":"x","a":[1,[2 ]]}}',
    '"a\\"rid\\":\\"b"', '{"stream":true}', '[{"id":"y"},\t1 ]', "\n 7 \r\n",
]  # fmt: skip


def test_spellings_are_json() -> None:
    for spelling in SPELLINGS:
        json.loads(spelling)


@pytest.mark.parametrize("has_rid", [False, True])
async def test_unknown_fields_survive_both_ways(front: RunningGateway, scripted: ScriptEngine, has_rid: bool) -> None:
    chance = random.Random(5)
    for _ in range(40):
        names = chance.sample(["zeta", "alpha", "ключ", "a b", "", "id", "meta_info", "extra.x", "échappé"], 5)
        extras = [f"{json.dumps(name)} :{chance.choice(SPELLINGS)}" for name in names]
        extras.insert(chance.randrange(6), '"text": "hi"')
        before, after = ", ".join(extras[:3]), ",".join(extras[3:])
        rid = '"rid": "mine" ,' if has_rid else ""
        raw = f" {{{before} , {rid}{after} }}\n".encode()
        answer = await call(front.address, "/generate", raw, headers={"X-Request-Id": "mine"})
        assert answer.status == 200
        seen = scripted.requests[-1]
        engine_rid = seen.rid.encode()
        assert len(engine_rid) == 32
        assert _fields(seen.body.replace(engine_rid, b"mine")) == [
            *_fields(raw),
            *([] if has_rid else [("rid", '"mine"')]),
        ]
        if not has_rid:
            assert seen.body == raw.rstrip()[:-1] + b',"rid":"' + engine_rid + b'"}'
        assert answer.body == b'{"meta_info":{"id":"mine"},"echo":' + seen.body.replace(engine_rid, b"mine") + b"}"


def _fields(raw: bytes) -> list[tuple[str, Any]]:
    """Top-level fields in order, numbers as they are spelt."""

    def keep(pairs: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        return [(key, json.dumps(value) if isinstance(value, str) else value) for key, value in pairs]

    found = json.loads(raw, object_pairs_hook=keep, parse_int=lambda s: ("n", s), parse_float=lambda s: ("n", s))
    assert isinstance(found, list)
    return found


async def test_an_upload_of_20_mb_in_odd_chunks_arrives_whole(front: RunningGateway, scripted: ScriptEngine) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.whole(b'{"digest":"%b"}' % hashlib.sha256(request.body).hexdigest().encode())

    scripted.script = script
    chance = random.Random(1)
    raw = b'{"input_ids":[' + b",".join(b"%d" % number for number in range(1_000_000, 3_550_000)) + b"]}"
    assert len(raw) > 20_000_000
    async with wire(front.address) as connection:
        await connection.send(
            b"POST /generate HTTP/1.1\r\nHost: g\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        start = 0
        while start < len(raw):
            size = chance.choice((1, 7, 1000, 65_537, 999_983))
            await connection.send(b"%x\r\n%b\r\n" % (len(raw[start : start + size]), raw[start : start + size]))
            start += size
        await connection.send(b"0\r\n\r\n")
        answer = await connection.answer()
    engine_rid = scripted.requests[0].rid.encode()
    expected = raw[:-1] + b',"rid":"' + engine_rid + b'"}'
    assert answer.json()["digest"] == hashlib.sha256(expected).hexdigest()
    assert (await front.record()).bytes_in == len(raw)


# Streams.

EVENTS = [event("a"), event("漢é"), event("b", index=0)]


def wire_of(rid: str) -> bytes:
    """A whole stream of three events as it stands on the wire."""
    body = [b"data: " + payload.replace(b"mine", rid.encode()) + b"\n\n" for payload in [*EVENTS, DONE]]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in body) + b"0\r\n\r\n"


async def test_a_stream_is_the_same_wherever_it_is_cut(front: RunningGateway, scripted: ScriptEngine) -> None:
    cut = 0

    async def script(request: SeenRequest, reply: Reply) -> None:
        raw = wire_of(request.rid)
        await reply.raw(raw[:cut])
        await reply.raw(raw[cut:])

    scripted.script = script
    async with wire(front.address) as connection:
        for cut in range(1, len(wire_of("r" * 32))):
            await connection.send(request_bytes("/generate", STREAM))
            answer = await connection.answer()
            assert (answer.status, answer.events()) == (200, [*EVENTS, DONE]), cut
            assert all(chunk.endswith(b"\n\n") for chunk in answer.chunks), cut


async def test_every_event_is_passed_on_before_the_next_one_is_there(
    front: RunningGateway, scripted: ScriptEngine
) -> None:
    seen = asyncio.Semaphore(0)

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        for number in range(20):
            await reply.event(event(str(number), request.rid))
            await seen.acquire()
        await reply.event(DONE)
        await reply.end_chunked()

    scripted.script = script
    async with wire(front.address) as connection:
        await connection.send(request_bytes("/generate", STREAM))
        await connection.head()
        for number in range(20):
            assert json.loads(await connection.event())["text"] == str(number)
            seen.release()
        assert await connection.event() == DONE
        for protocol in front.server.server_state.connections:
            sock: socket.socket = protocol.transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_an_event_of_4_mb_arrives_whole(front: RunningGateway, scripted: ScriptEngine) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        await reply.event(event("z" * 4_000_000, request.rid))
        await reply.event(DONE)
        await reply.end_chunked()

    scripted.script = script
    answer = await call(front.address, "/generate", STREAM)
    assert answer.events() == [event("z" * 4_000_000), DONE]


async def test_an_event_above_the_bound_ends_the_stream_with_an_error_event(scripted: ScriptEngine) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        await reply.event(event("first", request.rid))
        await reply.event(event("z" * (CAP + 1), request.rid))
        await reply.gone()

    scripted.script = script
    async with running_gateway(scripted.url, max_response_bytes=CAP) as front:
        answer = await call(front.address, "/generate", STREAM)
        record = await front.record()
    first, error, done = answer.events()
    assert (first, done) == (event("first"), DONE)
    assert error_of(error)["type"] == "response_too_large"
    assert record.outcome == "truncated"


async def test_characters_in_pieces_and_bytes_that_are_none_pass(front: RunningGateway, scripted: ScriptEngine) -> None:
    text = b'{"text":"\xe6\xbc\xa2\xf0\x9f\x98\x80 \xff","meta_info":{"id":"mine"}}'

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        for byte in b"data: " + text.replace(b"mine", request.rid.encode()) + b"\n\ndata: [DONE]\n\n":
            await reply.chunk(bytes([byte]))
        await reply.end_chunked()

    scripted.script = script
    answer = await call(front.address, "/generate", STREAM)
    assert answer.events() == [text, DONE]
    assert (await front.record()).outcome == "complete"


async def test_comments_and_named_events_pass_as_they_are(front: RunningGateway, scripted: ScriptEngine) -> None:
    raw = b': wait\n\nevent: sglext_ids\ndata: {"input_ids":[1]}\n\n:\r\n\r\ndata: {"text":"a"}\r\n\r\ndata: [DONE]\n\n'

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        await reply.chunk(raw[:30])
        await reply.chunk(raw[30:])
        await reply.end_chunked()

    scripted.script = script
    answer = await call(front.address, "/generate", STREAM)
    assert answer.body == raw


# Breaks.


def breaking(stage: str, how: str) -> Script:
    """A stream that ends in the wrong way at some place."""

    async def script(request: SeenRequest, reply: Reply) -> None:
        if stage == "before the head":
            return getattr(reply, how)()  # type: ignore[no-any-return]
        await reply.start_chunked()
        if stage != "before the first event":
            await reply.event(event("a", request.rid))
            await reply.event(event("b", request.rid))
            if how == "reset":
                await _read_by_gateway()
        if stage == "inside an event":
            await reply.chunk(b'data: {"text":"cu')
        if how == "end":
            await reply.end_chunked()
        else:
            getattr(reply, how)()
        return None

    return script


async def _read_by_gateway() -> None:
    """A reset overtakes bytes that have not been read; both sides share this loop, so a few rounds are enough."""
    for _ in range(20):
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("how", ["close", "reset", "end"])
@pytest.mark.parametrize("stage", ["before the first event", "inside an event", "after the last event"])
async def test_a_broken_stream_never_looks_whole(
    front: RunningGateway, scripted: ScriptEngine, stage: str, how: str
) -> None:
    scripted.script = breaking(stage, how)
    answer = await call(front.address, "/generate", STREAM)
    record = await front.record()
    assert answer.is_whole
    if stage == "before the first event":
        assert (answer.status, answer.json()["error"]["type"]) == (502, "engine_error")
        assert record.outcome == "engine_error"
        return
    assert answer.status == 200
    *good, error, done = answer.events()
    assert (good, done) == ([event("a"), event("b")], DONE)
    assert (error_of(error)["code"], error_of(error)["type"]) == (502, "engine_error")
    assert (record.outcome, record.status) == ("truncated", 200)


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_no_byte_at_all_is_told_as_unavailable(front: RunningGateway, scripted: ScriptEngine, how: str) -> None:
    scripted.script = breaking("before the head", how)
    answer = await call(front.address, "/generate", STREAM)
    assert (answer.status, answer.json()["error"]["type"]) == (503, "unavailable")
    assert answer.headers["retry-after"] == "1"
    assert (await front.record()).outcome == "engine_error"


async def test_the_end_marker_after_an_error_can_be_switched_off(scripted: ScriptEngine) -> None:
    scripted.script = breaking("after the last event", "end")
    async with running_gateway(scripted.url, sse_done_after_error=False) as front:
        answer = await call(front.address, "/generate", STREAM)
    *good, error = answer.events()
    assert good == [event("a"), event("b")]
    assert error_of(error)["type"] == "engine_error"


ENGINE_ERROR = b'{"error":{"message":"it broke","type":"SERVICE_UNAVAILABLE","code":503}}'


@pytest.mark.parametrize("has_done", [True, False])
async def test_an_engines_error_event_passes_once_and_is_counted(
    front: RunningGateway, scripted: ScriptEngine, has_done: bool
) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        await reply.event(event("a", request.rid))
        await reply.event(event("b", request.rid))
        await reply.event(ENGINE_ERROR)
        if has_done:
            await reply.event(DONE)
        await reply.end_chunked()

    scripted.script = script
    answer = await call(front.address, "/generate", STREAM)
    assert answer.events() == [event("a"), event("b"), ENGINE_ERROR, DONE]
    record = await front.record()
    assert (record.outcome, record.status) == ("engine_error", 200)
    assert record.error == "it broke"


@pytest.mark.parametrize(
    ("first", "status", "type"),
    [
        (ENGINE_ERROR, 503, "unavailable"),
        (b'{"error":{"message":"no","code":429}}', 429, None),
        (b'{"error":{"message":"no","code":400}}', 400, None),
        (b'{"error":{"message":"no","code":"odd"}}', 502, "engine_error"),
        (b'{"error":{"message":"no"}}', 502, "engine_error"),
    ],
)
async def test_an_error_event_that_comes_first_is_a_status(
    front: RunningGateway, scripted: ScriptEngine, first: bytes, status: int, type: str | None
) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        await reply.event(first)
        await reply.event(DONE)
        await reply.end_chunked()

    scripted.script = script
    answer = await call(front.address, "/v1/chat/completions", {"messages": [], "stream": True, "rid": "mine"})
    assert answer.status == status
    if type is None:
        assert answer.body == first
    else:
        assert error_of(answer.body)["type"] == type


# Content types.


@pytest.mark.parametrize(
    ("content_type", "is_taken"),
    [
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("text/html", False),
        ("", False),
    ],
)
async def test_the_answers_type_decides(
    front: RunningGateway, scripted: ScriptEngine, content_type: str, is_taken: bool
) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.whole(b'{"text":"a"}', content_type=content_type)

    scripted.script = script
    answer = await call(front.address, "/generate", UNARY)
    if is_taken:
        assert (answer.status, answer.body) == (200, b'{"text":"a"}')
        assert answer.headers["content-type"] == content_type
    else:
        assert (answer.status, answer.json()["error"]["type"]) == (502, "engine_protocol")


@pytest.mark.parametrize(
    "junk", [b"HTTP/9 nonsense\r\n\r\n", b"\x00\x01\x02", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"]
)
async def test_what_is_no_http_is_a_bad_gateway(front: RunningGateway, scripted: ScriptEngine, junk: bytes) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.raw(junk)
        await reply.gone()

    scripted.script = script
    answer = await call(front.address, "/generate", UNARY)
    assert (answer.status, answer.json()["error"]["type"]) == (502, "engine_protocol")


@pytest.mark.parametrize(
    ("engine_status", "status", "type"), [(400, 400, None), (404, 404, None), (422, 422, None), (429, 429, None),
    (500, 502, "engine_error"), (503, 503, "unavailable"), (504, 503, "unavailable"), (302, 502, "engine_error"),
    (401, 502, "backend_auth"), (403, 502, "backend_auth")],
)  # fmt: skip
async def test_engine_statuses(
    front: RunningGateway, scripted: ScriptEngine, engine_status: int, status: int, type: str | None
) -> None:
    body = b'{"object":"error","message":"why","rid":"%b"}'

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.whole(body % request.rid.encode(), "X-Why: because", status=engine_status)

    scripted.script = script
    for path in ("/generate", "/v1/chat/completions"):
        for stream in (False, True):
            answer = await call(front.address, path, {"text": "a", "rid": "mine", "stream": stream})
            assert answer.status == status
            assert answer.headers["x-forebay-attempts"] == "1"
            if type is None:
                assert answer.body == body % b"mine"
                assert answer.headers["x-why"] == "because"
            else:
                assert error_of(answer.body)["type"] == type


# Headers.

SENT = {
    "Authorization": "Bearer client-key",
    "Cookie": "a=b",
    "Accept": "*/*",
    "Accept-Encoding": "gzip",
    "Traceparent": "00-1-2-01",
    "Tracestate": "x=y",
    "X-Request-Id": "mine",
    "X-SMG-Routing-Key": "key",
    "X-Session-Id": "session",
    "X-Sglext-Return-Input-Ids": "1",
    "X-Override-Rid": "evil",
    "X-Foo": "bar",
    "Forwarded": "for=1.2.3.4",
    "Expect-Nothing": "1",
}  # fmt: skip
RECEIVED = (
    "X-Foo: bar", "Set-Cookie: a=1", "Server-Timing: t;dur=1", "Request-Id: engine", "X-Request-Id: engine-own",
    "Server: uvicorn", "Date: yesterday", "Keep-Alive: timeout=5", "Connection: keep-alive, X-Hop", "X-Hop: 1",
    "Trailer: x", "Cache-Control: no-store",
)  # fmt: skip


@pytest.mark.parametrize("is_stream", [False, True])
async def test_headers_are_filtered_both_ways(front: RunningGateway, scripted: ScriptEngine, is_stream: bool) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        if is_stream:
            await reply.start_chunked(*RECEIVED)
            await reply.event(event("a", request.rid))
            await reply.event(DONE)
            await reply.end_chunked()
        else:
            await reply.whole(b'{"text":"a"}', *RECEIVED)

    scripted.script = script
    answer = await call(front.address, "/generate", {"text": "a", "stream": is_stream}, headers=SENT)
    seen = dict(scripted.requests[0].headers)
    assert len(seen) == len(scripted.requests[0].headers)
    assert seen.pop("content-length") == str(len(scripted.requests[0].body))
    assert seen == {
        "host": scripted.url.removeprefix("http://"),
        "content-type": "application/json",
        "accept": "text/event-stream" if is_stream else "application/json",
        "traceparent": "00-1-2-01",
        "tracestate": "x=y",
        "x-smg-routing-key": "key",
        "x-session-id": "session",
        "x-sglext-return-input-ids": "1",
    }
    got = dict(answer.headers)
    assert got.pop("date") != "yesterday"
    assert got.pop("transfer-encoding" if is_stream else "content-length")
    assert got == {
        "content-type": "text/event-stream" if is_stream else "application/json",
        "x-foo": "bar",
        "x-forebay-weight-version": "default",
        "set-cookie": "a=1",
        "server-timing": "t;dur=1",
        "request-id": "engine",
        "cache-control": "no-store",
        "x-request-id": "mine",
        "x-forebay-worker": front.gateway.settings.workers[0].url.removeprefix("http://"),
        "x-forebay-attempts": "1",
    }


async def test_a_worker_that_takes_no_connection_is_replaced_and_counted(scripted: ScriptEngine) -> None:
    async with script_engine() as dying, running_gateway(scripted.url, dying.url, health_interval_s=60) as front:
        await dying.stop()
        answers = [await call(front.address, "/generate", UNARY) for _ in range(40)]
        assert {answer.status for answer in answers} == {200}
        # One attempt shows that it is gone, and from then on nobody tries.
        assert [answer.headers["x-forebay-attempts"] for answer in answers].count("2") == 1
        assert {answer.headers["x-forebay-worker"] for answer in answers} == {scripted.url.removeprefix("http://")}
        replaced = next(record for record in front.records if record.attempts == 2)
        assert len(set(replaced.engine_ids)) == 2
        assert {record.outcome for record in front.records} == {"complete"}


async def test_a_break_behind_the_end_marker_changes_nothing(front: RunningGateway, scripted: ScriptEngine) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        await reply.event(event("a", request.rid))
        await _read_by_gateway()
        await reply.event(DONE)
        await _read_by_gateway()
        reply.reset()

    scripted.script = script
    answer = await call(front.address, "/generate", STREAM)
    assert answer.events() == [event("a"), DONE]
    assert (await front.record()).outcome == "complete"

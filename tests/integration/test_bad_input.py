"""What clients send that they should not: bodies, heads, framing. No worker sees what is refused."""

import asyncio
import json
from typing import Any

import pytest

from gateway.access_log import format_json, format_text
from gateway.protocol import MAX_HEAD_BYTES
from gateway.routes import ROUTES
from tests.fakes.running import RunningGateway, running_gateway, until
from tests.fakes.script_engine import Reply, ScriptEngine, SeenRequest
from tests.fakes.wire import Answer, call, request_bytes, wire

BODY = b'{"text":"a"}'
HEAD = b"POST /generate HTTP/1.1\r\nHost: g\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
ONE_CHUNK = b"c\r\n" + BODY + b"\r\n0\r\n\r\n"
PATHS = [path for path, route in ROUTES.items() if "POST" in route.methods]


async def take_anything(request: SeenRequest, reply: Reply) -> None:
    """Answer without a look at the request."""
    await reply.whole(b'{"text":"a"}')


def assert_refused(answer: Answer, status: int = 400) -> None:
    """A refusal in the gateway's shape."""
    assert answer.status == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "code", "param", "request_id"}
    assert error["code"] == status


# Bodies.

MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "white space": b" \r\n\t",
    "cut": b'{"text":"a"',
    "two values": b'{"text":"a"}{"text":"b"}',
    "trailing comma": b'{"text":"a",}',
    "trailing text": b'{"text":"a"} x',
    "single quotes": b"{'text':'a'}",
    "no quotes": b"{text:1}",
    "comment": b'{"text":"a"/*x*/}',
    "list": b"[1]",
    "string": b'"a"',
    "number": b"5",
    "null": b"null",
    "true": b"true",
    "NaN": b'{"text":"a","x":NaN}',
    "Infinity": b'{"text":"a","x":-Infinity}',
    "leading zero": b'{"text":"a","x":01}',
    "hexadecimal": b'{"text":"a","x":0x1}',
    "control character": b'{"text":"a\x01"}',
    "NUL": b"\x00",
    "half a surrogate": b'{"text":"\\ud800"}',
    "bad escape": b'{"text":"\\q"}',
    "byte order mark": b'\xef\xbb\xbf{"text":"a"}',
    "UTF-16": '{"text":"a"}'.encode("utf-16"),
    "key that is no string": b'{1:"a"}',
    "form": b"text=a&stream=false",
    "multipart": b'--x\r\nContent-Disposition: form-data; name="text"\r\n\r\na\r\n--x--\r\n',
    "nested lists": b'{"text":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "nested objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "unclosed lists": b"[" * 500_000,
    "twice the same key": b'{"rid":"a","rid":"b","text":"a","input":"a"}',
    "twice the same key, escaped": b'{"rid":"a","r\\u0069d":"b"}',
    "empty id": b'{"rid":""}',
    "long id": b'{"rid":"' + b"a" * 257 + b'"}',
    "id with a line break": b'{"rid":"a\\r\\nX-Evil: 1"}',
    "id with NUL": b'{"rid":"a\\u0000"}',
    "id that is a number": b'{"rid":5}',
    "id that is an object": b'{"rid":{}}',
    "model that is a number": b'{"model":5}',
    "model that is a list": b'{"model":["model"]}',
}


@pytest.mark.parametrize("name", list(MALFORMED))
async def test_malformed_bodies_are_refused_on_every_route(
    front: RunningGateway, scripted: ScriptEngine, name: str
) -> None:
    for path in PATHS:
        assert_refused(await call(front.address, path, MALFORMED[name]))
    assert scripted.requests == []
    assert {record.outcome for record in front.records} == {"rejected"}


async def test_an_unknown_model_is_404(front: RunningGateway, scripted: ScriptEngine) -> None:
    for model in ("", "x" * 100_000, "a\nb", "модель", "model\x00"):
        assert_refused(await call(front.address, "/v1/chat/completions", {"model": model}), 404)
    assert scripted.requests == []


OPAQUE: dict[str, bytes] = {
    "numbers beyond 64 bits": b'{"x":123456789012345678901234567890,"y":-1e400,"z":1.0000000000000000000001}',
    "wrong types": b'{"messages":5,"prompt":{},"input":null,"n":"many","sampling_params":[],"stream":"maybe"}',
    "other keys twice": b'{"x":1,"x":2}',
    "a huge key": b'{"' + b"k" * 1_000_000 + b'":1}',
    "many keys": b"{" + b",".join(b'"k%d":%d' % (number, number) for number in range(50_000)) + b"}",
    "nested a little": b'{"x":' + b"[" * 500 + b"]" * 500 + b"}",
    "an empty key": b'{"":1}',
    "bytes that are no text": b'{"x":"\xff\xfe"}',
    "a surrogate pair": b'{"x":"\\ud83d\\ude00"}',
    "an empty object": b"{}",
    "white space around": b' \n{ "x" : 1 }\r\n ',
    "a key that looks like a field": b'{"x":{"rid":"a","rid":"b","bootstrap_room":1}}',
}


@pytest.mark.parametrize("name", list(OPAQUE))
async def test_a2_14_what_is_the_engines_to_judge_reaches_it(
    front: RunningGateway, scripted: ScriptEngine, name: str
) -> None:
    scripted.script = take_anything
    body = OPAQUE[name]
    for path in ("/v1/messages", "/tokenize"):
        assert (await call(front.address, path, body)).status == 200
        assert scripted.requests[-1].body == body
    assert (await call(front.address, "/v1/chat/completions", body)).status == 200
    assert scripted.requests[-1].body.startswith(body.rstrip()[:-1])


@pytest.mark.parametrize(
    "given", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=x", ""]
)
async def test_a_bodys_type_is_the_engines_to_judge(front: RunningGateway, scripted: ScriptEngine, given: str) -> None:
    scripted.script = take_anything
    answer = await call(front.address, "/generate", BODY, headers={"Content-Type": given})
    assert answer.status == 200
    assert scripted.requests[0].header("content-type") == given


@pytest.mark.parametrize("rid", ["a" * 256, "ünïcödé 漢", "../../etc", '"quoted"', "a,b", "%0d%0a", "😀"])
async def test_odd_ids_come_back_as_they_are(front: RunningGateway, scripted: ScriptEngine, rid: str) -> None:
    answer = await call(front.address, "/generate", {"text": "a", "rid": rid})
    assert answer.json()["meta_info"]["id"] == rid
    assert answer.headers["x-request-id"].isascii()
    assert scripted.requests[0].rid != rid


@pytest.mark.parametrize("value", ["", "a" * 257, "a\tb", "x" * 40_000])
async def test_case_116_odd_id_headers_are_refused(front: RunningGateway, scripted: ScriptEngine, value: str) -> None:
    assert_refused(await call(front.address, "/generate", BODY, headers={"X-Request-Id": value}))
    assert scripted.requests == []
    assert len((await front.record()).request_id or "") <= 256


@pytest.mark.parametrize("value", ["", "-1", "abc", "1.5", "9" * 50, "0x1", "१", " "])
async def test_odd_ranks_are_refused(front: RunningGateway, scripted: ScriptEngine, value: str) -> None:
    raw = request_bytes("/generate", BODY, headers={"X-Data-Parallel-Rank": "RANK"}).replace(b"RANK", value.encode())
    async with wire(front.address) as connection:
        await connection.send(raw)
        answer = await connection.answer()
    assert_refused(answer)
    assert scripted.requests == []


# Heads and framing.

REFUSED_HEADS: dict[str, bytes] = {
    "length and chunks": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n" + ONE_CHUNK,
    "two lengths": HEAD + b"Content-Length: 12\r\nContent-Length: 5\r\n\r\n" + BODY,
    "the same length twice": HEAD + b"Content-Length: 12\r\nContent-Length: 12\r\n\r\n" + BODY,
    "list of lengths": HEAD + b"Content-Length: 12, 12\r\n\r\n" + BODY,
    "length with a sign": HEAD + b"Content-Length: +12\r\n\r\n" + BODY,
    "negative length": HEAD + b"Content-Length: -12\r\n\r\n" + BODY,
    "hexadecimal length": HEAD + b"Content-Length: 0xc\r\n\r\n" + BODY,
    "length beyond 64 bits": HEAD + b"Content-Length: 99999999999999999999999999\r\n\r\n" + BODY,
    "empty length": HEAD + b"Content-Length: \r\n\r\n" + BODY,
    "folded header": HEAD + b"X: a\r\n b\r\nContent-Length: 12\r\n\r\n" + BODY,
    "folded length": HEAD + b"Content-Length: 1\r\n 2\r\n\r\n" + BODY,
    "folded coding": HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + ONE_CHUNK,
    "space before the colon": HEAD + b"Content-Length : 12\r\n\r\n" + BODY,
    "space before the coding's colon": HEAD + b"Transfer-Encoding : chunked\r\n\r\n" + ONE_CHUNK,
    "unknown coding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n" + ONE_CHUNK,
    "identity": HEAD + b"Transfer-Encoding: identity\r\n\r\n" + ONE_CHUNK,
    "chunked not last": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n" + ONE_CHUNK,
    "two codings": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n" + ONE_CHUNK,
    "coding behind a control character": HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + ONE_CHUNK,
    "compressed": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + ONE_CHUNK,
    "chunk size with a prefix": CHUNKED + b"0xc\r\n" + BODY + b"\r\n0\r\n\r\n",
    "negative chunk size": CHUNKED + b"-c\r\n" + BODY + b"\r\n0\r\n\r\n",
    "empty chunk size": CHUNKED + b"\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk size beyond 64 bits": CHUNKED + b"f" * 20 + b"\r\n" + BODY,
    "chunk longer than its size": CHUNKED + b"5\r\n" + BODY + b"\r\n0\r\n\r\n",
    "length in a trailer": CHUNKED + b"c\r\n" + BODY + b"\r\n0\r\nContent-Length: 5\r\n\r\n",
    "line feeds in chunks": CHUNKED + b"c\n" + BODY + b"\n0\n\n",
    "line feeds alone": b"POST /generate HTTP/1.1\nHost: g\nContent-Length: 12\n\n" + BODY,
    "carriage returns alone": b"POST /generate HTTP/1.1\rHost: g\rContent-Length: 12\r\r" + BODY,
    "NUL in a header": HEAD + b"X: a\x00b\r\nContent-Length: 12\r\n\r\n" + BODY,
    "carriage return in a header": HEAD + b"X: a\rb\r\nContent-Length: 12\r\n\r\n" + BODY,
    "header without a name": HEAD + b": x\r\nContent-Length: 12\r\n\r\n" + BODY,
    "header without a colon": HEAD + b"nonsense\r\nContent-Length: 12\r\n\r\n" + BODY,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/9.9": b"POST /generate HTTP/9.9\r\nHost: g\r\nContent-Length: 12\r\n\r\n" + BODY,
    "lower-case method": b"post /generate HTTP/1.1\r\nHost: g\r\nContent-Length: 12\r\n\r\n" + BODY,
    "CONNECT": b"CONNECT evil:443 HTTP/1.1\r\nHost: g\r\n\r\n",
    "space in the path": b"POST /gen erate HTTP/1.1\r\nHost: g\r\nContent-Length: 12\r\n\r\n" + BODY,
    "bytes in the path": b"POST /g\xc3\xa9\xff HTTP/1.1\r\nHost: g\r\nContent-Length: 12\r\n\r\n" + BODY,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "noise": b"\x00\x01\x02\r\n\r\n",
}


@pytest.mark.parametrize("name", list(REFUSED_HEADS))
async def test_what_is_no_request_is_answered_once_and_smuggles_nothing(
    front: RunningGateway, scripted: ScriptEngine, name: str
) -> None:
    async with wire(front.address) as connection:
        await connection.send(REFUSED_HEADS[name] + request_bytes("/generate", BODY))
        assert_refused(await connection.answer())
        if name != "compressed":  # its framing is plain, so what follows is a request
            assert await connection.is_closed()
            assert scripted.requests == []
    assert len(scripted.requests) <= 1


ODD_HEADS: dict[str, tuple[bytes, int]] = {
    "chunk extensions": (CHUNKED + b"c;a=b\r\n" + BODY + b"\r\n0\r\n\r\n", 200),
    "a target with a host": (b"POST http://x/generate HTTP/1.1\r\nHost: g\r\nContent-Length: 12\r\n\r\n" + BODY, 200),
    "an escaped path": (b"POST /%67enerate HTTP/1.1\r\nHost: g\r\nContent-Length: 12\r\n\r\n" + BODY, 200),
    "a path that is none": (b"POST /%zz%ff%00 HTTP/1.1\r\nHost: g\r\nContent-Length: 12\r\n\r\n" + BODY, 404),
    "two slashes": (b"POST //generate HTTP/1.1\r\nHost: g\r\nContent-Length: 12\r\n\r\n" + BODY, 404),
    "dots": (b"POST /x/../generate HTTP/1.1\r\nHost: g\r\nContent-Length: 12\r\n\r\n" + BODY, 404),
    "TRACE": (b"TRACE /generate HTTP/1.1\r\nHost: g\r\n\r\n", 405),
    "an unknown expectation": (HEAD + b"Expect: nonsense\r\nContent-Length: 12\r\n\r\n" + BODY, 200),
    "HTTP/2 as a wish": (
        HEAD + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nContent-Length: 12\r\n\r\n" + BODY, 200),
    "HTTP/2 as a wish, in chunks": (
        HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: chunked\r\n\r\n" + ONE_CHUNK, 200),
    "a web socket": (
        b"GET /generate HTTP/1.1\r\nHost: g\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 405),
    "thousands of headers": (
        HEAD + b"".join(b"X-%d: a\r\n" % number for number in range(4000)) + b"Content-Length: 12\r\n\r\n" + BODY, 200),
}  # fmt: skip


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("name", list(ODD_HEADS))
async def test_odd_requests_are_still_requests(
    front: RunningGateway, scripted: ScriptEngine, name: str, at_once: bool
) -> None:
    raw, status = ODD_HEADS[name]
    async with wire(front.address) as connection:
        if at_once:
            await connection.send(raw + request_bytes("/generate", {"text": "next"}))
            assert (await connection.answer()).status == status
        else:
            head, _, body = raw.partition(b"\r\n\r\n")
            for part in (head[:30], head[30:] + b"\r\n\r\n", body[:5], body[5:]):
                await connection.send(part)
                await asyncio.sleep(0.001)  # so that the parts are read one by one
            assert (await connection.answer()).status == status
            await connection.send(request_bytes("/generate", {"text": "next"}))
        assert (await connection.answer()).json()["echo"]["text"] == "next"
    assert len(scripted.requests) == 1 + (status == 200)


@pytest.mark.parametrize("size", [8 * MAX_HEAD_BYTES, 1_000_000, 20_000_000])
async def test_heads_without_measure_are_431_which_the_client_can_read(
    front: RunningGateway, scripted: ScriptEngine, size: int
) -> None:
    async with wire(front.address) as connection:
        await connection.send(HEAD + b"X: " + b"a" * size + b"\r\nContent-Length: 12\r\n\r\n" + BODY)
        answer = await connection.answer()
        assert_refused(answer, 431)
        assert answer.headers["connection"] == "close"
        assert await connection.is_closed()
    assert scripted.requests == []


async def test_a_head_without_end_is_bounded(front: RunningGateway, scripted: ScriptEngine) -> None:
    async with wire(front.address) as connection:
        await connection.send(HEAD + b"X: a\r\n" * 20_000)
        assert_refused(await connection.answer(), 431)
        assert await connection.is_closed()


async def test_nonsense_behind_a_request_never_gets_into_its_answer(
    front: RunningGateway, scripted: ScriptEngine
) -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        await reply.event(b'{"text":"a"}')
        begun.set()
        await goes_on.wait()
        await reply.event(b"[DONE]")
        await reply.end_chunked()

    scripted.script = script
    async with wire(front.address) as connection:
        await connection.send(request_bytes("/generate", {"text": "a", "stream": True}))
        status, headers = await connection.head()
        await begun.wait()
        await connection.send(b"\x00 nonsense\r\n\r\n")
        goes_on.set()
        answer = await connection.body(status, headers)
        assert (status, answer.is_whole, answer.events()[-1]) == (200, True, b"[DONE]")
        assert await connection.is_closed()
    assert (await front.record()).outcome == "complete"


@pytest.mark.parametrize(("length", "status"), [(-1, 400), (0, 200)], ids=["length in characters", "a rest"])
async def test_what_comes_behind_a_request_leaves_it_its_answer(
    front: RunningGateway, scripted: ScriptEngine, length: int, status: int
) -> None:
    """Clients have been seen that give a body's length in characters, and ones that add a line break."""
    body = '{"text":"a\u00e9"}'.encode()
    async with wire(front.address) as connection:
        head = HEAD + b"Content-Length: %d\r\n\r\n" % (len(body) + length)
        await connection.send(head + body + (b"xx" if not length else b""))
        answer = await connection.answer()
        assert (answer.status, answer.is_whole, answer.headers["connection"]) == (status, True, "close")
        assert await connection.is_closed()
    record = await front.record()
    assert (record.status, record.bytes_out) == (status, len(answer.body))
    assert len(scripted.requests) == (status == 200)


# Bodies without end.


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_case_110_a_body_above_the_limit_is_413(scripted: ScriptEngine, is_chunked: bool) -> None:
    async with running_gateway(scripted.url, max_body_bytes=10_000) as front:
        for path in ("/generate", "/v1/messages"):
            async with wire(front.address) as connection:
                if is_chunked:
                    await connection.send(HEAD.replace(b"/generate", path.encode()))
                    await connection.send(b"Transfer-Encoding: chunked\r\n\r\n")
                    for _ in range(20):
                        await connection.send(b"400\r\n" + b" " * 1024 + b"\r\n")
                else:
                    await connection.send(request_bytes(path, b" " * 10_001))
                answer = await connection.answer()
                assert_refused(answer, 413)
                assert "10000" in answer.json()["error"]["message"]
    assert scripted.requests == []


@pytest.mark.parametrize("framing", ["length", "chunked", "head"])
async def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing(
    front: RunningGateway, scripted: ScriptEngine, framing: str
) -> None:
    start = {
        "length": HEAD + b"Content-Length: 1000000\r\n\r\n" + b" " * 70_000,
        "chunked": CHUNKED + b"fffff\r\n" + b" " * 70_000,
        "head": HEAD + b"X: ",
    }[framing]
    async with wire(front.address) as connection:
        await connection.send(start)
        if framing != "head":
            await until(lambda: front.state()["in_flight_requests"] == 1, "the request has begun")
        connection.reset()
    await front.settle()
    await until(lambda: not front.server.server_state.connections, "no connections")
    assert scripted.requests == []
    if framing != "head":
        record = await front.record()
        assert (record.outcome, record.status) == ("client_closed", 499)


# The log.

EVIL = 'x" status=200 outcome=complete\r\n2026 time=1 method=GET \x1b[31m\u2028'


@pytest.mark.parametrize("fields", [{"model": EVIL}, {"rid": EVIL}, {"text": EVIL, "bootstrap_room": EVIL}, {EVIL: 1}])
async def test_log_lines_are_never_forged(
    front: RunningGateway, scripted: ScriptEngine, fields: dict[str, Any]
) -> None:
    await call(front.address, "/generate", {"text": "a", **fields})
    path = "/generate%0d%0atime=1%20status=200%22"
    await call(front.address, path, BODY)
    await call(front.address, "/generate", BODY, headers={"X-Request-Id": 'a" status=200 outcome="complete'})
    for record in front.records:
        line = format_text(record)
        assert line.count(b"\n") == 1
        assert line.endswith(b"\n")
        assert line.isascii()
        assert b"\x1b" not in line
        assert b"\r" not in line
        # Outside of quoted values each key stands once.
        bare = _without_quoted(line.decode())
        assert bare.count(" status=") == bare.count(" outcome=") == 1
        parsed = json.loads(format_json(record))
        assert parsed["outcome"] == record.outcome
        assert format_json(record).count(b"\n") == 1


def _without_quoted(line: str) -> str:
    """The line without its quoted values."""
    kept, inside, escaped = [], False, False
    for character in line:
        if not inside:
            kept.append(character)
            inside = character == '"'
        elif escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == '"':
            inside = False
    return "".join(kept)

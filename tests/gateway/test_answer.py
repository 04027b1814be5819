"""Answers on their way to the client: headers, first events, verdicts, and that no cut makes a difference."""

import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backends.errors import AnswerTooLarge
from backends.upstream.base import AnswerHead, Headers
from gateway.answer import (
    BodyAnswer,
    StreamAnswer,
    Usage,
    Verdict,
    first_data,
    passed_headers,
    unary_verdict,
)
from gateway.engine_errors import engine_message, refusal_in
from gateway.errors import MAX_ENGINE_TEXT_CHARS
from gateway.ids import SingleId
from gateway.outcome import Outcome
from gateway.routes import LAST_EVENTS, Dialect
from tests.fakes.replay_engine import captured_answer
from tests.simulator.wire import load_capture

ENGINE = "0a1b2c3d4e5f60718293a4b5c6d7e8f0"
DONE = b"data: [DONE]\n\n"


def body_of(name: str) -> bytes:
    """The body of a captured answer."""
    answer = captured_answer(load_capture(name))
    assert answer is not None
    return answer.body


# Headers.


@pytest.mark.parametrize(
    ("headers", "passed"),
    [
        pytest.param([(b"content-type", b"a"), (b"x-a", b"1"), (b"x-a", b"2")], [0, 1, 2], id="all of them"),
        pytest.param([(b"server", b"uvicorn"), (b"date", b"now"), (b"x-request-id", b"e"), (b"vary", b"Origin")], [3],
                     id="not what is ours to say"),
        pytest.param([(b"content-length", b"5"), (b"transfer-encoding", b"chunked"), (b"trailer", b"x")], [],
                     id="not the framing"),
        pytest.param([(b"connection", b"close, X-Hop"), (b"x-hop", b"1"), (b"keep-alive", b"5"), (b"x-b", b"1")], [3],
                     id="not what Connection names"),
        pytest.param([(b"te", b"1"), (b"upgrade", b"1"), (b"proxy-connection", b"1"), (b"proxy-authenticate", b"1")],
                     [], id="nothing hop by hop"),
        pytest.param([], [], id="none"),
    ],
)  # fmt: skip
def test_passed_headers(headers: Headers, passed: list[int]) -> None:
    assert passed_headers(AnswerHead(200, headers, None, "")) == [headers[index] for index in passed]


# First events.


@pytest.mark.parametrize(
    ("data", "status", "kind", "message", "is_own_body"),
    [
        pytest.param(b'{"error":{"message":"bad","type":"x","code":400,"retryable":false}}', 400, "invalid_request",
                     "bad", True, id="value error in a stream"),
        pytest.param(b'{"error": {"message": "full", "code": 429}}', 429, "invalid_request", "full", True, id="429"),
        pytest.param(b'{"error":{"message":"no","code":"404"}}', 404, "invalid_request", "no", True, id="a string"),
        pytest.param(b'{"error":{"message":"no","code":"bad_request"}}', 502, "engine_error", "no", False, id="name"),
        pytest.param(b'{"error":{"message":null,"code":400}}', 400, "invalid_request", "", True, id="no words"),
        pytest.param(b'{"error":{"code":500}}', 502, "engine_error", "the engine answered with status 500", False,
                     id="500"),
        pytest.param(b'{"error":{"message":"x","code":200}}', 502, "engine_error", "x", False, id="no error's code"),
        pytest.param(b'{"error":{"message":"x"}}', 502, "engine_error", "x", False, id="no code"),
        pytest.param(b'{"error":"unknown field"}', 502, "engine_error", "unknown field", False, id="plain words"),
        pytest.param(b'{"error": {"message": "The request queue is full.", "type": "X", "code": 503}}',
                     503, "overloaded", "The request queue is full.", False, id="queue full"),
        pytest.param(b'{"meta_info":{"finish_reason":{"type":"abort","message":"m","status_code":400}}}', 400,
                     "invalid_request", "m", False, id="a3_14 abort with a status"),
        pytest.param(b'{"meta_info":{"finish_reason":{"type":"abort","message":null,"status_code":503}}}', 503,
                     "unavailable", "the engine answered with status 503", False, id="a3_14 abort with 503"),
    ],
)  # fmt: skip
def test_a_first_event_that_refuses(data: bytes, status: int, kind: str, message: str, is_own_body: bool) -> None:
    refusal = refusal_in(data)
    assert refusal is not None
    assert (refusal.report.status, refusal.report.type, refusal.report.message) == (status, kind, message)
    assert refusal.body == (data if is_own_body else None)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b'{"text":"a","meta_info":{"finish_reason":null}}', id="a chunk"),
        pytest.param(b'{"meta_info":{"finish_reason":{"type":"abort","message":"Aborted","status_code":null}}}',
                     id="a3_14 an abort without a status"),
        pytest.param(b'{"meta_info":{"finish_reason":{"type":"length","status_code":400}}}', id="no abort"),
        pytest.param(b'{"text":"\\"error\\" \\"status_code\\":400","meta_info":{}}', id="in the text"),
        pytest.param(b'{"a":"error","error":null}', id="error null"),
        pytest.param(b'{"error":[1]}', id="error of another shape"),
        pytest.param(b'{"error":{', id="no JSON"),
        pytest.param(b'{"x":"\xff","error":1}', id="no UTF-8"),
        pytest.param(b"[DONE]", id="done"),
        pytest.param(b"", id="nothing"),
        pytest.param(b'{"x":{"status_code":500}}', id="status elsewhere"),
    ],
)  # fmt: skip
def test_a_first_event_that_does_not(data: bytes) -> None:
    assert refusal_in(data) is None


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("http/gen_stream_err_temp", 400),
        ("http/gen_stream_err_schema", 400),
        ("http/gen_stream_err_toolong", 400),
        ("http/gen_stream_err_batchmixed", 400),
        ("http_dp2/queue_5_chatstream", 503),
        ("http_pd/prefill_orphan_stream_abort", 502),
        ("http/gen_stream_text", None),
        ("http/abort_stream_0", None),
    ],
)
def test_captured_first_events(name: str, status: int | None) -> None:
    refusal = refusal_in(first_data(body_of(name)))
    assert (refusal.report.status if refusal else None) == status


def test_texts_of_refusals_are_bounded() -> None:
    long = json.dumps({"error": {"message": "x" * 100_000, "code": 400}}, separators=(",", ":")).encode()
    refusal = refusal_in(long)
    assert refusal is not None
    assert len(refusal.report.message) == MAX_ENGINE_TEXT_CHARS


@pytest.mark.parametrize(
    ("block", "data"),
    [
        (b": ping\n\n: ping\n\n", b""),
        (b": ping\n\ndata: a\n\ndata: b\n\n", b"a"),
        (b"", b""),
        (b"event: e\ndata: x\n\n", b"x"),
    ],
)
def test_first_data(block: bytes, data: bytes) -> None:
    assert first_data(block) == data


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param(b'{"error":{"message":"nested","code":400}}', "nested", id="nested"),
        pytest.param(b'{"error":"string"}', "string", id="schema gate"),
        pytest.param(b'{"object":"error","message":"flat","code":400}', "flat", id="flat"),
        pytest.param(b'{"detail":"Not Found"}', "Not Found", id="detail"),
        pytest.param(b'{"error":{"message":null},"message":"flat"}', "flat", id="null beside words"),
        pytest.param(b'{"detail":[{"msg":"x"}]}', '{"detail":[{"msg":"x"}]}', id="detail of another shape"),
        pytest.param(b"Flush cache failed.", "Flush cache failed.", id="plain text"),
        pytest.param(b"\xff", "\ufffd", id="no UTF-8"),
        pytest.param(b"{}", "", id="nothing"),
        pytest.param(b"", "", id="empty"),
        pytest.param(b'{"error":"%b"}' % (b"x" * 9000), "x" * 8192, id="long"),
        pytest.param(b"y" * 9000, "y" * 8192, id="long text"),
    ],
)
def test_engine_messages(body: bytes, message: str) -> None:
    assert engine_message(body) == message


# Streams.


def verdict_of(pieces: list[bytes], *, was_aborted: bool = False) -> tuple[bytes, Verdict]:
    """What passes of a stream, and the verdict on it."""
    answer = StreamAnswer(SingleId(ENGINE, "public"), 1 << 30)
    out = b"".join(answer.feed(piece) for piece in pieces)
    assert answer.bytes_in == sum(map(len, pieces))
    return out, answer.verdict(was_aborted=was_aborted)


CHUNK = (
    b'data: {"text":"a","meta_info":{"id":"%b","finish_reason":null,"prompt_tokens":6,"completion_tokens":1}}\n\n'
    % (ENGINE.encode())
)
LAST = (
    b'data: {"meta_info":{"id":"%b","finish_reason":{"type":"length"},"prompt_tokens":6,"completion_tokens":2}}\n\n'
    % (ENGINE.encode())
)
ABORTED = LAST.replace(b'"length"', b'"abort","message":"Aborted","status_code":null')
USAGE = Usage(6, 2)


ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
TEXT = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}\n\n'
NO_TOKENS = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":0}}\n\n'
UNFINISHED = "the engine ended its stream without a finish reason"


@pytest.mark.parametrize(
    ("wire", "was_aborted", "outcome", "is_terminated", "usage", "message"),
    [
        pytest.param(CHUNK + LAST + DONE, False, Outcome.COMPLETE, True, USAGE, "", id="complete"),
        pytest.param(CHUNK + LAST + DONE, True, Outcome.COMPLETE, True, USAGE, "", id="complete before the abort"),
        pytest.param(CHUNK + ABORTED + DONE, True, Outcome.ABORTED, True, USAGE, "", id="abort finish"),
        pytest.param(CHUNK + ABORTED + DONE, False, Outcome.ABORTED, True, USAGE, "", id="somebody else's abort"),
        pytest.param(CHUNK + ABORTED.replace(b":null}", b":500}") + DONE, False, Outcome.ENGINE_ERROR, True, USAGE, "",
                     id="abort finish with 500"),
        pytest.param(CHUNK + ABORTED.replace(b":null}", b":400}") + DONE, False, Outcome.REJECTED, True, USAGE, "",
                     id="abort finish with 400"),
        pytest.param(ABORTED + LAST + DONE, False, Outcome.ABORTED, True, USAGE, "", id="one item was aborted"),
        pytest.param(b'data: {"choices":[{"finish_reason":"abort"}]}\n\n' + DONE, True, Outcome.ABORTED, True, Usage(),
                     "", id="abort finish of a chat"),
        pytest.param(DONE, True, Outcome.ABORTED, True, Usage(), "", id="[DONE] alone after our abort"),
        pytest.param(b": ping\n\n" + DONE, True, Outcome.ABORTED, True, Usage(), "", id="[DONE] and comments"),
        pytest.param(DONE, False, Outcome.ABORTED, True, Usage(), "", id="[DONE] alone"),
        pytest.param(ROLE + DONE, False, Outcome.ABORTED, True, Usage(), "", id="[DONE] behind a role"),
        pytest.param(ROLE + b": ping\n\n" + NO_TOKENS + DONE, False, Outcome.ABORTED, True, Usage(5, 0), "",
                     id="[DONE] behind a role and usage"),
        pytest.param(NO_TOKENS + DONE, True, Outcome.ABORTED, True, Usage(5, 0), "", id="usage alone after our abort"),
        pytest.param(ROLE + TEXT + DONE, False, Outcome.TRUNCATED, True, Usage(), UNFINISHED, id="behind a text"),
        pytest.param(TEXT + ROLE * 2 + DONE, False, Outcome.TRUNCATED, True, Usage(), UNFINISHED, id="further behind"),
        pytest.param(CHUNK + DONE, False, Outcome.TRUNCATED, True, Usage(6, 1), UNFINISHED, id="[DONE] natively"),
        pytest.param(CHUNK + b'data: {"error": {"message": "oom", "code": 500}}\n\n' + DONE, False,
                     Outcome.ENGINE_ERROR, True, Usage(), "oom", id="error event"),
        pytest.param(b'data: {"error":"first"}\n\n' + CHUNK + DONE, False, Outcome.ENGINE_ERROR, True, Usage(6, 1),
                     "first", id="error event before others"),
        pytest.param(CHUNK + b'data: {"error":{"message":"oom"}}\n\n', False, Outcome.ENGINE_ERROR, False, Usage(),
                     "oom", id="error event without an end"),
        pytest.param(CHUNK + LAST, False, Outcome.TRUNCATED, False, USAGE,
                     "the engine's stream ended without its end marker", id="no end marker"),
        pytest.param(CHUNK + LAST + DONE[:-1], False, Outcome.TRUNCATED, False, USAGE,
                     "the engine's stream ended without its end marker", id="cut end marker"),
        pytest.param(b"", False, Outcome.TRUNCATED, False, Usage(),
                     "the engine's stream ended without its end marker", id="nothing"),
        pytest.param((CHUNK + LAST + DONE).replace(b"\n", b"\r\n"), False, Outcome.COMPLETE, True, USAGE, "",
                     id="CRLF"),
        pytest.param(CHUNK + LAST + b"data:[DONE]\n\n", False, Outcome.COMPLETE, True, USAGE, "", id="no space"),
        pytest.param(CHUNK + LAST + b": ping\n\n" + DONE + b": bye\n\n", False, Outcome.COMPLETE, True, USAGE, "",
                     id="comments around the end"),
        pytest.param(CHUNK.replace(b'"a"', b'"[DONE]"') + LAST.replace(b"}}\n", b',"x":"[DONE]"}}\n'), False,
                     Outcome.TRUNCATED, False, USAGE, "the engine's stream ended without its end marker",
                     id="the end marker's text in a text"),
        pytest.param(b'data: {"text":"data: {\\"error\\" \\"type\\":\\"abort\\""}\n\n' + DONE, False, Outcome.COMPLETE,
                     True, Usage(), "", id="a text that looks like trouble"),
    ],
)  # fmt: skip
def test_verdicts_on_streams(
    wire: bytes, was_aborted: bool, outcome: Outcome, is_terminated: bool, usage: Usage, message: str
) -> None:
    expected = Verdict(outcome, is_terminated, usage, message)
    out, verdict = verdict_of([wire], was_aborted=was_aborted)
    assert verdict == expected
    assert wire.replace(ENGINE.encode(), b"public").startswith(out)
    for at in range(len(wire)):
        assert verdict_of([wire[:at], wire[at:]], was_aborted=was_aborted) == (out, expected), at
    assert verdict_of([wire[at : at + 1] for at in range(len(wire))], was_aborted=was_aborted) == (out, expected)


def test_a2_16_a_stream_of_three_chunks_at_every_cut() -> None:
    wire = CHUNK + CHUNK + LAST + DONE
    whole = wire.replace(ENGINE.encode(), b"public")
    for at in range(len(wire) + 1):
        assert verdict_of([wire[:at], wire[at:]])[0] == whole


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("http/gen_stream_text", Outcome.COMPLETE),
        ("http/gen_stream_batch2", Outcome.COMPLETE),
        ("http/abort_stream_0", Outcome.ABORTED),
        ("http_dp2/incr_abort", Outcome.ABORTED),
        ("http/chat_stream_usage", Outcome.COMPLETE),
        ("http_pd/prefill_orphan_stream_abort", Outcome.ENGINE_ERROR),
    ],
)
def test_captured_streams(name: str, outcome: Outcome) -> None:
    body = body_of(name)
    if b"...[cut" in body or b"(cut here)" in body:
        body = body[body.rindex(b"data: {") :]
    _, verdict = verdict_of([body])
    assert (verdict.outcome, verdict.is_terminated) == (outcome, True)


def test_events_are_counted_and_bounded() -> None:
    answer = StreamAnswer(SingleId(ENGINE, "public"), len(CHUNK))
    answer.feed(CHUNK * 3 + CHUNK[:10])
    assert answer.events_seen == 3
    answer.feed(CHUNK[10:])
    assert answer.events_seen == 4
    with pytest.raises(AnswerTooLarge):
        answer.feed(CHUNK[:-2] + b"more" + CHUNK[-2:])


# Bodies.

UNARY = (
    b'{"text":"a","meta_info":{"id":"%b","finish_reason":{"type":"length","length":3},"prompt_tokens":6,'
    b'"reasoning_tokens":0,"completion_tokens":31,"cached_tokens":4,"cached_tokens_details":{"device":4}}}'
    % ENGINE.encode()
)
OPENAI = (
    b'{"choices":[{"finish_reason":"stop","meta_info":{"prompt_tokens":6,"completion_tokens":3}}],'
    b'"usage":{"prompt_tokens":6,"total_tokens":9,"completion_tokens":3,"prompt_tokens_details":null}}'
)
BODIES = {
    "single": (UNARY, Verdict(Outcome.COMPLETE, True, Usage(6, 31, 4))),
    "batch": (b"[" + UNARY + b"," + UNARY + b"]", Verdict(Outcome.COMPLETE, True, Usage(12, 62, 8))),
    "aborted": (UNARY.replace(b'"length",', b'"abort",'), Verdict(Outcome.ABORTED, True, Usage(6, 31, 4))),
    "chat": (OPENAI, Verdict(Outcome.COMPLETE, True, Usage(6, 3))),
    "aborted chat": (OPENAI.replace(b'"stop"', b'"abort"'), Verdict(Outcome.ABORTED, True, Usage(6, 3))),
    "counts at the end": (b'{"x":1,"completion_tokens":12', Verdict(Outcome.COMPLETE, True, Usage(None, 12))),
    "other tokens": (b'{"image_tokens":1,"x_tokens":2,"xprompt_tokens":3}', Verdict(Outcome.COMPLETE, True, Usage())),
    "no counts": (b"{}", Verdict(Outcome.COMPLETE, True, Usage())),
}


def through(pieces: list[bytes]) -> tuple[bytes, Verdict]:
    """A long body's way through the gateway."""
    answer = BodyAnswer(SingleId(ENGINE, "public"))
    out = [answer.feed(piece) for piece in pieces]
    out.append(answer.end())
    assert answer.bytes_in == sum(map(len, pieces))
    return b"".join(out), answer.verdict()


@pytest.mark.parametrize(("body", "verdict"), BODIES.values(), ids=BODIES)
def test_verdicts_on_bodies_do_not_depend_on_cuts(body: bytes, verdict: Verdict) -> None:
    assert unary_verdict(body) == verdict
    expected = (body.replace(ENGINE.encode(), b"public"), verdict)
    for at in range(len(body) + 1):
        assert through([body[:at], body[at:]]) == expected, at
    assert through([body[at : at + 1] for at in range(len(body))]) == expected


@given(st.sampled_from(sorted(BODIES)), st.lists(st.integers(0, 500), max_size=10))
@example("batch", [40, 40, 250, 260])
def test_nor_on_many(name: str, at: list[int]) -> None:
    body, verdict = BODIES[name]
    bounds = [0, *sorted(min(one, len(body)) for one in at), len(body)]
    pieces = [body[begin:end] for begin, end in pairwise(bounds)]
    assert through(pieces) == (body.replace(ENGINE.encode(), b"public"), verdict)


@pytest.mark.parametrize(("body", "verdict"), BODIES.values(), ids=BODIES)
def test_nor_on_long_runs_without_a_quote_before_and_after(body: bytes, verdict: Verdict) -> None:
    run = b",1234567,-0.5" * 400
    expected = (run + body.replace(ENGINE.encode(), b"public") + run, verdict)
    for at in range(len(body) + 1):
        assert through([run + body[:at], body[at:] + run]) == expected, at
        assert through([run, body[:at], body[at:], run]) == expected, at


@pytest.mark.parametrize(
    ("name", "outcome", "usage"),
    [
        ("http/gen_text", Outcome.COMPLETE, Usage(6, 8, 4)),
        ("http/gen_batch2", Outcome.COMPLETE, Usage(8, 6, 4)),
        ("http/chat_unary", Outcome.COMPLETE, None),
        ("http/comp_n2", Outcome.COMPLETE, Usage(6, 8)),
        ("http/abort_unary_0", Outcome.ABORTED, None),
    ],
)
def test_captured_bodies(name: str, outcome: Outcome, usage: Usage | None) -> None:
    body = body_of(name)
    verdict = unary_verdict(body)
    assert verdict.outcome is outcome
    assert through([body])[1] == verdict
    if usage is not None:
        assert verdict.usage.prompt_tokens == usage.prompt_tokens


def test_nothing_follows_the_last_event_of_a_stream_that_has_one() -> None:
    answer = StreamAnswer(SingleId("e" * 32, "p"), 1000, LAST_EVENTS[Dialect.MESSAGES])
    end = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    assert answer.feed(end + b'data: {"x":1}\n\n') == end
    assert answer.feed(b'data: {"y":1}\n\n') == b""
    verdict = answer.verdict(was_aborted=False)
    assert (verdict.outcome, verdict.is_terminated) == (Outcome.COMPLETE, True)

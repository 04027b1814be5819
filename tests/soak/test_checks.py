"""The soak's own checks: each of them finds what it is there for."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gateway.routes import ROUTES
from tests.fakes.wire import Answer
from tests.soak.answers import Kind, read_answer
from tests.soak.audit import audit_access, audit_log, audit_metrics, audit_texts
from tests.soak.bodies import ASKS, Ask
from tests.soak.client import Story
from tests.soak.plan import Leave, Manner, Plan, plan
from tests.soak.run import JUDGED_FROM, MAX_GROWTH_BYTES, Report

PLAN = Plan(1, "soak-1-1", ROUTES["/v1/chat/completions"], b"", 0, True, Ask({}, 1), "key")
MESSAGES = replace(PLAN, route=ROUTES["/v1/messages"])
DONE = b"data: [DONE]\n\n"
ERROR: Any = {"error": {"message": "m", "type": "t", "code": 502, "param": None, "request_id": PLAN.id}}
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


def event(payload: Any) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def chunk(text: str, reason: str | None = None, id: str = PLAN.id) -> bytes:
    return event({"id": id, "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]})


def streamed(body: bytes, *, is_whole: bool = True) -> Answer:
    headers = {"x-request-id": PLAN.id, "content-type": "text/event-stream"}
    return Answer(200, headers, body, [], is_whole)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        pytest.param(chunk("a") + chunk("b", "length") + DONE, Kind.WHOLE, id="whole"),
        pytest.param(chunk("a", "abort") + DONE, Kind.STOPPED, id="stopped"),
        pytest.param(DONE, Kind.STOPPED, id="stopped before the first event"),
        pytest.param(chunk("a") + event(ERROR) + DONE, Kind.ERROR, id="an error"),
    ],
)
def test_good_streams(body: bytes, kind: Kind) -> None:
    reading = read_answer(PLAN, streamed(body))
    assert (reading.kind, reading.complaints) == (kind, [])
    assert reading.texts == (("ab",) if kind is Kind.WHOLE else ())


@pytest.mark.parametrize(
    ("plan", "body"),
    [
        pytest.param(PLAN, chunk("a", "length"), id="no end marker"),
        pytest.param(PLAN, chunk("a", "length") + DONE + DONE, id="two end markers"),
        pytest.param(PLAN, chunk("a") + DONE, id="no finish reason"),
        pytest.param(PLAN, chunk("a", "length") + DONE[:-1], id="half an event"),
        pytest.param(PLAN, event(ERROR) + chunk("a", "length") + DONE, id="an answer behind an error"),
        pytest.param(PLAN, chunk("a", "length", id="0" * 32).replace(b'": ', b'":') + DONE, id="an engine's id"),
        pytest.param(replace(PLAN, ask=Ask({}, 2)), chunk("a", "length") + DONE, id="a choice is missing"),
        pytest.param(MESSAGES, event({"type": "message_start"}), id="no last event"),
        pytest.param(MESSAGES, STOP + STOP, id="two last events"),
    ],
)
def test_bad_streams(plan: Plan, body: bytes) -> None:
    assert read_answer(plan, streamed(body)).complaints


@pytest.mark.parametrize(("wrong", "is_good"), [("no prompt", True), ("broken JSON", False)])
def test_a_fault_may_answer_what_only_engines_refuse(wrong: str, is_good: bool) -> None:
    headers = {"x-request-id": PLAN.id, "content-type": "application/json"}
    answer = Answer(200, headers, b'{"text":"%b"}' % (b"x" * 1000), [], True)
    assert (read_answer(replace(PLAN, wrong=wrong), answer).complaints == []) is is_good


def test_a_cut_is_seen_and_an_error_must_say_what_it_is() -> None:
    assert read_answer(PLAN, streamed(b"", is_whole=False)).kind is Kind.CUT
    headers = {"x-request-id": PLAN.id}
    assert read_answer(PLAN, Answer(502, headers, json.dumps(ERROR).encode(), [])).complaints == []
    assert read_answer(PLAN, Answer(500, headers, json.dumps(ERROR).encode(), [])).complaints
    assert read_answer(PLAN, Answer(404, headers, b"{}", [])).complaints
    assert read_answer(PLAN, Answer(404, {}, b'{"detail":"x"}', [])).complaints


def line(**values: Any) -> dict[str, Any]:
    route = PLAN.route.path
    return {"request_id": PLAN.id, "outcome": "complete", "status": 200, "route": route, **values}


def story(**values: Any) -> Story:
    return Story(replace(PLAN, **values), status=200, kind=None if values else Kind.WHOLE)


def cut(**values: Any) -> Story:
    return replace(story(**values), kind=Kind.CUT)


@pytest.mark.parametrize(
    ("stories", "lines", "is_good"),
    [
        pytest.param([story()], [line()], True, id="one line"),
        pytest.param([story()], [], False, id="no line"),
        pytest.param([story()], [line(), line()], False, id="two lines"),
        pytest.param([story()], [line(), line(request_id="x")], False, id="a line of nobody's"),
        pytest.param([story()], [line(outcome="client_closed")], False, id="another outcome"),
        pytest.param([story()], [line(outcome="fine")], False, id="no outcome"),
        pytest.param([story()], [line(status=500)], False, id="another status"),
        pytest.param([cut(aborts="x")], [line(outcome="aborted")], True, id="aborted, not read and cut off"),
        pytest.param([cut()], [line(outcome="aborted")], False, id="cut off, and nobody had asked for an abort"),
        pytest.param([story(leave=Leave.IN_HEAD)], [], True, id="no head, no line"),
        pytest.param([story(leave=Leave.IN_HEAD)], [line()], False, id="no head, and a line"),
        pytest.param([story(leave=Leave.IN_BODY)], [line(request_id=None)], True, id="left, without an id"),
        pytest.param(
            [story(leave=Leave.IN_BODY)],
            [line(request_id="a" * 32, outcome="client_closed", worker=None)],
            True,
            id="left, with an id of the gateway's",
        ),
        pytest.param([story(leave=Leave.IN_BODY)], [], False, id="left, and no line"),
        pytest.param([story(leave=Leave.IN_BODY, manner=Manner.RESET)], [], True, id="reset before it was read"),
        pytest.param([story()], [line(), line(request_id=None)], False, id="a line without an id too many"),
    ],
)
def test_the_join_with_the_access_log(stories: list[Story], lines: list[dict[str, Any]], is_good: bool) -> None:
    assert (audit_access(stories, lines) == []) is is_good


def test_the_other_audits() -> None:
    metrics = 'forebay_requests_total{model="m",outcome="complete",route="/generate",status="200"} 2.0\n'
    assert audit_metrics(metrics, [line(), line()]) == []
    assert audit_metrics(metrics, [line()])
    assert audit_log('{"level":"warning","message":"x"}\n') == []
    assert audit_log('{"level":"error","message":"x"}\n')
    assert audit_log("sys:1: RuntimeWarning: coroutine 'x' was never awaited\n")
    one, two = story(), story()
    one.texts, two.texts = ("a",), ("b",)
    assert audit_texts([one, one]) == []
    assert audit_texts([one, two])


def test_what_counts_as_growth() -> None:
    def grown(left_bytes: int) -> int:
        peak = 8 * 2**20  # of a large answer, in two of three samples
        sizes = [
            (ended, 90 * 2**20 + ended * left_bytes + peak * (ended % 3 > 0)) for ended in range(0, JUDGED_FROM, 500)
        ]
        return Report(rss=[*sizes, (JUDGED_FROM, 90 * 2**20 + JUDGED_FROM * left_bytes)]).growth_bytes

    assert grown(0) == 0
    assert grown(1024) > MAX_GROWTH_BYTES


def test_plans_are_the_same_again_and_leave_nothing_out() -> None:
    plans = [plan(1, number) for number in range(3000)]
    assert plans[:100] == [plan(1, number) for number in range(100)]
    seen: Callable[[Callable[[Plan], Any]], set[Any]] = lambda of: {of(one) for one in plans}  # noqa: E731
    assert seen(lambda one: one.leave) == set(Leave)
    assert seen(lambda one: one.manner) == set(Manner)
    assert seen(lambda one: one.route.path) == set(ROUTES) == set(ASKS)
    share = sum(one.leave is not Leave.NEVER for one in plans) / len(plans)
    assert 0.17 < share < 0.23

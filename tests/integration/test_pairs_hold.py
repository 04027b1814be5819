"""Requests over scripted pairs that are ended while decode's success is held, or while nothing has answered yet."""

import asyncio
from typing import Any

import pytest

from tests.fakes.running import PATIENCE_S, TIME_SCALE, until
from tests.fakes.scripted_pair import BODY, DONE, ScriptedPair, Turn, aborted, scripted_pair, terminal, token
from tests.fakes.wire import Answer, Wire, call, request_bytes, wire

STREAM: dict[str, Any] = {**BODY, "stream": True}
HELD, CONNECTING, ASKED = "held", "connecting", "asked"
ENDS = ["leaves", "aborts", "deadline", "prefill removed", "decode removed", "shutdown"]


async def to(phase: str, s: ScriptedPair, *, is_stream: bool) -> tuple[Turn, Turn | None]:
    """Bring a request there: prefill has not answered, decode has not answered, or decode has and prefill has not."""
    p = await s.prefill.turn()
    if phase == CONNECTING:
        return p, None
    await p.open()
    d = await s.decode.turn()
    if phase == HELD:
        if is_stream:
            await d.stream(token(d.rid), terminal(d.rid), DONE)
        else:
            await d.whole(terminal(d.rid).removeprefix(b"data: ").strip())
        await until(lambda: s.gateway.state()["live_legs"] == 1, "decode has ended")
    return p, d


async def end_by(end: str, s: ScriptedPair, client: Wire) -> None:
    if end == "leaves":
        client.close()
    elif end == "aborts":
        found = await call(s.gateway.address, "/abort_request", {"rid": "public"})
        assert found.json()["aborted"] == ["public"]
    elif end.endswith("removed"):
        stage = s.prefill if end.startswith("prefill") else s.decode
        path = f"/workers/{stage.worker_id}?drain_timeout_s=0.05"
        assert (await call(s.gateway.address, path, None, method="DELETE")).status in (200, 202)
    elif end == "shutdown":
        s.gateway.gateway.begin_drain()


OUTCOMES = {"leaves": "client_closed", "aborts": "aborted", "deadline": "timeout"}


@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("phase", [CONNECTING, ASKED, HELD])
@pytest.mark.parametrize("end", ENDS)
async def test_both_legs_are_told_and_read_to_their_ends(end: str, phase: str, is_stream: bool) -> None:
    """Mutation: a cancel while decode's success is held does nothing; then prefill is not told."""
    options: dict[str, Any] = {"drain_timeout_s": 0.05}
    if end == "deadline":
        options["request_timeout_s"] = 0.6 * TIME_SCALE
    async with scripted_pair(**options) as s, wire(s.gateway.address) as client:
        await client.send(request_bytes("/generate", {**BODY, "stream": is_stream}))
        p, d = await to(phase, s, is_stream=is_stream)
        await asyncio.sleep(0.05 * TIME_SCALE)  # an abort is not sent sooner than 20 ms after the request
        await end_by(end, s, client)
        if phase == HELD and end == "decode removed":
            await p.finish(terminal(p.rid), DONE)  # it has done its part, so nothing is stopped
            assert (await client.answer()).status == 200
            return
        await s.prefill.told(p.rid)
        if d is not None and phase == ASKED:
            await s.decode.told(d.rid)
        if end != "shutdown":  # which waits for nothing but the first aborts
            asked = d if phase == ASKED else None
            assert not p.is_gone
            assert asked is None or not asked.is_gone
            await end_aborted(p, asked, has_opened=phase != CONNECTING)
        if end != "leaves":
            answer = await client.answer()
            assert answer.is_whole
            assert_ended(answer, end)
        record = await s.gateway.record()
        assert record.outcome == OUTCOMES.get(end, "shutdown")
        await s.gateway.settle()
        assert s.decode.count == (0 if phase == CONNECTING else 1)


@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("phase", [CONNECTING, ASKED, HELD])
async def test_a_client_whose_abort_no_engine_heeds_is_let_go(phase: str, is_stream: bool) -> None:
    """Mutation: who reads a leg says nothing when its keeper takes it; then the client waits for ever."""
    async with scripted_pair() as s, wire(s.gateway.address) as client:
        await client.send(request_bytes("/generate", {**BODY, "stream": is_stream}))
        p, d = await to(phase, s, is_stream=is_stream)
        await asyncio.sleep(0.05 * TIME_SCALE)
        await end_by("aborts", s, client)
        await s.prefill.told(p.rid)
        answer = await client.answer()
        assert answer.is_whole
        assert_ended(answer, "aborts")
        assert (await s.gateway.record()).outcome == "aborted"
        assert not p.is_gone  # what is left of it is read on
        await end_aborted(p, d if phase == ASKED else None, has_opened=phase != CONNECTING)
        await s.gateway.settle()


async def end_aborted(p: Turn, d: Turn | None, *, has_opened: bool) -> None:
    """What engines answer that were told to stop."""
    if d is not None:
        await d.stream(aborted(d.rid, "Abort", None), DONE)
    if not has_opened:
        await p.open()
    await p.finish(aborted(p.rid, "Abort", None), DONE)


def assert_ended(answer: Answer, end: str) -> None:
    """The client has one end, and no success."""
    if answer.status == 200:
        assert b'"error"' in answer.body or b'"abort"' in answer.body
        assert b'"length"' not in answer.body
    else:
        assert answer.status == {"aborts": 499, "deadline": 504}.get(end, 503)


@pytest.mark.parametrize("ends", [True, False], ids=["prefill ends", "deadline"])
async def test_a_drain_waits_for_a_prefill_that_goes_on_alone_and_says_so(
    ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Mutation: the drain counts requests only; then its log says that there is nothing to wait for."""
    drain_s = PATIENCE_S if ends else 0.3 * TIME_SCALE
    async with scripted_pair(prefill_hold_timeout_s=0.1 * TIME_SCALE, drain_timeout_s=drain_s) as s:
        client = s.begin("/generate", BODY)
        p, d = await to(HELD, s, is_stream=False)
        assert d is not None
        assert (await client).status == 504
        assert s.gateway.state()["prefill_background_tasks"] == 1
        gateway = s.gateway.gateway
        caplog.set_level("INFO", "forebay")
        gateway.begin_drain()
        await until(lambda: "draining: 0 request(s) in flight, 1 prefill(s) that go on alone" in caplog.text, "the log")
        assert not gateway.drained.is_set()
        if ends:
            await p.finish(terminal(p.rid), DONE)
        await until(gateway.drained.is_set, "the drain's end")
        stopped = "0 request(s) and 1 prefill(s) that go on alone are stopped" in caplog.text
        assert stopped is not ends
        await s.gateway.settle()

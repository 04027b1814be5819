"""A pair fails before its first output: who is blamed, and where the request goes then."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.fakes.pair_fleet import IDS, pair_fleet
from tests.fakes.running import TIME_SCALE, until
from tests.fakes.scripted_pair import (
    BODY,
    CHAT,
    DONE,
    ScriptedPair,
    Stage,
    Turn,
    aborted,
    answer_of,
    chat_chunk,
    prefilled,
    scripted_pair,
    terminal,
    token,
)

STREAM: dict[str, Any] = {**BODY, "stream": True}
Fail = Callable[[Turn], Awaitable[None]]


async def serve(p: Turn, d: Turn, *, is_stream: bool = True) -> None:
    """Answer as a pair does that is well, and whose prefill has opened."""
    if is_stream:
        await d.stream(token(d.rid), terminal(d.rid), DONE)
    else:
        await d.whole(terminal(d.rid).removeprefix(b"data: ").strip())
    await p.finish(terminal(p.rid), DONE)


def other(stages: list[Stage], turn: Turn) -> Stage:
    """The engine that did not get it."""
    return next(one for one in stages if turn.request not in one.engine.requests)


async def first_of(stages: list[Stage]) -> Turn:
    """The request, whichever of them got it."""
    await until(lambda: any(one.count for one in stages), "a request")
    return await next(one for one in stages if one.count).turn()


async def reset(turn: Turn) -> None:
    turn.reset()


PREFILL_FAILS = [
    pytest.param(lambda p: p.whole(b'{"error":"no room"}', status=500), id="500"),
    pytest.param(lambda p: p.whole(b'{"error":"no room"}', status=503), id="503"),
    pytest.param(reset, id="reset"),
    pytest.param(lambda p: p.stream(aborted(p.rid), DONE), id="abort"),
    pytest.param(lambda p: p.stream(token(p.rid)), id="no terminal"),
]


@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("fail", PREFILL_FAILS)
async def test_a0_18_another_prefill_worker_serves_what_one_has_failed(fail: Fail, is_stream: bool) -> None:
    """Field case 86. Mutation: decode is blamed; then the same prefill worker is asked again."""
    async with scripted_pair(prefills=2) as s:
        client = s.begin("/generate", {**BODY, "stream": is_stream})
        bad = await first_of(s.prefills)
        await fail(bad)
        p = await other(s.prefills, bad).turn()
        await p.open()
        d = await s.decode.turn()
        if d.rid == bad.rid:  # decode was sent in the moment in which prefill failed
            await s.decode.told(d.rid)
            await d.stream(aborted(d.rid), DONE)
            d = await s.decode.turn()
        assert (p.rid, p.body["bootstrap_room"]) == (d.rid, d.body["bootstrap_room"])
        assert p.rid != bad.rid
        assert p.body["bootstrap_room"] != bad.body["bootstrap_room"]
        await serve(p, d, is_stream=is_stream)
        answer = await answer_of(client)
        assert (answer.status, answer.headers["x-forebay-attempts"]) == (200, "2")
        assert answer.headers["x-forebay-prefill-worker"] == other(s.prefills, bad).worker_id
        record = await s.gateway.record()
        assert (record.outcome, record.engine_ids) == ("complete", (bad.rid, p.rid))


@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
async def test_a0_18_with_no_other_prefill_worker_it_is_503(is_stream: bool) -> None:
    """Mutation: the head is sent with decode's headers; then the status is 200 with an error event."""
    async with scripted_pair() as s:
        client = s.begin("/generate", {**BODY, "stream": is_stream})
        p = await s.prefill.turn()
        await p.open()
        d = await s.decode.turn()
        await d.open()
        s.prefill.die()
        answer = await answer_of(client)
        assert (answer.status, answer.json()["error"]["type"]) == (503, "unavailable")
        assert (await s.gateway.record()).outcome == "prefill_failed"
        await s.decode.told(d.rid)
        await d.finish(aborted(d.rid), DONE)


DECODE_FAILS = [
    pytest.param(lambda d: d.whole(b'{"error":"no room"}', status=500), id="500"),
    pytest.param(lambda d: d.whole(b'{"error":"no room"}', status=503), id="503"),
    pytest.param(reset, id="reset"),
    pytest.param(lambda d: d.stream(aborted(d.rid), DONE), id="abort in a stream"),
    pytest.param(lambda d: d.whole(aborted(d.rid).removeprefix(b"data: ").strip()), id="abort in a document"),
]


@pytest.mark.parametrize("fail", DECODE_FAILS)
async def test_another_decode_worker_serves_what_one_has_failed(fail: Fail, request: pytest.FixtureRequest) -> None:
    """Field case 92. Mutation: prefill is blamed; then the request goes to the same decode worker again."""
    is_stream = "document" not in request.node.name
    async with scripted_pair(prefills=1, decodes=2) as s:
        client = s.begin("/generate", {**BODY, "stream": is_stream})
        first = await s.prefill.turn()
        await first.open()
        bad = await first_of(s.decodes)
        await fail(bad)
        await s.prefill.told(first.rid)
        await first.finish(aborted(first.rid), DONE)
        p = await s.prefill.turn()
        await p.open()
        d = await other(s.decodes, bad).turn()
        assert p.body["bootstrap_room"] == d.body["bootstrap_room"] != bad.body["bootstrap_room"]
        await serve(p, d, is_stream=is_stream)
        answer = await answer_of(client)
        assert (answer.status, answer.headers["x-forebay-attempts"]) == (200, "2")
        assert answer.headers["x-forebay-worker"] == other(s.decodes, bad).worker_id


@pytest.mark.parametrize("part", ["prefill", "decode"])
async def test_nothing_is_tried_again_after_the_first_byte(part: str) -> None:
    """Mutation: a failure before the end may be tried again; then the others get a request."""
    async with scripted_pair(prefills=2, decodes=2) as s:
        client = s.begin("/generate", STREAM)
        p = await first_of(s.prefills)
        await p.open()
        d = await first_of(s.decodes)
        await d.open()
        await d.send(token(d.rid))
        live = s.gateway.gateway.services.live
        await until(lambda: any(one._relay.status for one in live), "the client has its head")  # type: ignore[attr-defined]
        if part == "prefill":
            p.reset()
            await until(lambda: d.rid in [*s.decodes[0].aborted, *s.decodes[1].aborted], "an abort of decode")
            await d.finish(aborted(d.rid), DONE)
        else:
            d.reset()
            await until(lambda: p.rid in [*s.prefills[0].aborted, *s.prefills[1].aborted], "an abort of prefill")
            await p.finish(aborted(p.rid), DONE)
        answer = await answer_of(client)
        assert (answer.status, answer.body.count(b'"error"')) == (200, 1)
        assert sum(one.count for one in [*s.prefills, *s.decodes]) == 2


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
async def test_a_decode_worker_that_cannot_be_reached_costs_no_second_prefill(is_stream: bool, engine: str) -> None:
    """Mutation: the pair is given up; then prefill runs twice. Another: headers tell the first choice."""
    async with pair_fleet(decodes=2, engine=engine, checks_idle=False) as f:
        gone = f.decodes[0]
        services = f.gateway.gateway.services
        # So that the other one is chosen second.
        busy = services.fleet.get(f.decodes[1].url.removeprefix("http://"))
        assert busy is not None
        booking = busy.loads[0].book(requests=1, blocks=500, prefill_tokens=0)
        await gone.stop()
        body: dict[str, Any] = {"model": f.alone.options.model, "prompt": IDS, "max_tokens": 4, "stream": is_stream}
        path = "/v1/completions"
        if engine == "sglang":
            path, body = "/generate", {"input_ids": IDS, "sampling_params": {"max_new_tokens": 4}, "stream": is_stream}
        answer = await f.call(path, body)
        booking.release()
        assert answer.status == 200
        assert answer.headers["x-forebay-worker"] == f.decodes[1].url.removeprefix("http://")
        record = await f.gateway.record()
        assert (record.outcome, record.attempts) == ("complete", 1)
        assert record.worker == f.decodes[1].url.removeprefix("http://")


async def test_no_decode_worker_can_be_reached() -> None:
    """Mutation: the handoff is not counted when no other worker takes it; then the counter stays at nought."""
    async with pair_fleet(engine="vllm", checks_idle=False) as f:
        await f.decodes[0].stop()
        body = {"model": f.alone.options.model, "prompt": IDS, "max_tokens": 4}
        answer = await f.call("/v1/completions", body)
        assert (answer.status, answer.json()["error"]["type"]) == (503, "unavailable")
        metrics = f.gateway.gateway.services.metrics.render()
        assert b"forebay_handoff_abandoned_total 1.0" in metrics


@pytest.mark.parametrize("part", ["prefill", "decode"])
async def test_the_breaker_of_the_failing_side_opens_and_closes_again(part: str) -> None:
    """Field case 89. Mutation: a prefill that has served is only released; then its breaker never closes."""
    async with scripted_pair(breaker_failures=2, breaker_open_s=0.2 * TIME_SCALE, max_attempts=1) as s:
        stage = s.prefill if part == "prefill" else s.decode
        member = s.gateway.gateway.services.fleet.get(stage.worker_id)
        assert member is not None
        for _ in range(2):
            await fail_once(s, part)
        assert str(member.breaker.state) == "open"
        prefills, decodes = s.prefill.count, s.decode.count
        answer = await answer_of(s.begin("/generate", STREAM))
        assert answer.status == 503
        assert (s.prefill.count, s.decode.count) == (prefills, decodes)
        clock = s.gateway.gateway.services.clock
        await until(lambda: member.breaker.allows(clock()), "the trial is allowed")
        client = s.begin("/generate", STREAM)
        p = await s.prefill.turn()
        await p.open()
        await serve(p, await s.decode.turn(), is_stream=True)
        assert (await answer_of(client)).status == 200
        assert str(member.breaker.state) == "closed"
        await fail_once(s, part)  # one failure is none in a row
        assert str(member.breaker.state) == "closed"


async def fail_once(s: ScriptedPair, part: str) -> None:
    """One request that fails at that side."""
    client = s.begin("/generate", STREAM)
    p = await s.prefill.turn()
    if part == "prefill":
        await p.whole(b'{"error":"broken"}', status=500)
    else:
        await p.open()
        await (await s.decode.turn()).whole(b'{"error":"broken"}', status=500)
        await s.prefill.told(p.rid)
        await p.finish(aborted(p.rid), DONE)
    assert (await answer_of(client)).status == 502


async def test_a_vllm_decode_that_fails_leaves_a_handoff_behind_and_that_is_counted() -> None:
    """Mutation tried: only cancelled legs are counted; then the counter stays at nought."""
    async with scripted_pair(engine="vllm", max_attempts=1) as s:
        client = s.begin("/v1/chat/completions", {**CHAT, "stream": True})
        await (await s.prefill.turn()).whole(prefilled())
        await (await s.decode.turn()).whole(b'{"error":{"message":"broken"}}', status=500)
        assert (await answer_of(client)).status == 502
        assert s.metric("handoff_abandoned_total") == 1


async def test_a_vllm_decode_that_refuses_lets_the_handoff_go_itself() -> None:
    """Mutation: every failure counts; then the counter is at one."""
    async with scripted_pair(engine="vllm") as s:
        client = s.begin("/v1/chat/completions", {**CHAT, "stream": True})
        await (await s.prefill.turn()).whole(prefilled())
        await (await s.decode.turn()).whole(b'{"error":{"message":"bad"}}', status=400)
        assert (await answer_of(client)).status == 400
        assert s.metric("handoff_abandoned_total") == 0


async def test_decodes_that_fail_do_not_take_the_pair_apart() -> None:
    """Mutation: each such handoff counts against the pair; then the fifth request finds no pair."""
    async with scripted_pair(engine="vllm", max_attempts=1) as s:
        for _ in range(4):
            client = s.begin("/v1/chat/completions", CHAT)
            await (await s.prefill.turn()).whole(prefilled())
            await (await s.decode.turn()).whole(b'{"error":{"message":"full"}}', status=503)
            assert (await answer_of(client)).status == 503
        client = s.begin("/v1/chat/completions", CHAT)
        await (await s.prefill.turn()).whole(prefilled())
        await (await s.decode.turn()).stream(chat_chunk(role=True), chat_chunk("a"), chat_chunk("", "stop"), DONE)
        assert (await answer_of(client)).status == 200

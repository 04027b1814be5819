"""vLLM's form of a request over a pair: prefill whole, then decode, which has to take the prompt's blocks over."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest

from backends.pair_types import PairTimes
from backends.types import EngineFacts, EngineKind
from tests.fakes.running import TIME_SCALE, running_gateway, until
from tests.fakes.script_engine import script_engine
from tests.fakes.scripted_pair import (
    CHAT,
    DONE,
    HANDOFF,
    VLLM_METADATA,
    ScriptedPair,
    Stage,
    Turn,
    answer_of,
    chat_chunk,
    prefilled,
    scripted_pair,
)
from tests.fakes.wire import Wire, call, request_bytes, wire
from tests.integration.cancel_scenes import full_backlog

PATH = "/v1/chat/completions"
STREAM: dict[str, Any] = {**CHAT, "stream": True}
PAUSE_S = 0.2 * TIME_SCALE
ROLE, TOKEN, END = chat_chunk(role=True), chat_chunk("a"), chat_chunk("", "stop")
PING = b": keep-alive\n\n"


async def to_decode(s: ScriptedPair) -> Turn:
    """Answer prefill; decode's turn."""
    await (await s.prefill.turn()).whole(prefilled())
    return await s.decode.turn()


@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
async def test_a0_1_decode_is_sent_with_the_handoff_as_prefill_wrote_it(is_stream: bool) -> None:
    """Mutation: the handoff is parsed and written anew; then its spaces are gone."""
    async with scripted_pair(engine="vllm") as s:
        body = {**CHAT, "stream": is_stream, "stop": ["x"], "min_tokens": 4, "max_completion_tokens": 8}
        if is_stream:
            body["stream_options"] = {"include_usage": True}
        client = s.begin(PATH, body)
        p = await s.prefill.turn()
        await asyncio.sleep(PAUSE_S)
        assert s.decode.count == 0
        sent = p.body
        assert (sent["max_tokens"], sent["max_completion_tokens"], sent["stream"]) == (1, 1, False)
        assert not {"stream_options", "stop", "min_tokens"} & sent.keys()  # field case 91
        assert sent["kv_transfer_params"]["do_remote_decode"] is True
        await p.whole(prefilled())
        d = await s.decode.turn()
        assert HANDOFF in d.request.body
        assert (d.body["stream"], d.body["stop"], d.body["min_tokens"]) == (True, ["x"], 4)
        assert p.request.header("x-request-id") == d.request.header("x-request-id")
        await d.stream(ROLE, TOKEN, END, DONE)
        answer = await answer_of(client)
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/event-stream" if is_stream else "application/json")
        assert answer.headers["x-forebay-worker"] == s.decode.worker_id
        assert answer.headers["x-forebay-prefill-worker"] == s.prefill.worker_id


ENDINGS = [
    pytest.param(lambda p: p.whole(b'{"error":{"message":"m"}}', status=503), 503, "unavailable", id="A0.2 503"),
    pytest.param(lambda p: p.whole(prefilled(b"null")), 502, "prefill_protocol", id="no handoff"),
    pytest.param(lambda p: p.whole(prefilled(b'{"do_remote_prefill":true}')), 502, "prefill_protocol", id="incomplete"),
    pytest.param(lambda p: p.whole(prefilled(b"null", "abort")), 502, "engine_error", id="A0.12 abort"),
    pytest.param(lambda p: p.whole(b"{no json"), 502, "engine_protocol", id="A0.11 no JSON"),
    pytest.param(lambda p: p.whole(b"a" * 70_000), 502, "response_too_large", id="A0.11 above the bound"),
    pytest.param(lambda p: p.whole(b"[]", status=401), 502, "backend_auth", id="A0.14 401"),
]


@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize(("end", "status", "kind"), ENDINGS)
async def test_a_prefill_that_fails_keeps_decode_out_of_it(
    end: Callable[[Turn], Awaitable[None]], status: int, kind: str, is_stream: bool
) -> None:
    """Mutation: decode is sent without a handoff, to compute the prompt itself; then it has a request."""
    async with scripted_pair(engine="vllm", max_attempts=1, max_response_bytes=65_536) as s:
        client = s.begin(PATH, {**CHAT, "stream": is_stream})
        await end(await s.prefill.turn())
        answer = await answer_of(client)
        assert (answer.status, answer.json()["error"]["type"]) == (status, kind)
        assert s.decode.count == 0
        assert (await s.gateway.record()).outcome in ("prefill_failed", "engine_error")


@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
async def test_decision_20_a_handoff_that_is_too_old_is_not_used(is_stream: bool) -> None:
    """Mutation: the age is not looked at; then decode has the first prefill's handoff."""
    times: dict[str, Any] = {"health_timeout_s": 600, "connect_timeout_s": 4 * PAUSE_S, "handoff_max_age_s": PAUSE_S}
    async with contextlib.AsyncExitStack() as stack:
        stuck = await stack.enter_async_context(full_backlog())
        first, second = [await stack.enter_async_context(script_engine()) for _ in range(2)]
        first.metadata = second.metadata = VLLM_METADATA
        urls = {first.url: "prefill", second.url: "decode", stuck: "decode"}
        specs = [f"{url},engine=vllm,role={role}" for url, role in urls.items()]
        gateway = await stack.enter_async_context(running_gateway(*specs, wait_ready=2, **times))
        prefill, decode = Stage(first), Stage(second)
        members = {member.worker.url: member for member in gateway.gateway.services.fleet}
        facts = EngineFacts(EngineKind.VLLM, (0, 32, 0), "0.32.0", "model", models=("model",))
        members[stuck].identified(facts)
        booking = members[second.url].loads[0].book(requests=1, blocks=500, prefill_tokens=0)  # so the other is first
        async with asyncio.TaskGroup() as group:
            client = group.create_task(call(gateway.address, PATH, {**CHAT, "stream": is_stream}))
            old = await prefill.turn()
            await old.whole(prefilled())
            again = await prefill.turn()
            await again.whole(prefilled(HANDOFF.replace(b'"r"', b'"again"')))
            d = await decode.turn()
            assert d.body["kv_transfer_params"]["remote_request_id"] == "again"
            assert old.request.header("x-request-id") != again.request.header("x-request-id")
            await d.stream(ROLE, TOKEN, END, DONE)
        booking.release()
        assert client.result().status == 200
        record = await gateway.record()
        assert (record.attempts, len(record.engine_ids)) == (1, 2)
        assert b"forebay_handoff_abandoned_total 1.0" in gateway.gateway.services.metrics.render()


@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("begins", ["nothing", "role"])
async def test_decision_20_a_first_token_after_the_lease_is_an_error(begins: str, is_stream: bool) -> None:
    """Mutation: the role's event opens the client's stream; then the status is 200 with an error event."""
    async with scripted_pair(engine="vllm", max_attempts=1) as s:
        services = s.gateway.gateway.services
        times = PairTimes(lease_s=2 * PAUSE_S)
        object.__setattr__(services, "limits", dataclasses.replace(services.limits, pair_times=times))
        client = s.begin(PATH, {**CHAT, "stream": is_stream})
        d = await to_decode(s)
        await d.open()
        if begins == "role":
            await d.send(ROLE)
        answer = await answer_of(client)
        assert (answer.status, answer.json()["error"]["type"]) == (502, "handoff_expired")
        await d.finish(TOKEN, END, DONE)
        assert (await s.gateway.record()).outcome == "engine_error"


async def streaming(client: Wire, s: ScriptedPair, *blocks: bytes) -> Turn:
    """A streamed request whose decode has answered with so much."""
    await client.send(request_bytes(PATH, STREAM))
    d = await to_decode(s)
    if blocks:
        await d.open()
        await d.send(*blocks)
    return d


@pytest.mark.parametrize(
    ("blocks", "release"),
    [
        pytest.param((), [TOKEN], id="A4.2 headers withheld"),
        pytest.param((ROLE,), [TOKEN], id="A4.4 the role alone"),
        pytest.param((PING,), [END], id="A4.5 an end without a token"),
    ],
)
async def test_a4_a_decode_without_output_is_kept_when_its_client_leaves(
    blocks: tuple[bytes, ...], release: list[bytes]
) -> None:
    """Mutation: vLLM's decode legs are dropped with their client; then the connection ends before its token."""
    async with scripted_pair(engine="vllm") as s:
        async with wire(s.gateway.address) as client:
            d = await streaming(client, s, *blocks)
        record = await s.gateway.record()
        assert record.outcome == "client_closed"
        await asyncio.sleep(PAUSE_S)
        assert not d.is_gone
        assert s.gateway.state()["abort_tasks"] == 1
        if not blocks:
            await d.open()
        await d.send(*release)
        await d.left()
        await s.gateway.settle()
        assert s.metric("handoff_abandoned_total") == 0
        assert s.decode.aborted == []


async def test_a4_3_a_decode_with_output_is_closed_at_once() -> None:
    """Mutation: it is read on whether or not it has taken over; then it is not closed."""
    async with scripted_pair(engine="vllm") as s:
        async with wire(s.gateway.address) as client:
            d = await streaming(client, s, ROLE, TOKEN)
            await client.head()
        await d.left()
        await s.gateway.settle()
        assert s.metric("handoff_abandoned_total") == 0


BREAKS = [
    pytest.param(lambda d: d.finish(), id="end"),
    pytest.param(lambda d: _reset(d), id="reset"),
    pytest.param(lambda d: d.finish(b"data: {no json\n\n"), id="no JSON"),
]


async def _reset(turn: Turn) -> None:
    turn.reset()


@pytest.mark.parametrize("leaves", [True, False], ids=["client left", "client there"])
@pytest.mark.parametrize("end", BREAKS)
async def test_a4_6_a_decode_that_breaks_off_before_its_output(
    end: Callable[[Turn], Awaitable[None]], leaves: bool
) -> None:
    """Mutation: what breaks off with nobody there counts as taken over; then no loss is counted."""
    async with scripted_pair(engine="vllm", max_attempts=1) as s:
        async with wire(s.gateway.address) as client:
            d = await streaming(client, s, ROLE)
            if leaves:
                client.close()
                await s.gateway.record()
            await end(d)
            if not leaves:
                answer = await client.answer()
                assert (answer.status, answer.json()["error"]["code"]) == (502, 502)
        outcome = (await s.gateway.record()).outcome
        assert outcome == ("client_closed" if leaves else "engine_error")
        await s.gateway.settle()
        assert s.metric("handoff_abandoned_total") == 1


async def test_a4_7_signs_of_life_do_not_extend_the_limit_and_three_such_losses_part_the_two() -> None:
    """Mutation: the limit begins anew with every chunk; then the leg outlives them."""
    async with scripted_pair(engine="vllm", handoff_drain_timeout_s=2 * PAUSE_S) as s:
        for number in range(3):
            async with wire(s.gateway.address) as client:
                d = await streaming(client, s, PING)
            await s.gateway.record(number + 1)
            while not d.is_gone:
                with contextlib.suppress(ConnectionError):
                    await d.send(PING)
                await asyncio.sleep(PAUSE_S / 4)
            await s.gateway.settle()
            assert s.metric("handoff_abandoned_total") == number + 1
        alone = s.begin(PATH, CHAT)
        d = await s.decode.turn()  # without the other it can serve alone
        assert "kv_transfer_params" not in d.body
        await d.whole(prefilled(b"null"))
        assert (await answer_of(alone)).status == 200
        assert s.prefill.count == 3


async def test_a4_9_a_prefill_is_closed_at_once() -> None:
    """Mutation: prefill legs drain as decode's do; then the connection stays."""
    async with scripted_pair(engine="vllm") as s:
        async with wire(s.gateway.address) as client:
            await client.send(request_bytes(PATH, STREAM))
            p = await s.prefill.turn()
        await p.left()
        await s.gateway.settle()
        assert (s.decode.count, s.metric("handoff_abandoned_total")) == (0, 0)


@pytest.mark.parametrize("end", ["leaves", "aborts"])
async def test_a4_1_a_prompt_that_is_ready_is_taken_over_though_nobody_wants_it(end: str) -> None:
    """Mutation tried: prefill is closed whatever it has answered; then its blocks stay pinned, and uncounted."""
    async with scripted_pair(engine="vllm") as s:
        async with wire(s.gateway.address) as client:
            await client.send(request_bytes(PATH, STREAM, headers={"x-request-id": "public"}))
            p = await s.prefill.turn()
            whole = prefilled()
            await p.reply.head("Content-Type: application/json", f"Content-Length: {len(whole)}")
            await p.reply.raw(whole[:40])
            await until(lambda: s.gateway.state()["in_flight_requests"] == 1, "it is live")
            await asyncio.sleep(PAUSE_S / 4)
            if end == "aborts":
                found = await call(s.gateway.address, "/abort_request", {"rid": "public"})
                assert found.json()["aborted"] == ["public"]
            else:
                client.close()
                await s.gateway.record()
            await p.reply.raw(whole[40:])
            await p.over()
            d = await s.decode.turn()
            assert (d.body["max_tokens"], d.body["kv_transfer_params"]) == (1, orjson.loads(HANDOFF))
            if end == "aborts":
                assert (await client.answer()).status == 499
            await d.stream(ROLE, TOKEN, END, DONE)
        await s.gateway.settle()
        assert s.metric("handoff_abandoned_total") == 0

"""An early handoff, and failures that come late: requests over scripted SGLang engines, by the acceptance tests' names.

Each wait below is bounded; where a limit of the gateway's is meant, it is far from the test's own.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
import pytest

from tests.fakes.running import PATIENCE_S, TIME_SCALE, until
from tests.fakes.scripted_pair import BODY, DONE, ScriptedPair, Turn, aborted, answer_of, scripted_pair, terminal, token
from tests.fakes.wire import Answer, request_bytes, wire

STREAM: dict[str, Any] = {**BODY, "stream": True}
# Shorter than this no limit in these tests is; what happens sooner does not wait for one.
SOON_S = 2.0 * TIME_SCALE


def public(block: bytes, turn: Turn) -> bytes:
    """What the client is to see of a block."""
    return block.replace(turn.rid.encode(), b"public")


def error_in(answer: Answer) -> dict[str, Any]:
    """The one error of an answer, which is its body or its only error event."""
    if answer.status != 200:
        found: dict[str, Any] = answer.json()["error"]
        return found
    errors = [orjson.loads(one)["error"] for one in answer.events() if b'"error"' in one]
    assert len(errors) == 1, answer.body
    first: dict[str, Any] = errors[0]
    return first


async def both_open(s: ScriptedPair) -> tuple[Turn, Turn]:
    """Prefill has opened, and decode has its request."""
    p = await s.prefill.turn()
    await p.open()
    return p, await s.decode.turn()


async def test_a0_1_decode_is_sent_as_soon_as_prefills_headers_are_there() -> None:
    """Mutation: the handoff waits for prefill's first event; then decode's request never comes."""
    async with scripted_pair() as s:
        client = s.begin("/generate", STREAM)
        p = await s.prefill.turn()
        assert s.decode.count == 0
        await p.open()
        async with asyncio.timeout(SOON_S):
            d = await s.decode.turn()
        fields = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
        assert [p.body[name] for name in fields] == [d.body[name] for name in fields]
        assert (p.body["bootstrap_host"], p.body["bootstrap_port"]) == ("127.0.0.1", 8998)
        assert p.body["stream"] is True
        assert p.body["sampling_params"] == {"max_new_tokens": 1, "n": 1}
        assert d.body["sampling_params"] == {"max_new_tokens": 8}
        assert p.rid == d.rid != "public"
        assert s.gateway.state()["live_rooms"] == 1
        await d.stream(token(d.rid), terminal(d.rid), DONE)
        await p.finish(terminal(p.rid), DONE)
        answer = await answer_of(client)
        assert answer.status == 200
        assert answer.headers["x-forebay-worker"] == s.decode.worker_id
        assert answer.headers["x-forebay-prefill-worker"] == s.prefill.worker_id
        record = await s.gateway.record()
        assert (record.worker, record.prefill_worker) == (s.decode.worker_id, s.prefill.worker_id)
        assert record.engine_ids == (p.rid,)


@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
async def test_a0_2_a_prefill_that_refuses_keeps_decode_out_of_it(is_stream: bool) -> None:
    """Mutation: any headers are the handoff; then decode has a request that nobody will answer."""
    async with scripted_pair() as s:
        client = s.begin("/generate", {**BODY, "stream": is_stream})
        await (await s.prefill.turn()).whole(b'{"error":{"message":"full","code":503}}', status=503)
        answer = await answer_of(client)
        assert (answer.status, error_in(answer)["type"]) == (503, "unavailable")
        assert s.decode.count == 0
        assert (await s.gateway.record()).outcome == "prefill_failed"


async def test_a0_3_a_prefill_that_never_answers_ends_at_its_headers_limit() -> None:
    """Mutation: decode is sent once prefill's request is written; then it has a request."""
    async with scripted_pair(prefill_header_timeout_s=0.3 * TIME_SCALE) as s:
        client = s.begin("/generate", STREAM)
        p = await s.prefill.turn()
        answer = await answer_of(client)
        assert (answer.status, error_in(answer)["type"]) == (504, "engine_timeout")
        assert s.decode.count == 0
        assert (await s.gateway.record()).outcome == "timeout"
        await s.prefill.told(p.rid)
        await p.stream(aborted(p.rid), DONE)


@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
async def test_a0_4_prefills_failure_ends_a_decode_whose_headers_are_awaited(is_stream: bool) -> None:
    """Mutation: prefill's failure is looked at once decode has answered; then the client waits for ever."""
    async with scripted_pair() as s:
        client = s.begin("/generate", {**BODY, "stream": is_stream})
        p, d = await both_open(s)
        await p.finish(aborted(p.rid, "out of blocks"), DONE)
        async with asyncio.timeout(SOON_S):
            answer = await client
        assert (answer.status, error_in(answer)["message"]) == (502, "out of blocks")
        record = await s.gateway.record()
        assert record.outcome == "prefill_failed"
        await s.decode.told(d.rid)
        await d.stream(aborted(d.rid), DONE)


async def test_a0_5_prefills_failure_ends_decodes_stream_with_one_error() -> None:
    """Mutation: prefill is not watched once decode streams; then the stream goes on to its success."""
    async with scripted_pair() as s:
        client = s.begin("/generate", STREAM)
        p, d = await both_open(s)
        sent = [token(d.rid, text) for text in "abc"]
        await d.open()
        await d.send(*sent)
        await until(lambda: "public" in s.gateway.gateway.services.live.ids, "the request is live")
        await p.finish(aborted(p.rid, "lost"), DONE)
        answer = await answer_of(client)
        shown = b"".join(public(block, d) for block in sent)
        assert answer.body.startswith(shown) or answer.status == 502
        assert error_in(answer)["message"] == "lost"
        assert b'"finish_reason":{' not in answer.body
        await s.decode.told(d.rid)
        await d.finish(terminal(d.rid), DONE)
        assert (await s.gateway.record()).outcome == "prefill_failed"


async def test_a0_6_decodes_success_waits_for_prefills() -> None:
    """Mutation: the terminal passes at once; then the client has it before prefill has ended."""
    async with scripted_pair() as s, wire(s.gateway.address) as client:
        await client.send(request_bytes("/generate", STREAM))
        p, d = await both_open(s)
        blocks = [token(d.rid, "a"), token(d.rid, "b"), terminal(d.rid, "c"), DONE]
        await d.stream(*blocks)
        status, headers = await client.head()
        shown = b""
        while shown.count(b"\n\n") < 2:
            shown += await client.chunk()
        assert shown == b"".join(public(block, d) for block in blocks[:2])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2 * TIME_SCALE):
                await client.reader.read(1)
        await p.finish(terminal(p.rid), DONE)
        rest = await client.body(status, headers)
        assert shown + rest.body == b"".join(public(block, d) for block in blocks)
        assert (await s.gateway.record()).outcome == "complete"


async def test_a0_6_a_whole_answer_waits_for_prefills_end_too() -> None:
    """Mutation: unary answers pass at once; then the client has it before prefill has ended."""
    async with scripted_pair() as s:
        client = s.begin("/generate", BODY)
        p, d = await both_open(s)
        body = terminal(d.rid, "abc").removeprefix(b"data: ").strip()
        await d.whole(body)
        await asyncio.sleep(0.2 * TIME_SCALE)
        assert not client.done()
        await p.finish(terminal(p.rid), DONE)
        answer = await answer_of(client)
        assert (answer.status, answer.body) == (200, public(body, d))
        assert s.metric("prefill_hold_seconds_count") == 1


@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
async def test_a0_7_prefills_failure_replaces_decodes_success(is_stream: bool) -> None:
    """Mutation: the hold passes what it holds whatever prefill ends with; then the client has a success."""
    async with scripted_pair() as s:
        client = s.begin("/generate", {**BODY, "stream": is_stream})
        p, d = await both_open(s)
        last = terminal(d.rid, "last", completion_tokens=8)
        if is_stream:
            await d.stream(token(d.rid, "first"), last, DONE)
            await until(lambda: s.gateway.state()["live_legs"] == 1, "decode has ended")
        else:
            await d.whole(last.removeprefix(b"data: ").strip())
        await p.finish(aborted(p.rid, "late"), DONE)
        answer = await answer_of(client)
        assert answer.status == (200 if is_stream else 502)
        assert error_in(answer)["message"] == "late"
        assert b"last" not in answer.body
        record = await s.gateway.record()
        assert (record.outcome, record.completion_tokens) == ("prefill_failed", None)


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        pytest.param(lambda d: d.whole(b'{"error":"broken"}', status=500), "broken", id="status"),
        pytest.param(lambda d: d.stream(aborted(d.rid), DONE), "KVTransferError", id="first event"),
        pytest.param(lambda d: d.stream(token(d.rid), aborted(d.rid), DONE), "KVTransferError", id="later event"),
    ],
)
async def test_a0_8_decodes_failure_is_told_at_once(fail: Callable[[Turn], Awaitable[None]], message: str) -> None:
    """Mutation: every end of decode waits for prefill; then the client gets nothing."""
    async with scripted_pair(max_attempts=1) as s:
        client = s.begin("/generate", STREAM)
        p, d = await both_open(s)
        await fail(d)
        async with asyncio.timeout(SOON_S):
            answer = await client
        assert message.encode() in answer.body
        assert (await s.gateway.record()).outcome == "engine_error"
        await s.prefill.told(p.rid)  # inside its window
        assert not p.is_gone
        await p.finish(aborted(p.rid), DONE)


async def test_a0_9_prefill_is_read_to_its_end_when_the_client_has_left() -> None:
    """Mutation: prefill's connection is closed with the client; then the engine sees that."""
    async with scripted_pair() as s:
        async with wire(s.gateway.address) as client:
            await client.send(request_bytes("/generate", STREAM))
            p, d = await both_open(s)
            await d.open()
            await d.send(token(d.rid))
            await client.head()
        await s.prefill.told(p.rid)
        await s.decode.told(d.rid)
        assert (p.is_gone, d.is_gone) == (False, False)
        assert s.gateway.state()["live_legs"] == 2
        await d.finish(aborted(d.rid), DONE)
        await p.finish(aborted(p.rid), DONE)
        record = await s.gateway.record()
        assert (record.outcome, record.status) == ("client_closed", 499)
        await s.gateway.settle()
        assert s.prefill.aborted == [p.rid]


async def test_a0_10_the_hold_has_a_limit_that_prefills_chunks_do_not_extend() -> None:
    """Mutation: each of prefill's chunks starts the hold again; then it outlives the chunks."""
    async with scripted_pair(prefill_hold_timeout_s=0.5 * TIME_SCALE) as s:
        client = s.begin("/generate", STREAM)
        p, d = await both_open(s)
        await d.stream(token(d.rid), terminal(d.rid), DONE)
        chunks = 0
        async with asyncio.timeout(PATIENCE_S):
            while not client.done():
                await p.send(token(p.rid))
                chunks += 1
                await asyncio.sleep(0.05 * TIME_SCALE)
        answer = await client
        assert chunks >= 3
        assert error_in(answer)["type"] == "prefill_incomplete"
        assert (await s.gateway.record()).outcome == "timeout"
        assert s.gateway.state()["prefill_background_tasks"] == 1
        assert not p.is_gone
        await p.finish(terminal(p.rid), DONE)
        await s.gateway.settle()
        assert s.prefill.aborted == []


ENDINGS = [
    pytest.param(lambda p: p.finish(), "engine_error", id="no terminal"),
    pytest.param(lambda p: p.finish(token(p.rid), DONE), "engine_protocol", id="end marker first"),
    pytest.param(lambda p: p.finish(b"data: {no json\n\n"), "engine_protocol", id="no JSON"),
    pytest.param(lambda p: p.send(b"data: " + b"a" * 70_000), "response_too_large", id="an event above the bound"),
    pytest.param(lambda p: p.finish(b'data: {"error":{"message":"m","code":500}}\n\n'), "engine_error", id="error"),
]


@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize(("end", "kind"), ENDINGS)
async def test_a0_11_a_prefill_that_ends_as_none_should_is_an_error(
    end: Callable[[Turn], Awaitable[None]], kind: str, is_stream: bool
) -> None:
    """Mutation: an end without a terminal is an end; then decode's success passes."""
    async with scripted_pair(max_attempts=1, max_response_bytes=65_536) as s:
        client = s.begin("/generate", {**BODY, "stream": is_stream})
        p, d = await both_open(s)
        if is_stream:
            await d.stream(token(d.rid), terminal(d.rid), DONE)
        else:
            await d.whole(terminal(d.rid).removeprefix(b"data: ").strip())
        await end(p)
        answer = await answer_of(client)
        assert answer.status == (200 if is_stream else 502)
        error = error_in(answer)
        assert (error["type"], error["code"]) == (kind, 502)
        assert (await s.gateway.record()).outcome == "prefill_failed"


@pytest.mark.parametrize("kind", ["abort", "error", "cancelled"])
async def test_a0_12_an_error_in_prefills_last_event_counts_though_tokens_are_with_it(kind: str) -> None:
    """Mutation: events with text are dropped unread; then decode's success passes."""
    async with scripted_pair() as s:
        client = s.begin("/generate", STREAM)
        p, d = await both_open(s)
        await d.stream(token(d.rid), terminal(d.rid), DONE)
        last = aborted(p.rid, "failed all the same", text="a token").replace(b'"abort"', b'"%b"' % kind.encode())
        await p.finish(last, DONE)
        answer = await answer_of(client)
        assert error_in(answer)["message"] == "failed all the same"


@pytest.mark.parametrize("status", [401, 403])
async def test_a0_14_a_refusal_of_the_gateways_own_key_is_not_the_clients(status: int) -> None:
    """Mutation: 4xx of prefill pass as they are; then the client is told that it may not."""
    async with scripted_pair() as s:
        client = s.begin("/generate", STREAM)
        await (await s.prefill.turn()).whole(b'{"error":"Unauthorized"}', status=status)
        answer = await answer_of(client)
        assert (answer.status, error_in(answer)["type"]) == (502, "backend_auth")
        assert b"Unauthorized" not in answer.body
        assert s.decode.count == 0


@pytest.mark.parametrize("status", [400, 422, 429])
async def test_a_refusal_of_the_request_is_the_engines_own(status: int) -> None:
    """Mutation: every failure of a pair is 502; then the client does not learn what is wrong with its request."""
    body = b'{"error":{"message":"no such thing","type":"BadRequest","code":%d}}' % status
    async with scripted_pair() as s:
        client = s.begin("/generate", STREAM)
        await (await s.prefill.turn()).whole(body, status=status)
        answer = await answer_of(client)
        assert (answer.status, answer.body) == (status, body)
        assert (await s.gateway.record()).outcome == ("overloaded" if status == 429 else "rejected")


async def test_a0_16_prefills_failure_wins_over_decodes_end_of_the_same_moment() -> None:
    """Mutation: events count in the order in which their readers ran; then some of the clients have a success."""
    async with scripted_pair(max_attempts=1) as s:
        for run in range(200):
            client = s.begin("/generate", {**STREAM, "rid": f"public-{run}"})
            p, d = await both_open(s)
            await d.open()
            await d.send(token(d.rid))
            await until(lambda: s.gateway.state()["live_legs"] == 2, "both legs are live")
            first, second = (d, p) if run % 2 else (p, d)
            for turn in (first, second):  # nothing awaits in between, so both are read in one turn of the loop
                block = aborted(p.rid) if turn is p else terminal(d.rid) + DONE
                turn.reply.writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(block), block))
            await p.over()
            await d.over()
            answer = await answer_of(client)
            assert error_in(answer)["message"] == "KVTransferError", run
            assert b'"length"' not in answer.body, run
            record = await s.gateway.record(run + 1)
            assert record.outcome == "prefill_failed", run


async def test_a0_17_prefills_load_is_booked_until_its_end() -> None:
    """Mutation: the handoff gives prefill's tokens back; then none are booked while it computes."""
    async with scripted_pair() as s:
        client = s.begin("/generate", STREAM)
        p, d = await both_open(s)
        await d.open()
        await d.send(token(d.rid))
        load = {member.worker.id: member for member in s.gateway.gateway.services.fleet}
        of_prefill, of_decode = load[s.prefill.worker_id].loads[0], load[s.decode.worker_id].loads[0]
        assert (of_prefill.in_flight, of_decode.in_flight) == (1, 1)
        assert (of_prefill.prefill_tokens, of_decode.prefill_tokens) == (3, 0)
        await p.finish(terminal(p.rid), DONE)
        await until(lambda: of_prefill.in_flight == 0, "prefill's load is given back")
        assert (of_prefill.prefill_tokens, of_decode.in_flight) == (0, 1)
        await d.finish(terminal(d.rid), DONE)
        await answer_of(client)

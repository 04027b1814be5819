"""Requests that begin alike and come together: one computes what they share, and the others are sent when it is there.

The first part is in front of simulated engines with caches and KV events, of which simulated time can stand still; the
second in front of scripted ones, which hold their answers until the test lets go.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import zmq

import gateway.coalescing
from gateway.access_log import AccessRecord
from kv_events.hashing import pack_tokens
from kv_events.types import AllBlocksCleared, BlockStored
from routers.load import RankLoad
from tests.fakes.kv_fleet import BLOCK, PROMPT, Fleet, announces, fleet
from tests.fakes.kv_publisher import kv_publisher
from tests.fakes.running import PATIENCE_S, TIME_SCALE, RunningGateway, running_gateway, until
from tests.fakes.script_engine import Reply, ScriptEngine, SeenRequest, script_engine
from tests.fakes.wire import Answer, Wire, call, request_bytes, wire

BLOCKS = len(PROMPT) // BLOCK
SOON_S = 0.1 * TIME_SCALE
# One token more than its blocks, since an engine computes the last token always.
SIBLING = [*PROMPT, 7]
ON: dict[str, Any] = {"kv_coalesce_tokens": BLOCK}
# A rank takes all that there are at once, and computes them side by side in steps of two blocks.
SLOW: dict[str, Any] = {"prefill_tokens_per_s": 50_000.0, "chunked_prefill_tokens": 2 * BLOCK}


async def scrape(running: RunningGateway) -> dict[str, float]:
    """What metrics say of requests that were held back."""
    lines = (await running.client.get("/metrics")).text.splitlines()
    pairs = (line.split(" ") for line in lines if line.startswith(("forebay_coalesced", "forebay_held_requests")))
    return {name: float(value) for name, value in pairs}


def counts(total: int, late: int = 0) -> dict[str, float]:
    """The same when nobody is held any more."""
    return {"forebay_held_requests": 0, "forebay_coalesced_total": total, "forebay_coalesced_late_total": late}


async def held(running: RunningGateway, count: int) -> None:
    """Wait until so many requests are held back."""
    await until(lambda: running.state()["held_requests"] == count, f"{count} requests held")


# Simulated engines.


def cached_tokens(answer: Answer) -> int:
    """What the engine says that it found in its cache."""
    document = json.loads(answer.events()[-2]) if answer.events() else answer.json()
    found = document["meta_info"]["cached_tokens"]
    assert isinstance(found, int)
    return found


async def siblings(f: Fleet, count: int, at_engine: int, **more: Any) -> list[Answer]:
    """Send one prompt so many times while the engine's time stands still, and let go when so many have arrived."""
    (engine,) = f.engines
    await f.generate([900, *PROMPT[1:]])  # so that the engine has been heard
    await f.settled()
    engine.freeze()
    body = {"input_ids": SIBLING, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}, **more}
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(call(f.gateway.address, "/generate", body)) for _ in range(count)]
        await until(lambda: f.gateway.state()["live_legs"] == count, "all are placed")
        await engine.wait_for(lambda one: one.running + one.waiting == at_engine, PATIENCE_S)
        assert f.gateway.state()["held_requests"] == count - at_engine
        engine.thaw()
    answers = [one.result() for one in calls]
    assert {answer.status for answer in answers} == {200}
    return answers


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_prompt_that_comes_often_is_computed_once(is_stream: bool) -> None:
    async with fleet(1, gateway=ON, **SLOW) as f:
        answers = await siblings(f, 6, at_engine=1, stream=is_stream)
        assert sorted(map(cached_tokens, answers)) == [0, *[len(PROMPT)] * 5]
        await f.gateway.settle()
        assert await scrape(f.gateway) == counts(5)
        waits = [record.queue_s for record in f.gateway.records[1:]]
        assert waits.count(None) == 1
        assert all(wait is None or wait > 0 for wait in waits)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_without_the_option_each_one_computes_it(is_stream: bool) -> None:
    async with fleet(1, **SLOW) as f:
        answers = await siblings(f, 6, at_engine=6, stream=is_stream)
        assert [cached_tokens(answer) for answer in answers] == [0] * 6
        assert [record.queue_s for record in f.gateway.records] == [None] * 7
        assert await scrape(f.gateway) == counts(0)


async def test_vllm_finds_blocks_by_itself_so_that_nobody_is_held() -> None:
    async with fleet(1, engine="vllm", gateway=ON, **SLOW) as f:
        (engine,) = f.engines
        body = {"model": "model", "prompt": SIBLING, "max_tokens": 2, "stream": True}
        assert (await call(f.gateway.address, "/v1/completions", {**body, "prompt": PROMPT[:40]})).status == 200
        await f.settled()
        engine.freeze()
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(call(f.gateway.address, "/v1/completions", body)) for _ in range(3)]
            await engine.wait_for(lambda one: one.running + one.waiting == 3, PATIENCE_S)
            engine.thaw()
        assert {one.result().status for one in calls} == {200}
        assert await scrape(f.gateway) == counts(0)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_by_the_events_they_go_while_the_first_still_runs(is_stream: bool) -> None:
    """The first one's unary answer is far away; that its prompt is there is known from the events alone."""
    async with fleet(1, gateway=ON, inter_token_ms=20, **SLOW) as f, wire(f.gateway.address) as first:
        await f.generate([900, *PROMPT[1:]])
        await f.settled()
        (engine,) = f.engines
        engine.freeze()
        endless = {"input_ids": SIBLING, "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": True}}
        await first.send(request_bytes("/generate", endless))
        await engine.wait_for(lambda one: one.running + one.waiting == 1, PATIENCE_S)
        body = {"input_ids": SIBLING, "sampling_params": {"max_new_tokens": 1}, "stream": is_stream}
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(call(f.gateway.address, "/generate", body)) for _ in range(3)]
            await held(f.gateway, 3)
            engine.thaw()
        assert [cached_tokens(one.result()) for one in calls] == [len(PROMPT)] * 3
        assert engine.running == 1
        assert f.gateway.state()["awaited_prefills"] == 0
        first.close()
        await f.gateway.settle()
        assert await scrape(f.gateway) == counts(3)


async def test_the_version_of_the_weights_is_the_one_under_which_it_is_sent() -> None:
    async with fleet(1, gateway=ON, weight_version="1", **SLOW) as f:
        (engine,) = f.engines
        await f.generate([900, *PROMPT[1:]])
        await f.settled()
        engine.freeze()
        body = {"input_ids": SIBLING, "sampling_params": {"max_new_tokens": 1}}
        async with asyncio.TaskGroup() as group:
            first = group.create_task(call(f.gateway.address, "/generate", body))
            await engine.wait_for(lambda one: one.running + one.waiting == 1, PATIENCE_S)
            second = group.create_task(call(f.gateway.address, "/generate", body))
            await held(f.gateway, 1)
            update = {"new_version": "2", "abort_all_requests": False}
            answer = await call(f.gateway.address, "/update_weight_version", update)
            assert answer.status == 200, answer.body
            engine.thaw()
        assert [one.result().headers["x-forebay-weight-version"] for one in (first, second)] == ["1", "2"]


async def test_a_beginning_that_is_there_is_waited_for_by_nobody() -> None:
    async with fleet(1, gateway=ON, **SLOW) as f:
        await f.generate(SIBLING)
        await f.settled()
        (engine,) = f.engines
        engine.freeze()
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(f.generate([*SIBLING, tail])) for tail in range(3)]
            await engine.wait_for(lambda one: one.running + one.waiting == 3, PATIENCE_S)
            engine.thaw()
        assert [cached_tokens(one.result()) for one in calls] == [len(PROMPT)] * 3
        assert await scrape(f.gateway) == counts(0)


async def test_what_was_computed_before_anybody_asked_is_waited_for_by_nobody() -> None:
    """The first one still runs, and its unary answer is far away."""
    async with fleet(1, gateway=ON, inter_token_ms=20, **SLOW) as f, wire(f.gateway.address) as first:
        await f.generate([900, *PROMPT[1:]])
        endless = {"input_ids": SIBLING, "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": True}}
        await first.send(request_bytes("/generate", endless))
        worker = f.engines[0].url.removeprefix("http://")
        await until(lambda: f.gateway.gateway.kv.blocks(worker, 0) >= 2 * BLOCKS, "its prompt is announced")
        await until(lambda: f.gateway.state()["awaited_prefills"] == 0, "that is noted")
        assert cached_tokens(await f.generate(SIBLING)) == len(PROMPT)
        first.close()
        await f.gateway.settle()
        assert await scrape(f.gateway) == counts(0)


async def test_who_shares_less_than_the_option_says_does_not_wait() -> None:
    async with fleet(1, gateway={"kv_coalesce_tokens": 4 * BLOCK + 1}, **SLOW) as f:
        await f.generate([900, *PROMPT[1:]])
        await f.settled()
        (engine,) = f.engines
        engine.freeze()
        async with asyncio.TaskGroup() as group:
            group.create_task(f.generate(SIBLING))
            await engine.wait_for(lambda one: one.running + one.waiting == 1, PATIENCE_S)
            group.create_task(f.generate([*PROMPT[: 4 * BLOCK], *[800] * 100]))
            await engine.wait_for(lambda one: one.running + one.waiting == 2, PATIENCE_S)
            longer = group.create_task(f.generate([*PROMPT[: 5 * BLOCK], *[800] * 100]))
            await held(f.gateway, 1)
            engine.thaw()
        assert cached_tokens(longer.result()) >= BLOCK
        assert await scrape(f.gateway) == counts(1)


# Scripted engines.


class Stage:
    """A gateway before scripted engines without events: a prompt's first output tells that it is computed.

    All prompts begin alike, and are told apart by their last token.

    Attributes:
        engines: See above.
        gateway: See above.
    """

    def __init__(self, engines: Sequence[ScriptEngine], running: RunningGateway, stack: AsyncExitStack) -> None:
        self.engines = engines
        self.gateway = running
        self._stack = stack
        self._kept: dict[int, list[str]] = {}
        for engine in engines:
            engine.script = self._script

    @property
    def load(self) -> RankLoad:
        """What is booked at the first engine."""
        (load,) = next(iter(self.gateway.gateway.services.fleet)).loads
        return load

    def seen(self) -> list[int]:
        """Whom engines have seen."""
        return [_name(request) for engine in self.engines for request in engine.requests if _name(request)]

    async def send(self, name: int, headers: dict[str, str] | None = None, **more: Any) -> Wire:
        """Send a prompt, on a connection of its own."""
        connection = await self._stack.enter_async_context(wire(self.gateway.address))
        body = {"input_ids": [*PROMPT, name], "stream": True, "rid": f"r{name}", **more}
        await connection.send(request_bytes("/generate", body, headers=headers))
        return connection

    async def leads(self, name: int = 1, **more: Any) -> Wire:
        """Send one whose answer the engine keeps until ``lets``."""
        self.keeps(name)
        connection = await self.send(name, **more)
        await self.reaches(name)
        return connection

    def keeps(self, name: int) -> None:
        """Have the engine keep the answer to one."""
        self._kept[name] = []

    def lets(self, name: int, *steps: str) -> None:
        """Have the engine answer one of those, in these steps."""
        self._kept[name] += steps or ("answer",)

    async def follows(self, name: int = 2, count: int = 1, **more: Any) -> Wire:
        """Send one that makes so many who are held; nothing of it is at an engine when another one was answered."""
        connection = await self.send(name, **more)
        await held(self.gateway, count)
        await self.passes()
        assert name not in self.seen()
        return connection

    async def reaches(self, *names: int) -> None:
        """Wait until these are at an engine."""
        await until(lambda: set(names) <= set(self.seen()), f"{names} at an engine, seen: {self.seen()}")

    async def passes(self) -> None:
        """Have something else go there and back."""
        assert (await call(self.gateway.address, "/generate", {"input_ids": [0]})).status == 200

    async def record(self, name: int) -> AccessRecord:
        """The access record of one."""

        def found() -> list[AccessRecord]:
            return [one for one in self.gateway.records if one.request_id == f"r{name}"]

        await until(lambda: bool(found()), f"the record of {name}")
        return found()[0]

    async def ends(self, total: int, late: int = 0) -> None:
        """Nothing is left of anything, and so many have been held."""
        await self.gateway.settle()
        assert await scrape(self.gateway) == counts(total, late)

    async def _script(self, request: SeenRequest, reply: Reply) -> None:
        steps = self._kept.get(_name(request), ["answer"])
        has_begun = False
        while True:
            await until(lambda: bool(steps) or reply.is_gone, "the next step")
            if not steps:
                raise ConnectionResetError
            match steps.pop(0):
                case "first event":
                    await reply.start_chunked()
                    await reply.event(_item(request, "null"))
                    has_begun = True
                case "answer":
                    await _answer(request, reply, has_begun=has_begun)
                    return
                case "reset":
                    reply.reset()
                    return
                case status:
                    await reply.whole(b'{"error":{"message":"no"}}', status=int(status))
                    return


def _name(request: SeenRequest) -> int:
    ids = json.loads(request.body)["input_ids"]
    last = ids[-1][-1] if isinstance(ids[-1], list) else ids[-1]
    assert isinstance(last, int)
    return last


def _item(request: SeenRequest, finish: str = '{"type":"length","length":1}', index: int = 0) -> bytes:
    rid = json.loads(request.body)["rid"]
    rid = rid[index] if isinstance(rid, list) else rid
    return b'{"text":"a","index":%d,"meta_info":{"id":"%b","finish_reason":%b}}' % (
        index,
        rid.encode(),
        finish.encode(),
    )


async def _answer(request: SeenRequest, reply: Reply, *, has_begun: bool) -> None:
    body = json.loads(request.body)
    count = body.get("sampling_params", {}).get("n", 1)
    count = len(body["input_ids"]) if isinstance(body["rid"], list) else count
    items = [_item(request, index=index) for index in range(count)]
    if not body.get("stream"):
        await reply.whole(items[0] if count == 1 else b"[%b]" % b",".join(items))
        return
    if not has_begun:
        await reply.start_chunked()
    for item in items:
        await reply.event(item)
    await reply.event(b"[DONE]")
    await reply.end_chunked()


@asynccontextmanager
async def stage(engines: int = 1, **options: Any) -> AsyncIterator[Stage]:
    """Scripted engines, and a gateway that assumes of their caches what it has sent."""
    options = {"policy": "prefix-approximate", "seed": 1, "max_attempts": 1, **ON, **options}
    async with AsyncExitStack() as outer:
        made = [await outer.enter_async_context(script_engine()) for _ in range(engines)]
        running = await outer.enter_async_context(running_gateway(*(one.url for one in made), **options))
        async with AsyncExitStack() as stack:
            yield Stage(made, running, stack)


async def test_they_go_at_the_first_output() -> None:
    async with stage() as s:
        leader = await s.leads()
        stream, unary = await s.follows(2), await s.follows(3, count=2, stream=False)
        assert s.gateway.state()["awaited_prefills"] == 1
        s.lets(1, "first event")
        assert (await leader.head())[0] == 200
        for follower in (stream, unary):
            assert (await follower.answer()).status == 200
        assert s.seen() == [1, 2, 3]
        await until(lambda: s.load.in_flight == 1, "the first one alone is left")
        assert (s.load.prefill_tokens, s.gateway.state()["awaited_prefills"]) == (0, 0)
        s.lets(1)
        assert (await leader.body(200, {"transfer-encoding": "chunked"})).is_whole
        assert [(await s.record(name)).queue_s is None for name in (1, 2, 3)] == [True, False, False]
        await s.ends(2)


@pytest.mark.parametrize("how", ["500", "400", "reset", "answer"])
async def test_they_go_at_the_end(how: str) -> None:
    async with stage() as s:
        leader = await s.leads()
        follower = await s.follows()
        s.lets(1, how)
        assert ((await leader.answer()).status == 200) is (how == "answer")
        assert (await follower.answer()).status == 200
        assert (await s.record(2)).outcome == "complete"
        await s.ends(1)


@pytest.mark.parametrize("leaves", ["close", "reset"])
async def test_they_go_when_the_first_one_s_client_leaves(leaves: str) -> None:
    async with stage() as s:
        leader = await s.leads()
        follower = await s.follows()
        getattr(leader, leaves)()
        assert (await follower.answer()).status == 200
        assert (await s.record(1)).outcome == "client_closed"
        await s.ends(1)


@pytest.mark.parametrize("how", ["first event", "500", "leaves", "aborted", "late"])
async def test_who_shares_more_waits_for_another_one_then(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the second wait is like that of the first, and the longest time is that of both."""
    if how == "late":
        monkeypatch.setattr(gateway.coalescing, "LONGEST_HOLD_S", 5 * SOON_S)
    async with stage() as s:
        leader = await s.leads()
        s.keeps(2)
        second = await s.follows(2, input_ids=[*SIBLING, *range(700, 700 + BLOCK), 2])
        third = await s.follows(3, count=2, input_ids=[*SIBLING, *range(700, 700 + BLOCK), 3])
        s.lets(1, "first event")
        await s.reaches(2)
        await held(s.gateway, 1)
        await s.passes()
        assert 3 not in s.seen()
        if how == "leaves":
            second.close()
        elif how == "aborted":
            assert (await call(s.gateway.address, "/abort_request", {"rid": "r2"})).json()["aborted"] == ["r2"]
        elif how != "late":
            s.lets(2, how)
        assert (await third.answer()).status == 200
        s.lets(2)
        s.lets(1)
        assert (await leader.answer()).status == 200
        record = await s.record(3)
        assert record.queue_s is not None
        assert 0 < record.queue_s <= record.duration_s
        await s.ends(2, late=int(how == "late"))


async def test_a_request_that_is_tried_again_elsewhere_is_waited_for_no_more() -> None:
    async with stage(2, max_attempts=2) as s:
        leader = await s.leads()
        follower = await s.follows()
        s.lets(1, "503", "answer")
        assert (await leader.answer()).status == 200
        assert (await follower.answer()).status == 200
        assert (await s.record(1)).attempts == 2
        await s.ends(1)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("leaves", ["close", "reset"])
async def test_one_that_leaves_while_it_is_held_reaches_no_engine(leaves: str, is_stream: bool) -> None:
    async with stage() as s:
        leader = await s.leads()
        load = s.load
        before = load.in_flight, load.blocks, load.prefill_tokens
        follower = await s.follows(stream=is_stream)
        assert load.in_flight == 2
        getattr(follower, leaves)()
        record = await s.record(2)
        assert (record.outcome, record.status) == ("client_closed", 499)
        assert record.queue_s is not None
        assert 0 < record.queue_s <= record.duration_s
        assert "\nforebay_queue_seconds_count 1.0\n" in (await s.gateway.client.get("/metrics")).text
        assert (load.in_flight, load.blocks, load.prefill_tokens) == before
        assert s.gateway.state()["held_requests"] == 0
        s.lets(1)
        assert (await leader.answer()).status == 200
        await s.passes()
        assert s.seen() == [1]
        await s.ends(1)


async def test_clients_that_leave_together_send_each_other_nowhere() -> None:
    async with stage() as s:
        connections = [await s.leads(), *[await s.follows(2 + count, 1 + count) for count in range(5)]]
        for connection in connections:
            connection.close()
        for name in range(1, 7):
            assert (await s.record(name)).outcome == "client_closed"
        await s.passes()
        assert s.seen() == [1]
        await s.ends(5)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_one_that_is_aborted_while_it_is_held_reaches_no_engine(is_stream: bool) -> None:
    async with stage() as s:
        leader = await s.leads()
        follower = await s.follows(stream=is_stream)
        report = await call(s.gateway.address, "/abort_request", {"rid": "r2"})
        assert report.json()["aborted"] == ["r2"]
        answer = await follower.answer()
        assert (answer.status, answer.json()["error"]["type"]) == (499, "aborted")
        assert (await s.record(2)).outcome == "aborted"
        s.lets(1)
        assert (await leader.answer()).status == 200
        await s.passes()
        assert s.seen() == [1]
        assert s.engines[0].aborted == []
        await s.ends(1)


async def test_samples_wait_once_or_each_and_a_batch_never() -> None:
    async with stage() as s:
        leader = await s.leads()
        two: dict[str, Any] = {"sampling_params": {"n": 2}}
        streamed = await s.follows(2, **two)
        apart = await s.follows(3, count=3, stream=False, **two)
        batch = await s.send(4, input_ids=[[*PROMPT, 9], [*PROMPT, 4]], rid=["x", "r4"], stream=False)
        answer = await batch.answer()
        assert (answer.status, len(answer.json()), s.seen()) == (200, 2, [1, 4])
        s.lets(1)
        assert {json.loads(one)["index"] for one in (await streamed.answer()).events()[:-1]} == {0, 1}
        assert len((await apart.answer()).json()) == 2
        assert sorted(s.seen()) == [1, 2, 3, 3, 4]
        assert (await leader.answer()).status == 200
        waited = await s.record(3)
        assert waited.queue_s is not None
        assert waited.queue_s <= waited.duration_s  # counted once for both
        await s.ends(3)


async def test_a_unary_answer_without_events_holds_nobody() -> None:
    """It would be over before anybody knew that its prompt is computed."""
    async with stage() as s:
        leader = await s.leads(stream=False)
        assert (await (await s.send(2)).answer()).status == 200
        assert (await (await s.send(3, stream=False)).answer()).status == 200
        s.lets(1)
        assert (await leader.answer()).status == 200
        await s.ends(0)


async def test_other_prompts_and_other_workers_hold_nobody() -> None:
    async with stage(2) as s:
        leader = await s.leads(headers={"x-forebay-worker": s.engines[0].url.removeprefix("http://")})
        there = {"x-forebay-worker": s.engines[1].url.removeprefix("http://")}
        assert (await (await s.send(2, headers=there)).answer()).status == 200
        assert (await (await s.send(3, input_ids=[5, *PROMPT, 3])).answer()).status == 200
        s.lets(1)
        assert (await leader.answer()).status == 200
        await s.ends(0)


async def test_a_beginning_that_was_sent_before_is_waited_for_by_nobody() -> None:
    async with stage() as s:
        assert (await (await s.send(9)).answer()).status == 200
        leader = await s.leads(input_ids=[*PROMPT, *range(500, 500 + len(PROMPT)), 1])
        assert (await (await s.send(2)).answer()).status == 200
        further = await s.follows(3, input_ids=[*PROMPT, *range(500, 500 + BLOCK), 3])
        s.lets(1)
        for one in (leader, further):
            assert (await one.answer()).status == 200
        await s.ends(1)


async def test_nobody_is_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.coalescing, "LONGEST_HOLD_S", SOON_S)
    async with stage() as s:
        leader = await s.leads()
        follower = await s.send(2)
        assert (await follower.answer()).status == 200
        queue_s = (await s.record(2)).queue_s
        assert queue_s is not None
        assert queue_s >= SOON_S * 0.9
        assert s.gateway.state()["awaited_prefills"] == 0
        s.lets(1)
        assert (await leader.answer()).status == 200
        await s.ends(1, late=1)


async def test_who_went_in_time_or_left_is_not_late_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.coalescing, "LONGEST_HOLD_S", 10 * SOON_S)
    async with stage() as s:
        first = await s.leads()
        in_time, left = await s.follows(2), await s.follows(3, count=2)
        left.close()
        await s.record(3)
        s.lets(1)
        for one in (first, in_time):
            assert (await one.answer()).status == 200
        second = await s.leads(4, input_ids=[5, *PROMPT, 4])
        late = await s.send(5, input_ids=[5, *PROMPT, 5])
        assert (await late.answer()).status == 200  # by now the others would be late, too
        s.lets(4)
        assert (await second.answer()).status == 200
        await s.ends(3, late=1)


async def test_a_wait_is_in_the_seconds_of_the_queue() -> None:
    async with stage() as s:
        leader = await s.leads()
        follower = await s.follows()
        s.lets(1)
        for one in (leader, follower):
            assert (await one.answer()).status == 200
        queue_s = (await s.record(2)).queue_s
        assert queue_s is not None
        lines = (await s.gateway.client.get("/metrics")).text.splitlines()
        sums = [float(line.split(" ")[1]) for line in lines if line.startswith("forebay_queue_seconds_sum")]
        assert sum(sums) == pytest.approx(queue_s)


async def test_a_held_stream_s_client_gets_signs_of_life() -> None:
    async with stage(sse_keepalive_s=SOON_S / 4) as s:
        leader = await s.leads()
        follower = await s.send(2)
        assert (await follower.head())[0] == 200
        for _ in range(3):
            assert await follower.chunk() == b": keep-alive\n\n"
        assert s.seen() == [1]
        s.lets(1)
        answer = await follower.body(200, {"transfer-encoding": "chunked"})
        assert (answer.is_whole, answer.events()[-1]) == (True, b"[DONE]")
        assert (await leader.answer()).is_whole
        await s.ends(1)


@pytest.mark.parametrize("limit", ["request_timeout_s", "first_token_timeout_s"])
async def test_deadlines_go_on_through_the_wait(limit: str) -> None:
    options: dict[str, Any] = {limit: 3 * SOON_S}
    async with stage(**options) as s:
        leader = await s.leads()
        s.keeps(2)
        follower = await s.send(2)
        for one in (leader, follower):
            answer = await one.answer()
            assert (answer.status, answer.json()["error"]["type"]) == (504, "timeout")
        assert (await s.record(2)).outcome == "timeout"
        await s.ends(1)


# The worker or the gateway goes.


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_worker_that_is_drained_serves_whom_it_has_been_given(is_stream: bool) -> None:
    async with stage(drain_timeout_s=PATIENCE_S) as s:
        leader = await s.leads()
        follower = await s.follows(stream=is_stream)
        worker = s.engines[0].url.removeprefix("http://")
        removal = await call(s.gateway.address, f"/workers/{worker}", method="DELETE")
        assert removal.status == 202
        s.lets(1)
        for one in (leader, follower):
            assert (await one.answer()).status == 200
        await until(lambda: s.gateway.gateway.services.fleet.get(worker) is None, "it is removed")
        await s.ends(1)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_worker_s_removal_ends_who_is_held(is_stream: bool) -> None:
    async with stage() as s:
        leader = await s.leads()
        follower = await s.follows(stream=is_stream)
        worker = s.engines[0].url.removeprefix("http://")
        await call(s.gateway.address, f"/workers/{worker}?drain_timeout_s=0", method="DELETE")
        for one in (leader, follower):
            answer = await one.answer()
            assert (answer.status, answer.json()["error"]["type"]) == (503, "unavailable")
        assert s.seen() == [1]
        await s.ends(1)


async def test_an_engine_that_dies_loses_nobody_who_is_held() -> None:
    async with stage(2, max_attempts=2) as s:
        leader = await s.leads(headers={"x-forebay-worker": s.engines[0].url.removeprefix("http://")})
        follower = await s.follows()
        await s.engines[0].stop()
        assert (await follower.answer()).status == 200
        assert (await leader.answer()).status == 503
        assert (await s.record(2)).worker == s.engines[1].url.removeprefix("http://")
        await s.ends(1)


async def test_a_drain_waits_for_who_is_held() -> None:
    async with stage(drain_timeout_s=PATIENCE_S) as s:
        leader = await s.leads()
        follower = await s.follows()
        s.gateway.gateway.begin_drain()
        s.lets(1)
        for one in (leader, follower):
            assert (await one.answer()).status == 200
        await until(s.gateway.gateway.drained.is_set, "the drain's end")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_at_the_drain_s_end_who_is_held_reaches_no_engine(is_stream: bool) -> None:
    async with stage(drain_timeout_s=0) as s:
        leader = await s.leads()
        followers = [await s.follows(name, count, stream=is_stream) for count, name in enumerate((2, 3), 1)]
        s.gateway.gateway.begin_drain()
        for one in (leader, *followers):
            answer = await one.answer()
            assert (answer.status, answer.json()["error"]["type"]) == (503, "engine_shutdown")
        await until(s.gateway.gateway.drained.is_set, "the drain's end")
        assert {record.outcome for record in s.gateway.records[-3:]} == {"shutdown"}
        assert s.seen() == [1]
        await s.gateway.settle()


# Events that come no more.


@pytest.mark.parametrize("how", ["cleared", "lost"])
async def test_who_has_computed_its_prompt_holds_nobody_when_events_forget_it(how: str) -> None:
    """Its unary answer may be minutes away."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    async with AsyncExitStack() as outer:
        outer.callback(context.destroy, linger=0)
        publisher = await outer.enter_async_context(kv_publisher(context, has_replay=False))
        engine = await outer.enter_async_context(script_engine())
        announces(engine, publisher)
        running = await outer.enter_async_context(running_gateway(engine.url, seed=1, **ON))
        s = Stage([engine], running, await outer.enter_async_context(AsyncExitStack()))
        kv, worker = running.gateway.kv, engine.url.removeprefix("http://")
        await until(lambda: publisher.subscriptions >= 1 and kv.is_trusted((worker, 0)), "the source is trusted")
        names = tuple(range(1, BLOCKS + 1))
        publisher.publish(BlockStored((98,), None, pack_tokens([2] * BLOCK), BLOCK))
        await until(lambda: kv.blocks(worker, 0) == 1, "the rank has been heard")
        leader = await s.leads(stream=False)
        assert running.state()["awaited_prefills"] == 1
        publisher.publish(BlockStored(names, None, pack_tokens(PROMPT), BLOCK))
        await until(lambda: kv.blocks(worker, 0) == 1 + BLOCKS, "its prompt is announced")
        publisher.publish(AllBlocksCleared(), is_lost=how == "lost")
        publisher.publish(BlockStored((99,), None, pack_tokens([3] * BLOCK), BLOCK))
        await until(lambda: kv.position(worker, 0)[1] == 3, "the last events have come")
        await s.passes()
        for name in (2, 3):
            assert (await (await s.send(name, stream=False)).answer()).status == 200
        s.lets(1)
        assert (await leader.answer()).status == 200
        await s.ends(0)

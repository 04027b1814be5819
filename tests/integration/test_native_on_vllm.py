"""SGLang's native request on vLLM workers, through the gateway: answers and ends are those of SGLang."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from backends.vllm.native_request import PATH
from gateway.native_request import MAX_LEGS
from gateway.tokens.files import load_tokenizer
from simulator.log import RequestEntry
from simulator.server import SimulatedEngine
from tests.backends.vllm.native_agreement import items_of, payloads, told
from tests.fakes.pair_fleet import pair_fleet
from tests.fakes.running import RunningGateway, running_gateway, until
from tests.fakes.script_engine import script_engine
from tests.fakes.scripted_pair import DONE, VLLM_METADATA, Stage
from tests.fakes.wire import Answer, call, request_bytes, wire
from tests.integration.test_vllm import HEX_ID, aborted_ids, ask, engines, leave, only, running, served

GENERATE = "/generate"
LONG: dict[str, Any] = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 5000, "ignore_eos": True}}
BATCH: dict[str, Any] = {**LONG, "input_ids": [[5, 6], [7], [8]]}
TOP: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 3}
CHOSEN: dict[str, Any] = {"return_logprob": True, "token_ids_logprob": [81, 300, 80]}
SEEDED: dict[str, Any] = {"sampling_seed": 11}


def sampling(**more: Any) -> dict[str, Any]:
    return {"sampling_params": {"max_new_tokens": 6, **more}}


def entries_of(*started: SimulatedEngine) -> list[RequestEntry]:
    """The legs that engines saw."""
    return [entry for engine in started for entry in engine.log.requests_to(PATH)]


@asynccontextmanager
async def both(*, native_n: bool = True, **sglang: Any) -> AsyncIterator[tuple[RunningGateway, SimulatedEngine]]:
    """A gateway with one worker of each kind, to either of which a request can be pinned; and the vLLM engine.

    The simulated engines draw the samples of one request alike, and greedy ones like separate requests only.
    """
    options: dict[str, Any] = {"seed": 7, "inter_token_ms": 0.0}
    async with (
        engines(options, {**options, "engine": "sglang", **sglang}) as (vllm, other),
        running_gateway(vllm.url, other.url, native_n=native_n) as gateway,
    ):
        yield gateway, vllm


async def answers(gateway: RunningGateway, body: dict[str, Any]) -> list[Any]:
    """What a vLLM worker says, and what an SGLang worker does."""
    found = []
    for member in gateway.gateway.services.fleet:
        answer = await ask(gateway, GENERATE, {**body, "rid": "R"}, x_forebay_worker=member.worker.id)
        assert (answer.status, answer.headers["x-forebay-worker"]) == (200, member.worker.id), answer.body
        found.append(payloads(answer.body) if body.get("stream") else answer.json())
    return found


UNARY = [
    pytest.param({"input_ids": [5, 6, 7], **sampling()}, id="ids"),
    pytest.param({"text": "hello there", **sampling(temperature=0)}, id="text, by the engine's tokenizer"),
    pytest.param({"input_ids": [[5, 6], [7]], **sampling()}, id="batch"),
    pytest.param({"input_ids": [[5, 6]], **sampling()}, id="batch of one"),
    pytest.param({"input_ids": [5], **sampling(**SEEDED, n=3)}, id="samples"),
    pytest.param({"input_ids": [[5], [6]], **sampling(**SEEDED, n=2)}, id="samples of a batch"),
    pytest.param({"input_ids": [5], **sampling(n=3, temperature=0)}, id="greedy samples"),
    pytest.param({"input_ids": [5, 6], "return_logprob": True, **sampling()}, id="log-probabilities"),
    pytest.param({**TOP, "input_ids": [5, 6], **sampling()}, id="likeliest tokens"),
    pytest.param({**CHOSEN, "input_ids": [5, 6], **sampling()}, id="chosen tokens"),
    pytest.param({**TOP, "input_ids": [5, 6, 9], "logprob_start_len": 0, **sampling()}, id="of the prompt too"),
    pytest.param(
        {**TOP, "input_ids": [5, 6], "return_flat_raw_output_top_logprobs": True, **sampling()}, id="flat arrays"
    ),
    pytest.param({"input_ids": [5, 6], "return_prompt_token_ids": True, **sampling()}, id="the prompt's ids"),
    pytest.param({"input_ids": [5, 6], **sampling(max_new_tokens=0)}, id="no output"),
    pytest.param(
        {"input_ids": [[5], [6]], "sampling_params": [{"max_new_tokens": 2}, {"max_new_tokens": 4}]}, id="each its own"
    ),
]


@pytest.mark.parametrize("body", UNARY)
async def test_answers_are_those_of_sglang(body: dict[str, Any]) -> None:
    async with both(native_n="temperature" not in body["sampling_params"]) as (gateway, vllm):
        found, expected = await answers(gateway, body)
        assert isinstance(found, list) == isinstance(expected, list)
        assert [told(one) for one in items_of(found)] == [told(one) for one in items_of(expected)]
        ids = [one["meta_info"]["id"] for one in items_of(expected)]
        assert [one["meta_info"]["id"] for one in items_of(found)] == ids
        for mine, theirs in zip(items_of(found), items_of(expected), strict=True):
            assert mine.get("text", theirs["text"]) == theirs["text"]
        assert vllm.log.requests_to(PATH)


STREAMS = [
    pytest.param({"input_ids": [5, 6, 7], **sampling()}, id="ids"),
    pytest.param({**TOP, "input_ids": [[5, 6], [7]], **sampling()}, id="batch"),
    pytest.param({"input_ids": [5], **sampling(**SEEDED, n=2)}, id="samples"),
    pytest.param({"input_ids": [5], "return_logprob": True, **sampling()}, id="log-probabilities"),
    pytest.param({**CHOSEN, "input_ids": [5], **sampling()}, id="chosen tokens"),
]


@pytest.mark.parametrize("body", STREAMS)
@pytest.mark.parametrize("is_incremental", [False, True], ids=["cumulative", "incremental"])
async def test_streams_are_those_of_sglang(body: dict[str, Any], is_incremental: bool) -> None:
    """Compared is what the events of each item amount to, since engines cut at other places."""
    async with both(incremental_streaming_output=is_incremental) as (gateway, _):
        found, expected = await answers(gateway, {**body, "stream": True})
        indices = {event.get("index") for event in expected}
        assert {event.get("index") for event in found} == indices
        for index in indices:
            mine, theirs = ([event for event in one if event.get("index") == index] for one in (found, expected))
            if is_incremental:
                assert [t for e in mine for t in e["output_ids"]] == [t for e in theirs for t in e["output_ids"]]
                assert mine[-1]["meta_info"]["finish_reason"] == theirs[-1]["meta_info"]["finish_reason"]
            else:
                assert told(mine[-1]) == told(theirs[-1])


async def test_a_local_tokenizer_tells_the_ids_of_texts() -> None:
    path = Path(__file__).parents[1] / "data" / "tokenizers" / "vllm-tiny"
    one = load_tokenizer("m", path)
    expected = [list(one.tokenizer.encode(text).ids) for text in ("hello there", "and you")]
    async with (
        engines({"model": "m"}) as (engine,),
        running_gateway(engine.url, tokenizer=(f"m={path}",)) as gateway,
    ):
        body = {"text": ["hello there", "and you"], "session_id": "mine", **sampling()}
        answer = await ask(gateway, GENERATE, {**body, "return_prompt_token_ids": True})
        assert [item["prompt_token_ids"] for item in answer.json()] == expected
        assert [json.loads(entry.body or b"")["token_ids"] for entry in entries_of(engine)] == expected
        assert engine.log.requests_to("/tokenize") == []


async def test_ids_and_headers() -> None:
    async with served() as (engine, gateway):
        body = {"input_ids": [5], "session_id": "mine", "rid": "R", **sampling()}
        answer = await ask(gateway, GENERATE, body, x_session_id="theirs", x_smg_routing_key="key")
        assert (answer.headers["x-request-id"], answer.json()["meta_info"]["id"]) == ("R", "R")
        assert answer.headers["content-length"] == str(len(answer.body))
        seen = only(engine, PATH)
        given = seen.header("x-request-id")
        assert given is not None
        assert HEX_ID.fullmatch(given)
        assert [value for name, value in seen.headers if name == "x-session-id"] == ["mine"]
        assert seen.header("x-smg-routing-key") == "key"
        record = await gateway.record()
        assert (record.route, record.outcome, record.request_id, record.engine_ids) == (
            GENERATE, "complete", "R", (given,),
        )  # fmt: skip
        assert (record.prompt_tokens, record.completion_tokens, record.attempts) == (1, 6, 1)


async def test_items_of_a_batch_may_have_ids_of_their_own() -> None:
    async with served() as (_, gateway):
        answer = await ask(gateway, GENERATE, {"input_ids": [[5], [6]], "rid": ["a", "b"], **sampling()})
        assert [one["meta_info"]["id"] for one in answer.json()] == ["a", "b"]


async def test_vllm_pairs_serve_native_requests_by_decode_alone() -> None:
    async with pair_fleet(engine="vllm") as fleet:
        answer = await fleet.call(GENERATE, {"input_ids": [5, 6], **sampling()})
        assert (answer.status, answer.json()["meta_info"]["completion_tokens"]) == (200, 6)
        assert fleet.decodes[0].log.requests_to(PATH)
        assert fleet.prefills[0].log.requests_to(PATH) == []


async def test_without_a_decode_worker_native_requests_are_refused() -> None:
    async with (
        engines({"role": "prefill", "bootstrap_port": 0}) as (engine,),
        running_gateway(f"{engine.url},role=prefill") as gateway,
    ):
        answer = await ask(gateway, GENERATE, {"input_ids": [5, 6], **sampling()})
        assert (answer.status, answer.json()["error"]["type"]) == (503, "unavailable")
        assert "no worker that serves requests alone" in answer.json()["error"]["message"]
        assert engine.log.requests_to(PATH) == []


# Clients that leave, and aborts.


@pytest.mark.parametrize("body", [pytest.param(LONG, id="one"), pytest.param(BATCH, id="batch")])
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
@pytest.mark.parametrize("phase", ["before the first token", "in the answer"])
async def test_a_client_that_leaves_closes_all_calls(body: dict[str, Any], is_stream: bool, phase: str) -> None:
    async with served() as (engine, gateway), wire(gateway.address) as connection:
        legs = len(body["input_ids"]) if body is BATCH else 1
        if phase == "before the first token":
            engine.freeze()
        await connection.send(request_bytes(GENERATE, {**body, "stream": is_stream}))
        await until(lambda: len(engine.log.requests_to(PATH)) == legs, "the requests")
        if phase == "in the answer":
            await running(engine, legs, tokens=3 * legs)
        leave(connection, "close")
        record = await gateway.record()
        assert (record.outcome, record.status) == ("client_closed", 499)
        await until(lambda: len(engine.log.disconnects) == legs, "the calls closed")
        assert aborted_ids(engine) == []


@pytest.mark.parametrize(
    ("more", "legs", "samples"),
    [
        pytest.param({}, 1, 1, id="one"),
        pytest.param({"input_ids": [[5], [6]]}, 2, 1, id="batch"),
        pytest.param({"sampling_params": {**LONG["sampling_params"], "n": 2}}, 1, 2, id="samples"),
    ],
)
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_the_caller_of_an_aborted_request_gets_the_partial_answer(
    more: dict[str, Any], legs: int, samples: int, is_stream: bool
) -> None:
    async with served() as (engine, gateway), wire(gateway.address) as connection:
        await connection.send(request_bytes(GENERATE, {**LONG, **more, "rid": "R", "stream": is_stream}))
        await running(engine, legs * samples, tokens=5 * legs * samples)
        assert (await ask(gateway, "/abort_request", {"rid": "R"})).json()["aborted"] == ["R"]
        answer = await connection.answer()
        assert answer.status == 200
        items = payloads(answer.body) if is_stream else items_of(answer.json())
        ends = [one["meta_info"]["finish_reason"] for one in items if one["meta_info"]["finish_reason"]]
        assert [end["type"] for end in ends] == ["abort"] * legs * samples
        assert (await gateway.record()).outcome == "aborted"
        sent = [entry.header("x-request-id") for entry in engine.log.requests_to(PATH)]
        assert sorted(aborted_ids(engine)) == sorted(f"generate-tokens-{one}" for one in sent)


async def test_one_item_can_be_aborted() -> None:
    async with served() as (engine, gateway), wire(gateway.address) as connection:
        await connection.send(request_bytes(GENERATE, {**LONG, "input_ids": [[5], [6]], "rid": "R"}))
        await running(engine, 2, tokens=4)
        assert (await ask(gateway, "/abort_request", {"rid": "R_1"})).json()["aborted"] == ["R_1"]
        await running(engine, 1)
        made = engine.core.schedulers[0].totals.generated_tokens
        await running(engine, 1, tokens=made + 20)
        await ask(gateway, "/abort_request", {"rid": "R_0"})
        first, second = (await connection.answer()).json()
        assert len(first["output_ids"]) > len(second["output_ids"])
        assert len(aborted_ids(engine)) == 2


async def test_a_sample_is_aborted_with_those_of_its_prompt() -> None:
    body = {**LONG, "input_ids": [[5], [6]], "sampling_params": {**LONG["sampling_params"], "n": 2}, "rid": "R"}
    async with served() as (engine, gateway), wire(gateway.address) as connection:
        await connection.send(request_bytes(GENERATE, body))
        await running(engine, 4, tokens=8)
        assert (await ask(gateway, "/abort_request", {"rid": "R_3"})).json()["aborted"] == ["R_3"]
        await running(engine, 2)
        await ask(gateway, "/abort_request", {"rid": "R"})
        lengths = [len(item["output_ids"]) for item in (await connection.answer()).json()]
        assert min(lengths[:2]) >= max(lengths[2:])


# Refusals.


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param({"input_ids": [5], "image_data": "x"}, "image_data", id="a field"),
        pytest.param({"input_ids": [5], **sampling(stop_regex="a")}, "sampling_params.stop_regex", id="a parameter"),
        pytest.param({"input_ids": [5], **sampling(nonsense=1)}, "sampling_params.nonsense", id="unknown"),
        pytest.param({"text": 5}, "text", id="a text that is none"),
        pytest.param({"text": ["a", "b"]}, "text", id="texts that only a local tokenizer can tell"),
        pytest.param({"input_ids": [[5]] * (MAX_LEGS + 1)}, "input_ids", id="too many prompts"),
        pytest.param({"input_ids": [5], **sampling(n=MAX_LEGS + 1, temperature=0)}, "sampling_params.n", id="samples"),
    ],
)
async def test_what_vllm_cannot_do_is_refused_before_it_sees_it(body: dict[str, Any], param: str) -> None:
    async with served() as (engine, gateway):
        answer = await ask(gateway, GENERATE, body)
        assert (answer.status, answer.json()["error"]["param"]) == (400, param)
        assert (await gateway.record()).outcome == "rejected"
        assert [one for one in engine.log.requests if one.method == "POST" and one.path != "/tokenize"] == []


async def test_the_workers_own_refusal_passes() -> None:
    async with served() as (_, gateway):
        answer = await ask(gateway, GENERATE, {"input_ids": [5], **sampling(top_p=3)})
        assert (answer.status, "top_p" in answer.json()["error"]["message"]) == (400, True)
        assert "request_id" not in answer.json()["error"]


async def test_a_worker_without_the_token_route_is_asked_once() -> None:
    async with served(enable_scale_out=False) as (engine, gateway):
        for _ in range(2):
            answer = await ask(gateway, GENERATE, {"input_ids": [5], **sampling()})
            assert (answer.status, answer.json()["error"]["type"]) == (501, "not_implemented")
            assert "--enable-scale-out" in answer.json()["error"]["message"]
        assert len(engine.log.requests_to(PATH)) == 1
        assert (await ask(gateway, "/v1/completions", {"prompt": "a", "max_tokens": 2})).status == 200
        member = next(iter(gateway.gateway.services.fleet))
        assert member.breaker.state.value == "closed"


async def test_requests_go_round_workers_without_the_token_route() -> None:
    async with (
        engines({"enable_scale_out": False}, {"enable_scale_out": False}, {"engine": "sglang"}) as started,
        running_gateway(*[one.url for one in started], policy="round-robin", max_attempts=1) as gateway,
    ):
        for _ in range(6):
            assert (await ask(gateway, GENERATE, {"input_ids": [5], **sampling()})).status == 200
        assert [len(one.log.requests_to(PATH)) for one in started[:2]] == [1, 1]


async def test_a_mixed_fleet_serves_native_requests_by_all() -> None:
    async with (
        engines({}, {"engine": "sglang"}) as (vllm, sglang),
        running_gateway(vllm.url, sglang.url, policy="round-robin") as gateway,
    ):
        for _ in range(8):
            assert (await ask(gateway, GENERATE, {"input_ids": [5], **sampling()})).status == 200
        assert [len(vllm.log.requests_to(PATH)), len(sglang.log.requests_to(GENERATE))] == [4, 4]


async def test_explaining_sends_nothing_to_an_engine() -> None:
    async with served() as (engine, gateway):
        for body in ({"input_ids": [5]}, {"text": "a " * 300}):
            explained = (await gateway.client.post("/route/explain", json=body)).json()
            assert explained["chosen"]["worker_id"] == engine.url.removeprefix("http://")
        refused = (await gateway.client.post("/route/explain", json={"text": "a", "image_data": "x"})).json()
        assert (refused["chosen"], "image_data" in refused["reason"]) == (None, True)
        assert [one for one in engine.log.requests if one.method == "POST"] == []


async def test_higher_priorities_of_native_requests_go_first() -> None:
    settings = {"max_in_flight_per_worker": 1}
    async with served(settings=settings) as (engine, gateway), asyncio.TaskGroup() as group:
        held = group.create_task(ask(gateway, GENERATE, {**LONG, "rid": "held"}))
        await running(engine)
        for number, priority in enumerate((1, 7, 4), 1):
            group.create_task(ask(gateway, GENERATE, {"input_ids": [priority], "priority": priority, **sampling()}))
            await until(lambda n=number: gateway.state()["queued_requests"] == n, "it waits")  # type: ignore[misc]
        await ask(gateway, "/abort_request", {"rid": "held"})
        assert (await held).status == 200
        await gateway.record(4)
        sent = [json.loads(entry.body or b"") for entry in entries_of(engine)[1:]]
        assert [(one["token_ids"], one["priority"]) for one in sent] == [([7], -7), ([4], -4), ([1], -1)]


# What engines do wrong.


def event(*tokens: int, index: int = 0, finish: str | None = None, text: str = "a") -> bytes:
    choice = {"index": index, "token_ids": tokens, "text": text, "logprobs": None, "finish_reason": finish}
    return b"data: " + json.dumps({"request_id": "x", "choices": [choice]}).encode() + b"\n\n"


def whole(*tokens: int, text: str = "a") -> bytes:
    choice = {"index": 0, "token_ids": tokens, "text": text, "logprobs": None, "finish_reason": "length"}
    return json.dumps({"request_id": "x", "choices": [choice]}).encode()


ERROR = b'data: {"error":{"message":"broken","type":"InternalServerError","param":null,"code":500}}\n\n'
NO_TEXT = b'{"error":{"message":"output_mode=\'text\' requires a tokenizer","type":"BadRequestError","code":400}}'


@asynccontextmanager
async def scripted(count: int = 1, **options: Any) -> AsyncIterator[tuple[list[Stage], RunningGateway]]:
    """vLLM workers whose answers the test gives, and a gateway in front of them."""
    async with AsyncExitStack() as stack:
        stages = [Stage(await stack.enter_async_context(script_engine())) for _ in range(count)]
        for stage in stages:
            stage.engine.metadata = dict(VLLM_METADATA)
        specs = [f"{stage.engine.url},engine=vllm" for stage in stages]
        yield stages, await stack.enter_async_context(running_gateway(*specs, seed=1, **options))


async def begun(group: asyncio.TaskGroup, gateway: RunningGateway, **body: Any) -> asyncio.Task[Answer]:
    sent = {"input_ids": [5], "rid": "R", **sampling(), **body}
    return group.create_task(call(gateway.address, GENERATE, sent))


async def test_a_worker_without_a_tokenizer_is_asked_for_ids_from_then_on() -> None:
    async with scripted() as ([stage], gateway), asyncio.TaskGroup() as group:
        client = await begun(group, gateway)
        turn = await stage.turn()
        assert turn.body["output_mode"] == "text"
        await turn.whole(NO_TEXT, status=400)
        for attempts in ("2", "1"):
            turn = await stage.turn()
            assert "output_mode" not in turn.body
            await turn.whole(whole(3, 4, text=""))
            answer = await client
            assert (answer.status, answer.json()["output_ids"]) == (200, [3, 4])
            assert "text" not in answer.json()
            assert answer.headers["x-forebay-attempts"] == attempts
            if attempts == "2":
                client = await begun(group, gateway)
        refused = await ask(
            gateway, GENERATE, {"input_ids": [5], "return_logprob": True, "return_text_in_logprobs": True}
        )
        assert (refused.status, refused.json()["error"]["param"]) == (400, "return_text_in_logprobs")
        assert stage.count == 3


async def test_a_stream_that_is_refused_for_its_text_is_asked_for_again() -> None:
    async with scripted() as ([stage], gateway), asyncio.TaskGroup() as group:
        client = await begun(group, gateway, stream=True)
        await (await stage.turn()).whole(NO_TEXT, status=400)
        await (await stage.turn()).stream(event(3, text=""), event(4, text="", finish="stop"), DONE)
        assert payloads((await client).body)[-1]["output_ids"] == [3, 4]


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_a_connection_that_drops_is_tried_on_another_worker(is_stream: bool) -> None:
    async with scripted(2, policy="round-robin") as (stages, gateway), asyncio.TaskGroup() as group:
        client = await begun(group, gateway, stream=is_stream)
        await until(lambda: sum(stage.count for stage in stages) == 1, "the first attempt")
        first, other = stages if stages[0].count else reversed(stages)
        (await first.turn()).reset()
        turn = await other.turn()
        await (turn.stream(event(3, finish="length"), DONE) if is_stream else turn.whole(whole(3)))
        answer = await client
        assert (answer.status, answer.headers["x-forebay-attempts"]) == (200, "2")
        last = payloads(answer.body)[-1] if is_stream else answer.json()
        assert (last["output_ids"], last["meta_info"]["id"]) == ([3], "R")


async def test_a_leg_that_fails_ends_the_others() -> None:
    async with scripted() as ([stage], gateway), asyncio.TaskGroup() as group:
        client = await begun(group, gateway, input_ids=[[5], [6]])
        first, second = await stage.turn(), await stage.turn()
        await first.whole(b'{"error":{"message":"no","type":"BadRequestError","code":400}}', status=400)
        assert (await client).status == 400
        await second.left()


async def test_a_stream_of_which_a_leg_breaks_off_says_so() -> None:
    async with scripted() as ([stage], gateway), asyncio.TaskGroup() as group:
        client = await begun(group, gateway, input_ids=[[5], [6]], stream=True)
        first, second = await stage.turn(), await stage.turn()
        await second.open()
        await first.open()
        await first.send(event(3))
        first.close()
        told_events = (await client).events()
        await second.left()
        assert (json.loads(told_events[-2])["error"]["type"], told_events[-1]) == ("engine_error", b"[DONE]")
        assert (await gateway.record()).outcome == "truncated"


async def test_an_error_in_the_stream_is_the_last_event() -> None:
    async with scripted() as ([stage], gateway), asyncio.TaskGroup() as group:
        client = await begun(group, gateway, input_ids=[[5], [6]], stream=True)
        first, second = await stage.turn(), await stage.turn()
        await second.open()
        await first.stream(event(3), ERROR, DONE)
        told_events = (await client).events()
        await second.left()
        assert [json.loads(one).get("error", {}).get("message") for one in told_events[:-1]] == [None, "broken"]
        assert told_events[-1] == b"[DONE]"
        assert (await gateway.record()).outcome == "engine_error"


async def test_an_error_that_comes_first_has_its_status() -> None:
    async with scripted(max_attempts=1) as ([stage], gateway), asyncio.TaskGroup() as group:
        client = await begun(group, gateway, stream=True)
        await (await stage.turn()).stream(ERROR, DONE)
        answer = await client
        assert (answer.status, answer.json()["error"]["message"]) == (502, "broken")


@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param([b'data: {"choices":7}\n\n'], id="no chunk"),
        pytest.param([b"data: nonsense\n\n"], id="no JSON"),
        pytest.param([event(3, index=4)], id="a choice that nobody asked for"),
    ],
)
async def test_nonsense_is_an_error(blocks: list[bytes]) -> None:
    async with scripted(max_attempts=1) as ([stage], gateway), asyncio.TaskGroup() as group:
        client = await begun(group, gateway, stream=True)
        turn = await stage.turn()
        await turn.open()
        await turn.send(*blocks)
        answer = await client
        assert (answer.status, answer.json()["error"]["type"]) == (502, "engine_protocol")
        await turn.left()


async def test_a_stream_without_its_end_is_cut() -> None:
    async with scripted(max_attempts=1) as ([stage], gateway), asyncio.TaskGroup() as group:
        client = await begun(group, gateway, stream=True)
        await (await stage.turn()).stream(event(3))
        told_events = (await client).events()
        assert json.loads(told_events[-2])["error"]["type"] == "engine_error"
        assert (await gateway.record()).outcome == "truncated"


async def test_events_may_hold_what_is_new() -> None:
    for is_incremental, last in ((False, [3, 4]), (True, [4])):
        async with scripted(native_increments=is_incremental) as ([stage], gateway), asyncio.TaskGroup() as group:
            client = await begun(group, gateway, stream=True)
            await (await stage.turn()).stream(event(3), event(4, finish="length"), DONE)
            assert [one["output_ids"] for one in payloads((await client).body)] == [[3], last]


async def test_a_silent_stream_gives_signs_of_life() -> None:
    async with scripted(sse_keepalive_s=0.05) as ([stage], gateway), asyncio.TaskGroup() as group:
        client = await begun(group, gateway, input_ids=[[5], [6]], stream=True)
        first, second = await stage.turn(), await stage.turn()
        await first.open()
        await second.stream(event(4, finish="length"), DONE)
        await asyncio.wait([client], timeout=0.3)
        assert not client.done()
        await first.finish(event(3, finish="length"), DONE)
        answer = await client
        assert b": keep-alive\n\n" in answer.body
        assert {one["index"] for one in map(json.loads, answer.events()[:-1])} == {0, 1}


async def test_prompts_are_routed_to_where_they_are_cached() -> None:
    prompt = list(range(3, 200))
    async with (
        engines(*[{"kv_events": "tcp://127.0.0.1:0"} for _ in range(3)]) as started,
        running_gateway(*[one.url for one in started]) as gateway,
    ):
        chosen = set()
        for _ in range(5):
            answer = await ask(gateway, GENERATE, {"input_ids": prompt, "extra_key": "salt", **sampling()})
            assert answer.status == 200
            chosen.add(answer.headers["x-forebay-worker"])
            overlap = answer.headers["x-forebay-overlap-blocks"]
        assert (len(chosen), overlap) == (1, str(len(prompt) // 16))
        assert {json.loads(entry.body or b"")["cache_salt"] for entry in entries_of(*started)} == {"salt"}
        other = await ask(gateway, GENERATE, {"input_ids": prompt, "extra_key": "other", **sampling()})
        assert other.headers["x-forebay-overlap-blocks"] == "0"

"""The gateway in front of simulated vLLM engines: ids, ranks, models, aborts, death, folding, mixed fleets."""

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from routers.fleet import WorkerState
from simulator.log import RequestEntry
from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import PATIENCE_S, RunningGateway, running_gateway, until
from tests.fakes.wire import Answer, Wire, call, request_bytes, wire
from tests.integration.test_vllm_captures import ALL as CAPTURED
from tests.integration.test_vllm_captures import EXCEPTIONS
from tests.simulator.wire import load_vllm_capture

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
ABORT_ROUTE = "/inference/v1/abort_requests"
HEX_ID = re.compile("[0-9a-f]{32}")
USER = [{"role": "user", "content": "hi"}]
# Any of the generation routes finds its fields in this.
LONG: dict[str, Any] = {
    "prompt": "hi", "messages": USER, "input": "hi", "max_tokens": 5000, "max_output_tokens": 5000,
}  # fmt: skip
SHORT = {**LONG, "max_tokens": 4, "max_output_tokens": 4}
ONLY_SGLANG = {"text": "hi", "require_reasoning": True, "sampling_params": {"max_new_tokens": 2}}
PREFIXES = {CHAT: "chatcmpl-", COMPLETIONS: "cmpl-", MESSAGES: "chatcmpl-", RESPONSES: "resp_"}


@asynccontextmanager
async def engines(*options: dict[str, Any]) -> AsyncIterator[list[SimulatedEngine]]:
    """Engines, vLLM if nothing else is said; at the end nothing runs on them."""
    async with AsyncExitStack() as stack:
        started = [SimulatedEngine(EngineOptions(**{"engine": "vllm", **one})) for one in options]
        for engine in started:
            await engine.start()
            stack.push_async_callback(engine.stop)
        yield started
        for engine in started:
            await engine.wait_for(lambda e: e.running == e.waiting == e.held == e.open_exchanges == 0, PATIENCE_S)


@asynccontextmanager
async def served(
    *, settings: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[SimulatedEngine, RunningGateway]]:
    """One engine and a gateway in front of it."""
    async with (
        engines({"inter_token_ms": 2.0, **options}) as (engine,),
        running_gateway(engine.url, **(settings or {})) as gateway,
    ):
        yield engine, gateway


async def ask(gateway: RunningGateway, path: str, body: dict[str, Any], **headers: str) -> Answer:
    """One request."""
    return await call(gateway.address, path, body, headers={k.replace("_", "-"): v for k, v in headers.items()})


def only(engine: SimulatedEngine, path: str) -> RequestEntry:
    """The one request that the engine saw on a route."""
    (entry,) = engine.log.requests_to(path)
    return entry


def aborted_ids(engine: SimulatedEngine) -> list[str]:
    """Ids that the engine's abort route was given."""
    return [
        rid for entry in engine.log.requests_to(ABORT_ROUTE) for rid in json.loads(entry.body or b"")["request_ids"]
    ]


def frozen(count: int, tokens: int = 0) -> Callable[[SimulatedEngine], bool]:
    """So many sequences run, so many tokens exist, and time stands still from then on."""

    def is_reached(engine: SimulatedEngine) -> bool:
        made = sum(scheduler.totals.generated_tokens for scheduler in engine.core.schedulers)
        if engine.running != count or made < tokens:
            return False
        engine.freeze()
        return True

    return is_reached


async def running(engine: SimulatedEngine, count: int = 1, tokens: int = 0) -> None:
    """Wait until so many sequences run and so many tokens exist."""

    def is_reached(engine: SimulatedEngine) -> bool:
        made = sum(scheduler.totals.generated_tokens for scheduler in engine.core.schedulers)
        return engine.running == count and made >= tokens

    await engine.wait_for(is_reached, PATIENCE_S)


# Routes and ids.


@pytest.mark.parametrize("path", PREFIXES)
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_generation_routes(path: str, is_stream: bool) -> None:
    async with served() as (engine, gateway):
        answer = await ask(gateway, path, {**SHORT, "stream": is_stream}, x_request_id="mine")
        assert (answer.status, answer.headers["x-request-id"]) == (200, "mine")
        assert answer.headers["x-forebay-worker"] == f"127.0.0.1:{engine.port}"
        given = only(engine, path).header("x-request-id")
        assert given is not None
        assert HEX_ID.fullmatch(given)
        assert given.encode() not in answer.body
        assert b'"%bmine"' % PREFIXES[path].encode() in answer.body
        if is_stream and path in (CHAT, COMPLETIONS):
            assert answer.events()[-1] == b"[DONE]"
        record = await gateway.record()
        assert (record.outcome, record.request_id, record.engine_ids) == ("complete", "mine", (given,))
        if not is_stream:
            assert record.completion_tokens == 4


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "abc"}),
        ("/detokenize", {"tokens": [10, 11]}),
        ("/v1/messages/count_tokens", {"messages": USER}),
    ],
)
async def test_plain_routes(path: str, body: dict[str, Any]) -> None:
    async with served() as (engine, gateway):
        through, direct = await ask(gateway, path, body), await call(("127.0.0.1", engine.port), path, body)
        assert (through.status, through.body) == (200, direct.body)


async def test_embeddings() -> None:
    async with served(is_embedding=True) as (engine, gateway):
        answer = await ask(gateway, "/v1/embeddings", {"input": ["a", "b"]}, x_request_id="mine")
        assert answer.status == 200
        assert len(answer.json()["data"]) == 2
        assert answer.json()["id"] == "embd-mine"
        assert HEX_ID.fullmatch(only(engine, "/v1/embeddings").header("x-request-id") or "")


async def test_the_id_is_the_clients_or_made_here() -> None:
    async with served() as (engine, gateway):
        named = await ask(gateway, CHAT, {**SHORT, "rid": 'q"\u00e4'})
        fresh = await ask(gateway, CHAT, SHORT)
        assert named.json()["id"] == 'chatcmpl-q"\u00e4'
        assert fresh.json()["id"] == f"chatcmpl-{fresh.headers['x-request-id']}"
        assert HEX_ID.fullmatch(fresh.headers["x-request-id"])
        given = {entry.header("x-request-id") for entry in engine.log.requests_to(CHAT)}
        assert len(given) == 2
        assert fresh.headers["x-request-id"] not in given


async def test_the_clients_bytes_reach_the_engine() -> None:
    async with served() as (engine, gateway):
        body = b'{"model": "model" , "prompt":"x","max_tokens" : 3,"unknown": 1.50,"vllm_xargs":{"a":1e2}}'
        assert (await call(gateway.address, COMPLETIONS, body)).status == 200
        assert only(engine, COMPLETIONS).body == body


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_prompts_and_samples_stay_one_request(is_stream: bool) -> None:
    async with served() as (engine, gateway):
        body = {**SHORT, "prompt": ["a", "b"], "n": 2, "temperature": 1.0, "stream": is_stream}
        answer = await ask(gateway, COMPLETIONS, body, x_request_id="mine")
        entry = only(engine, COMPLETIONS)
        given = entry.header("x-request-id")
        assert set(entry.rids) == {f"cmpl-{given}-0", f"cmpl-{given}-1"}
        parts = [json.loads(event) for event in answer.events()[:-1]] if is_stream else [answer.json()]
        assert {part["id"] for part in parts} == {"cmpl-mine"}
        assert {choice["index"] for part in parts for choice in part["choices"]} == {0, 1, 2, 3}


async def test_the_engines_refusals_pass() -> None:
    async with served() as (engine, gateway):
        answer = await ask(gateway, CHAT, {"max_tokens": 4})
        direct = await call(("127.0.0.1", engine.port), CHAT, {"max_tokens": 4})
        assert (answer.status, answer.body) == (400, direct.body)
        assert (await gateway.record()).outcome == "rejected"


# Ranks.


async def test_ranks_are_chosen_by_load() -> None:
    async with served(dp_size=2) as (engine, gateway), wire(gateway.address) as one, wire(gateway.address) as two:
        for connection in (one, two):
            await connection.send(request_bytes(CHAT, LONG))
        await running(engine, 2)
        entries = engine.log.requests_to(CHAT)
        assert sorted(entry.header("x-data-parallel-rank") or "" for entry in entries) == ["0", "1"]
        assert sorted(entry.dp_rank or 0 for entry in entries) == [0, 1]


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_can_be_asked_for(rank: int) -> None:
    async with served(dp_size=2) as (engine, gateway):
        for _ in range(3):
            answer = await ask(gateway, COMPLETIONS, SHORT, x_data_parallel_rank=str(rank))
            assert answer.headers["x-forebay-dp-rank"] == str(rank)
        assert [entry.dp_rank for entry in engine.log.requests_to(COMPLETIONS)] == [rank] * 3


async def test_a_rank_that_is_not_there_is_refused_here() -> None:
    async with served(dp_size=2) as (engine, gateway):
        answer = await ask(gateway, COMPLETIONS, SHORT, x_data_parallel_rank="2")
        assert (answer.status, answer.json()["error"]["param"]) == (400, "x-data-parallel-rank")
        assert "valid ranks are 0 to 1" in answer.json()["error"]["message"]
        assert engine.log.requests_to(COMPLETIONS) == []


async def test_one_rank_is_never_named() -> None:
    async with served() as (engine, gateway):
        answer = await ask(gateway, COMPLETIONS, SHORT)
        assert "x-forebay-dp-rank" not in answer.headers
        assert only(engine, COMPLETIONS).header("x-data-parallel-rank") is None


# Keys.


async def test_an_engine_with_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", "secret")
    async with (
        engines({"api_key": "secret"}) as (engine,),
        running_gateway(f"{engine.url},api_key_env=ENGINE_KEY") as gateway,
    ):
        answer = await ask(gateway, CHAT, SHORT, authorization="Bearer clients-own")
        assert answer.status == 200
        assert only(engine, CHAT).header("authorization") == "Bearer secret"


async def test_an_engine_whose_key_is_missing_is_named() -> None:
    async with engines({"api_key": "secret"}) as (engine,), running_gateway(engine.url, wait_ready=0) as gateway:
        member = next(iter(gateway.gateway.services.fleet))
        await until(lambda: "api_key_env" in member.detail, "the reason")
        answer = await ask(gateway, CHAT, SHORT)
        assert (answer.status, answer.json()["error"]["type"]) == (503, "unavailable")


# Fleets of one kind and of two.


async def test_native_requests_that_only_sglang_takes_go_there() -> None:
    async with engines({}, {"engine": "sglang"}) as (vllm, sglang), running_gateway(vllm.url, sglang.url) as gateway:
        for _ in range(6):
            assert (await ask(gateway, "/generate", ONLY_SGLANG)).status == 200
        for _ in range(6):
            assert (await ask(gateway, CHAT, SHORT)).status == 200
        assert len(sglang.log.requests_to("/generate")) == 6
        assert vllm.log.requests_to("/generate") == []
        assert len(vllm.log.requests_to(CHAT)) + len(sglang.log.requests_to(CHAT)) == 6
        assert vllm.log.requests_to(CHAT)
        listed = (await gateway.client.get("/workers")).json()["workers"]
        assert [(one["engine"], one["engine_version"]) for one in listed] == [("vllm", "0.32.0"), ("sglang", "0.5.23")]


async def test_native_requests_wait_for_an_sglang_worker_that_is_down() -> None:
    async with engines({}, {"engine": "sglang"}) as (vllm, sglang), running_gateway(vllm.url, sglang.url) as gateway:
        await sglang.stop()
        fleet = gateway.gateway.services.fleet
        await until(lambda: sum(one.state is WorkerState.READY for one in fleet) == 1, "the loss noticed")
        answer = await ask(gateway, "/generate", ONLY_SGLANG)
        assert (answer.status, answer.json()["error"]["type"]) == (503, "unavailable")


@pytest.mark.parametrize("kind", ["auto", "vllm"])
async def test_the_engine_kind_is_asked_or_said(kind: str) -> None:
    async with engines({}) as (engine,), running_gateway(f"{engine.url},engine={kind}") as gateway:
        assert (await ask(gateway, CHAT, SHORT)).status == 200
        asked = {entry.path for entry in engine.log.requests if entry.method == "GET"}
        assert ("/model_info" in asked) is (kind == "auto")


@pytest.mark.parametrize(("kind", "said"), [("vllm", "sglang"), ("sglang", "vllm")])
async def test_a_kind_that_is_not_the_engines_is_named(kind: str, said: str) -> None:
    async with (
        engines({"engine": kind}) as (engine,),
        running_gateway(f"{engine.url},engine={said}", wait_ready=0) as gateway,
    ):
        member = next(iter(gateway.gateway.services.fleet))
        await until(lambda: "not a serving engine" in member.detail, "the reason")


@pytest.mark.parametrize(
    ("kinds", "field", "status"),
    [
        pytest.param(["vllm"], {"previous_response_id": "resp_1"}, 200, id="one engine, all its own state"),
        pytest.param(["vllm", "vllm"], {"previous_response_id": "resp_1"}, 400, id="an answer kept in one of two"),
        pytest.param(["vllm", "vllm"], {"session_id": "s"}, 200, id="a hint to vLLM"),
        pytest.param(["vllm", "sglang"], {"session_id": "s"}, 400, id="a session of SGLang"),
    ],
)
async def test_state_inside_one_engine(kinds: list[str], field: dict[str, Any], status: int) -> None:
    async with (
        engines(*[{"engine": kind} for kind in kinds]) as started,
        running_gateway(*[engine.url for engine in started]) as gateway,
    ):
        answer = await ask(gateway, CHAT, {**SHORT, **field})
        assert answer.status == status
        if status == 400:
            assert answer.json()["error"]["type"] == "unsupported"


# Models.


async def test_aliases_and_adapters_are_models() -> None:
    options = {"model": "base", "model_aliases": "alias", "lora_names": "adapter"}
    async with (
        engines(options, {"model": "base"}) as (with_adapter, plain),
        running_gateway(with_adapter.url, plain.url) as gateway,
    ):
        listed = (await gateway.client.get("/v1/models")).json()["data"]
        assert [one["id"] for one in listed] == ["base", "alias", "adapter"]
        assert {one["owned_by"] for one in listed} == {"vllm"}
        assert (await gateway.client.get("/v1/models/adapter")).status_code == 200
        for model, status in (("alias", 200), ("adapter", 200), ("base:adapter", 404)):
            for _ in range(3):  # the third is SGLang's spelling, which vLLM refuses by itself
                assert (await ask(gateway, CHAT, {**SHORT, "model": model})).status == status
        assert len(with_adapter.log.requests_to(CHAT)) == 9
        assert plain.log.requests_to(CHAT) == []
        for _ in range(6):
            assert (await ask(gateway, CHAT, {**SHORT, "model": "base"})).status == 200
            assert (await ask(gateway, CHAT, SHORT)).status == 200
        assert plain.log.requests_to(CHAT)
        answer = await ask(gateway, CHAT, {**SHORT, "model": "nobody"})
        assert (answer.status, answer.json()["error"]["type"]) == (404, "model_not_found")


async def test_an_adapter_that_is_loaded_later_is_found() -> None:
    async with engines({}, {}) as (one, two), running_gateway(one.url, two.url) as gateway:
        assert (await ask(gateway, CHAT, {**SHORT, "model": "late"})).status == 404
        one.core.options = replace(one.core.options, lora_names="late")
        await until(lambda: "late" in gateway.gateway.services.fleet.models, "the adapter")
        for _ in range(4):
            answer = await ask(gateway, CHAT, {**SHORT, "model": "late"})
            assert (answer.status, answer.json()["model"]) == (200, "late")
        assert len(one.log.requests_to(CHAT)) == 4
        assert two.log.requests_to(CHAT) == []


# Clients that leave.


def leave(connection: Wire, how: str) -> None:
    """Go, in one of the ways in which clients do."""
    if how == "reset":
        connection.reset()
    elif how == "half-close":
        connection.writer.write_eof()
    else:
        connection.close()


@pytest.mark.parametrize("path", PREFIXES)
@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_a_client_that_leaves_closes_the_engines_connection(path: str, how: str, is_stream: bool) -> None:
    async with served() as (engine, gateway), wire(gateway.address) as connection:
        await connection.send(request_bytes(path, {**LONG, "stream": is_stream}))
        await running(engine, tokens=3)
        leave(connection, how)
        record = await gateway.record()
        assert (record.outcome, record.status) == ("client_closed", 499)
        await engine.wait_for(lambda e: e.running == 0, PATIENCE_S)
        assert [gone.path for gone in engine.log.disconnects] == [path]
        assert aborted_ids(engine) == []


# The abort route.


@pytest.mark.parametrize(
    ("path", "more", "count", "names"),
    [
        pytest.param(CHAT, {}, 1, ["chatcmpl-{}"], id="chat"),
        pytest.param(CHAT, {"n": 2, "temperature": 1.0}, 2, ["chatcmpl-{}"], id="samples"),
        pytest.param(COMPLETIONS, {}, 1, ["cmpl-{}-0"], id="completions"),
        pytest.param(
            COMPLETIONS, {"prompt": ["a", "b", "c"]}, 3, ["cmpl-{}-0", "cmpl-{}-1", "cmpl-{}-2"], id="prompts"
        ),
    ],
)
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_the_caller_of_an_aborted_request_gets_the_partial_answer(
    path: str, more: dict[str, Any], count: int, names: list[str], is_stream: bool
) -> None:
    async with served() as (engine, gateway), wire(gateway.address) as connection:
        await connection.send(request_bytes(path, {**LONG, **more, "rid": "mine", "stream": is_stream}))
        await running(engine, count, tokens=5 * count)
        report = await ask(gateway, "/abort_request", {"rid": "mine"})
        worker = f"127.0.0.1:{engine.port}"
        assert report.json() == {"aborted": ["mine"], "not_found": [], "workers": [{"id": worker, "status": "told"}]}
        answer = await connection.answer()
        assert answer.status == 200
        parts = [json.loads(event) for event in answer.events()[:-1]] if is_stream else [answer.json()]
        assert {part["id"] for part in parts} == {PREFIXES[path] + "mine"}
        ended = [choice["finish_reason"] for part in parts for choice in part["choices"] if choice["finish_reason"]]
        assert ended == ["abort"] * count
        record = await gateway.record()
        assert (record.outcome, record.status) == ("aborted", 200)
        given = only(engine, path).header("x-request-id")
        assert sorted(aborted_ids(engine)) == [name.format(given) for name in names]


async def test_one_prompt_can_be_aborted() -> None:
    async with served() as (engine, gateway), wire(gateway.address) as connection:
        await connection.send(request_bytes(COMPLETIONS, {**LONG, "prompt": ["a", "b"], "rid": "mine"}))
        await running(engine, 2)
        assert (await ask(gateway, "/abort_request", {"rid": "mine_1"})).json()["aborted"] == ["mine_1"]
        await running(engine, 1)
        made = engine.core.schedulers[0].totals.generated_tokens
        await running(engine, 1, tokens=made + 40)
        await ask(gateway, "/abort_request", {"rid": "mine"})
        choices = (await connection.answer()).json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]
        assert len(choices[1]["text"]) < len(choices[0]["text"])


async def test_an_end_marker_alone_after_our_abort_is_an_abort() -> None:
    async with served() as (engine, gateway), wire(gateway.address) as connection:
        engine.freeze()
        await connection.send(request_bytes(COMPLETIONS, {**LONG, "rid": "mine", "stream": True}))
        await running(engine)
        await ask(gateway, "/abort_request", {"rid": "mine"})
        answer = await connection.answer()
        assert (answer.status, answer.body) == (200, b"data: [DONE]\n\n")
        assert (await gateway.record()).outcome == "aborted"


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_routes_whose_aborts_the_engine_does_not_document_are_closed(path: str, is_stream: bool) -> None:
    async with served() as (engine, gateway), wire(gateway.address) as connection:
        await connection.send(request_bytes(path, {**LONG, "rid": "mine", "stream": is_stream}))
        await running(engine, tokens=3)
        if is_stream:
            await connection.head()
        assert (await ask(gateway, "/abort_request", {"rid": "mine"})).json()["aborted"] == ["mine"]
        await engine.wait_for(lambda e: e.running == 0, PATIENCE_S)
        assert (await gateway.record()).outcome == "aborted"
        assert aborted_ids(engine) == []
        if not is_stream:
            answer = await connection.answer()
            assert (answer.status, answer.json()["error"]["type"]) == (499, "aborted")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_s3_18_without_scale_out_an_abort_closes_the_call(path: str, is_stream: bool) -> None:
    async with served(enable_scale_out=False) as (engine, gateway), wire(gateway.address) as connection:
        await connection.send(request_bytes(path, {**LONG, "rid": "mine", "stream": is_stream}))
        await running(engine, tokens=3)
        if is_stream:
            status, headers = await connection.head()
        assert (await ask(gateway, "/abort_request", {"rid": "mine"})).json()["aborted"] == ["mine"]
        answer = await (connection.body(status, headers) if is_stream else connection.answer())
        last = answer.events()[-2] if is_stream else answer.body
        assert (answer.status, answer.is_whole) == (200 if is_stream else 499, True)
        assert json.loads(last)["error"]["type"] == "aborted"
        await engine.wait_for(lambda e: e.running == 0, PATIENCE_S)
        record = await gateway.record()
        assert record.outcome == "aborted"
        assert len(aborted_ids(engine)) == 1
        assert [gone.path for gone in engine.log.disconnects] == [path]


# Death and health.


@pytest.mark.parametrize("path", PREFIXES)
async def test_an_engine_that_dies_in_a_stream_is_told_in_the_stream(path: str) -> None:
    async with served() as (engine, gateway), wire(gateway.address) as connection:
        await connection.send(request_bytes(path, {**LONG, "stream": True}))
        status, headers = await connection.head()
        await running(engine, tokens=5)
        engine.die()
        answer = await connection.body(status, headers)
        assert answer.is_whole
        assert b"EngineCore encountered an issue" in answer.body
        assert (b"[DONE]" in answer.body) is (path in (CHAT, COMPLETIONS))
        assert (await gateway.record()).outcome == "engine_error"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_engine_that_dies_under_a_unary_call_is_502(path: str) -> None:
    async with served() as (engine, gateway), wire(gateway.address) as connection:
        await connection.send(request_bytes(path, LONG))
        await running(engine, tokens=5)
        engine.die()
        answer = await connection.answer()
        assert (answer.status, answer.json()["error"]["type"]) == (502, "engine_error")
        assert "EngineCore encountered an issue" in answer.json()["error"]["message"]


async def test_a_dead_engine_leaves_rotation_and_is_read_again_when_it_is_back() -> None:
    async with served(death_grace_s=60.0) as (engine, gateway):
        member = next(iter(gateway.gateway.services.fleet))
        assert member.facts is not None
        boot_id = member.facts.boot_id
        assert boot_id
        engine.die()  # the server is still there, and its /health says 503
        await until(lambda: member.state is WorkerState.UNHEALTHY, "the 503 noticed")
        answer = await ask(gateway, CHAT, SHORT)
        assert (answer.status, answer.json()["error"]["type"]) == (503, "unavailable")
        engine.restart()
        await gateway.ready(1)
        await until(lambda: member.facts is not None and member.facts.boot_id != boot_id, "the new process")
        assert (await ask(gateway, CHAT, SHORT)).status == 200


async def test_a_restart_between_two_probes_is_noticed() -> None:
    async with served() as (engine, gateway):
        member = next(iter(gateway.gateway.services.fleet))
        assert member.facts is not None
        boot_id = member.facts.boot_id
        engine.restart()
        await until(lambda: member.facts is not None and member.facts.boot_id != boot_id, "the new process")
        await gateway.ready(1)


# --upstream-mode incremental.

FOLDED: list[Any] = [
    pytest.param(CHAT, {}, id="chat"),
    pytest.param(CHAT, {"logprobs": True, "top_logprobs": 2}, id="chat logprobs"),
    pytest.param(CHAT, {"n": 2, "temperature": 1.0, "seed": 3}, id="chat samples"),
    pytest.param(COMPLETIONS, {}, id="completions"),
    pytest.param(COMPLETIONS, {"prompt": ["a", "b"], "logprobs": 1}, id="prompts with logprobs"),
    pytest.param(COMPLETIONS, {"return_token_ids": True}, id="token ids"),
    pytest.param(COMPLETIONS, {"stream_options": None, "stream": False}, id="said to be unary"),
]


def comparable(answer: Answer) -> dict[str, Any]:
    """An answer without its time and what depends on the cache."""
    assert answer.status == 200
    body: dict[str, Any] = answer.json()
    assert body.pop("created") > 0
    body["usage"].pop("prompt_tokens_details")
    return body


@pytest.mark.parametrize(("path", "more"), FOLDED)
async def test_streams_are_folded_for_unary_clients(path: str, more: dict[str, Any]) -> None:
    async with served(settings={"upstream_mode": "incremental"}) as (engine, gateway):
        body = {**SHORT, **more}
        folded = await ask(gateway, path, body, x_request_id="mine")
        assert only(engine, path).stream
        direct = await call(("127.0.0.1", engine.port), path, body, headers={"X-Request-Id": "mine"})
        assert comparable(folded) == comparable(direct)
        assert list(folded.json()) == list(direct.json())
        assert [list(choice) for choice in folded.json()["choices"]] == [list(c) for c in direct.json()["choices"]]
        assert folded.headers["content-type"] == "application/json"
        record = await gateway.record()
        assert (record.outcome, record.completion_tokens) == ("complete", folded.json()["usage"]["completion_tokens"])


@pytest.mark.parametrize(
    ("path", "more", "status"),
    [
        pytest.param(CHAT, {"prompt_logprobs": 1}, 200, id="chat prompt logprobs"),
        pytest.param(COMPLETIONS, {"prompt_logprobs": 1}, 200, id="prompt logprobs"),
        pytest.param(COMPLETIONS, {"echo": True, "logprobs": 1}, 200, id="logprobs of an echo"),
        pytest.param(CHAT, {"stream_options": {"include_usage": True}}, 400, id="what the engine refuses"),
    ],
)
async def test_what_streams_cannot_tell_stays_unary(path: str, more: dict[str, Any], status: int) -> None:
    async with served(settings={"upstream_mode": "incremental"}) as (engine, gateway):
        assert (await ask(gateway, path, {**SHORT, **more})).status == status
        assert not only(engine, path).stream


# Requests that were captured on a real server, with answers to be folded.
FOLDED_CAPTURES = [
    name
    for name in CAPTURED
    if name not in EXCEPTIONS
    and b'"stream": true' not in load_vllm_capture(name).body
    and not name.startswith(("abort/", "dp2/", "engine-death/"))
]
# The engine counts the fields that it was sent.
COUNTED = {"errors/missing-messages"}


@pytest.fixture(scope="module")
async def folding(anyio_backend: object) -> AsyncIterator[tuple[SimulatedEngine, RunningGateway]]:
    """An engine like the captured one, and a gateway that folds."""
    options = {"model": "tiny", "model_aliases": "tiny-alias", "page_size": 32, "context_length": 2048}
    async with served(settings={"upstream_mode": "incremental"}, inter_token_ms=0.0, **options) as pair:
        yield pair


def unvarying(value: Any) -> Any:
    """An answer without ids, times, and what depends on the cache, in the order of its members."""
    if isinstance(value, dict):
        varying = ("id", "created", "prompt_tokens_details")
        return [(name, unvarying(item)) for name, item in value.items() if name not in varying]
    return [unvarying(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", FOLDED_CAPTURES)
async def test_a_captured_request_gets_the_same_answer_folded(
    name: str, folding: tuple[SimulatedEngine, RunningGateway]
) -> None:
    engine, gateway = folding
    answers = []
    for address in (("127.0.0.1", engine.port), gateway.address):
        async with wire(address) as connection:
            await connection.send(load_vllm_capture(name).request)
            answers.append(await connection.answer())
    direct, folded = answers
    assert folded.status == direct.status
    if name not in COUNTED:
        assert unvarying(folded.json()) == unvarying(direct.json())


def test_many_captured_requests_are_folded() -> None:
    assert len(FOLDED_CAPTURES) > 70


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_caller_of_an_aborted_folded_request_gets_the_partial_answer(path: str) -> None:
    async with served(settings={"upstream_mode": "incremental"}) as (engine, gateway):
        async with wire(gateway.address) as connection:
            await connection.send(request_bytes(path, {**LONG, "rid": "mine"}))
            await running(engine, tokens=5)
            await ask(gateway, "/abort_request", {"rid": "mine"})
            answer = await connection.answer()
        assert answer.status == 200
        assert answer.json()["choices"][0]["finish_reason"] == "abort"
        assert (await gateway.record()).outcome == "aborted"


async def test_a_folded_request_that_is_aborted_before_its_first_token_is_told() -> None:
    async with served(settings={"upstream_mode": "incremental"}) as (engine, gateway):
        async with wire(gateway.address) as connection:
            engine.freeze()
            await connection.send(request_bytes(COMPLETIONS, {**LONG, "rid": "mine"}))
            await running(engine)
            await ask(gateway, "/abort_request", {"rid": "mine"})
            answer = await connection.answer()
        assert (answer.status, answer.json()["error"]["type"]) == (499, "aborted")
        assert (await gateway.record()).outcome == "aborted"


async def test_an_engine_that_dies_under_a_folded_call_is_502() -> None:
    async with served(settings={"upstream_mode": "incremental"}) as (engine, gateway):
        async with wire(gateway.address) as connection:
            await connection.send(request_bytes(CHAT, LONG))
            await running(engine, tokens=5)
            engine.die()
            answer = await connection.answer()
        assert (answer.status, answer.json()["error"]["type"]) == (502, "engine_error")
        assert (await gateway.record()).outcome == "engine_error"


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
async def test_a_client_that_leaves_a_folded_call_closes_it(how: str) -> None:
    async with served(settings={"upstream_mode": "incremental"}) as (engine, gateway):
        async with wire(gateway.address) as connection:
            await connection.send(request_bytes(CHAT, LONG))
            await running(engine, tokens=3)
            leave(connection, how)
            assert (await gateway.record()).outcome == "client_closed"
        await engine.wait_for(lambda e: e.running == 0, PATIENCE_S)
        assert aborted_ids(engine) == []

"""The official ``openai`` package as the client: what it sends arrives, what goes wrong is an error of its own kind.

Retries of the package are off, so that one call is one request, except where they are what is tested.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from simulator.log import RequestEntry
from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import PATIENCE_S, TIME_SCALE, RunningGateway, running_gateway
from tests.fakes.script_engine import ScriptEngine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
LONG = 20_000
# Until then the request must be with the engine, or its first event here, on a loaded machine too.
SHORT_TIMEOUT_S = 1.5 * TIME_SCALE
TOOLS: list[ChatCompletionToolParam] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather – at a place",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
        },
    }
]


@pytest.fixture(params=["sglang", "vllm"])
def kind(request: pytest.FixtureRequest) -> str:
    """Both kinds of engines."""
    assert isinstance(request.param, str)
    return request.param


@asynccontextmanager
async def served(
    kind: str, settings: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[SimulatedEngine, RunningGateway]]:
    """A simulated engine and a gateway in front of it; at the end neither holds anything."""
    engine = SimulatedEngine(EngineOptions(engine=kind, **options))
    await engine.start()
    try:
        async with running_gateway(engine.url, **(settings or {})) as gateway:
            yield engine, gateway
            await engine.wait_for(lambda e: e.running == e.waiting == e.open_exchanges == 0, PATIENCE_S)
    finally:
        await engine.stop()


@asynccontextmanager
async def sdk(
    gateway: RunningGateway, *, sent: list[bytes] | None = None, **options: Any
) -> AsyncIterator[AsyncOpenAI]:
    """A client of the gateway; bodies that it sends are appended to ``sent``."""

    async def keep(request: Any) -> None:
        if sent is not None:
            sent.append(request.content)

    http = openai.DefaultAsyncHttpxClient(trust_env=False, event_hooks={"request": [keep]})
    given = {"api_key": "unused", "max_retries": 0, "timeout": PATIENCE_S, **options}
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", http_client=http, **given) as client:
        yield client


def only(engine: SimulatedEngine, path: str) -> RequestEntry:
    """The one request that the engine saw on a route."""
    (entry,) = engine.log.requests_to(path)
    return entry


def without_id(body: bytes | None) -> dict[str, Any]:
    """A body as the engine saw it, less the id that the gateway put in."""
    document = json.loads(body or b"")
    assert isinstance(document, dict)
    document.pop("rid", None)
    return document


async def is_told(engine: SimulatedEngine) -> None:
    """Wait until the engine knows that its one request is not wanted, and does nothing more for it."""
    await engine.wait_for(lambda e: e.log.disconnects or e.log.aborts, PATIENCE_S)
    engine.thaw()  # it ends requests between two steps
    await engine.wait_for(lambda e: e.running == e.waiting == 0, PATIENCE_S)


# What it gets.


async def test_models(kind: str) -> None:
    async with served(kind, model="org/name-7B") as (_, gateway), sdk(gateway) as client:
        assert [(model.id, model.object, model.owned_by) async for model in client.models.list()] == [
            ("org/name-7B", "model", kind)
        ]
        assert (await client.models.retrieve("org/name-7B")).id == "org/name-7B"


async def test_chat(kind: str) -> None:
    async with served(kind) as (engine, gateway), sdk(gateway) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="model", messages=USER, max_tokens=5, extra_headers={"x-request-id": "mine"}
        )
        answer = raw.parse()
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5
        assert answer._request_id == "mine"
        assert "mine" in answer.id
        assert raw.headers["x-forebay-worker"] == f"127.0.0.1:{engine.port}"


async def test_many_choices_with_logprobs(kind: str) -> None:
    async with served(kind) as (_, gateway), sdk(gateway) as client:
        answer = await client.chat.completions.create(
            model="model", messages=USER, max_tokens=3, n=3, logprobs=True, top_logprobs=2
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        for choice in answer.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2, 2, 2]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 9


async def test_completions(kind: str) -> None:
    async with served(kind) as (_, gateway), sdk(gateway) as client:
        answer = await client.completions.create(model="model", prompt=["a", "b"], max_tokens=4, logprobs=1)
        assert [choice.index for choice in answer.choices] == [0, 1]
        for choice in answer.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.tokens is not None
            assert len(choice.logprobs.tokens) == 4


async def test_embeddings(kind: str) -> None:
    async with served(kind, is_embedding=True) as (engine, gateway), sdk(gateway) as client:
        # Of itself the package asks for Base64.
        answer = await client.embeddings.create(model="model", input=["a", "b"], encoding_format="float")
        assert [entry.index for entry in answer.data] == [0, 1]
        assert all(isinstance(value, float) for entry in answer.data for value in entry.embedding)
        await client.embeddings.create(model="model", input="a", encoding_format="base64")
        *_, last = engine.log.requests_to("/v1/embeddings")
        assert without_id(last.body) == {"input": "a", "model": "model", "encoding_format": "base64"}


async def test_a_stream_of_chat(kind: str) -> None:
    async with served(kind) as (_, gateway), sdk(gateway) as client:
        stream = await client.chat.completions.create(
            model="model", messages=USER, max_tokens=6, n=2, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}
        ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        assert ends == ["length", "length"]
        assert any(choice.delta.content for chunk in chunks for choice in chunk.choices)
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 12
        # SGLang gives each choice an id of its own.
        request_id = stream.response.headers["x-request-id"]
        assert all(request_id in chunk.id for chunk in chunks)


async def test_a_stream_of_completions(kind: str) -> None:
    async with served(kind) as (_, gateway), sdk(gateway) as client:
        whole = await client.completions.create(model="model", prompt="a", max_tokens=8)
        stream = await client.completions.create(model="model", prompt="a", max_tokens=8, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == whole.choices[0].text


async def test_the_client_without_asyncio(kind: str) -> None:
    def use(url: str) -> tuple[list[str], str, str]:
        http = openai.DefaultHttpxClient(trust_env=False)
        with OpenAI(
            base_url=f"{url}/v1", api_key="unused", http_client=http, max_retries=0, timeout=PATIENCE_S
        ) as client:
            whole = client.chat.completions.create(model="model", messages=USER, max_tokens=8)
            with client.chat.completions.create(model="model", messages=USER, max_tokens=8, stream=True) as stream:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            return [model.id for model in client.models.list()], whole.choices[0].message.content or "", text

    async with served(kind) as (_, gateway):
        models, whole, streamed = await asyncio.to_thread(use, gateway.url)
        assert models == ["model"]
        assert streamed == whole != ""


# What the engine gets.


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_the_engine_sees_what_the_package_sent(kind: str, is_stream: bool) -> None:
    sent: list[bytes] = []
    async with served(kind) as (engine, gateway), sdk(gateway, sent=sent, api_key="secret") as client:
        answer = await client.chat.completions.create(
            model="model",
            messages=[
                {"role": "system", "content": "Grüße, 世界"},
                {"role": "user", "content": "and now?"},
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"at": "Ulm"}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            ],
            tools=TOOLS,
            tool_choice="auto" if kind == "sglang" else "none",  # vLLM takes "auto" only with an option
            parallel_tool_calls=False,
            temperature=0.1,
            max_completion_tokens=4,
            response_format={"type": "json_object"},
            stream=is_stream,
            extra_body={"top_k": 20, "chat_template_kwargs": {"enable_thinking": False}, "unheard_of": [1.50, None]},
        )
        if isinstance(answer, openai.AsyncStream):
            assert [chunk async for chunk in answer]
        entry = only(engine, CHAT)
        assert without_id(entry.body) == json.loads(sent[0])
        # Not only the same document: the client's own bytes, with the id in one place.
        assert sent[0].strip(b"{}") in (entry.body or b"")
        assert entry.header("authorization") is None
        names = [name.lower() for name, _ in entry.headers]
        assert [name for name in names if name.startswith(("x-stainless", "user-agent", "openai"))] == []


async def test_tool_calls_of_an_engine_arrive(front: RunningGateway, scripted: ScriptEngine) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"at":"Ulm"}'}}

    async def answer(request: Any, reply: Any) -> None:
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        body = {"id": request.rid, "object": "chat.completion", "created": 1, "model": "model", "choices": [choice]}
        await reply.whole(json.dumps(body).encode())

    scripted.script = answer
    async with sdk(front) as client:
        answered = await client.chat.completions.create(model="model", messages=USER, tools=TOOLS)
    calls = answered.choices[0].message.tool_calls
    assert calls is not None
    assert [one.model_dump() for one in calls] == [call]
    assert json.loads(scripted.requests[0].body)["tools"] == TOOLS


# What goes wrong before the first byte.


@pytest.mark.parametrize(
    ("fault", "extra", "error", "status", "says"),
    [
        pytest.param(None, {"bootstrap_room": 1}, openai.BadRequestError, 400, "bootstrap_room", id="gateway's 400"),
        pytest.param(None, {"messages": []}, openai.BadRequestError, 400, "", id="engine's 400"),
        pytest.param(None, {"model": "nobody"}, openai.NotFoundError, 404, "nobody", id="unknown model"),
        pytest.param("status:422", {}, openai.UnprocessableEntityError, 422, "status 422", id="engine's 422"),
        pytest.param("status:429", {}, openai.RateLimitError, 429, "status 429", id="engine's 429"),
        pytest.param("status:401", {}, openai.InternalServerError, 502, "credentials", id="our key is refused"),
        pytest.param("status:500", {}, openai.InternalServerError, 502, "status 500", id="engine's 500"),
        pytest.param("status:503", {}, openai.InternalServerError, 503, "status 503", id="engine's 503"),
        pytest.param("garbage", {}, openai.InternalServerError, 502, "not as expected", id="no HTTP"),
    ],
)
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_errors_have_the_packages_own_classes(
    kind: str,
    is_stream: bool,
    fault: str | None,
    extra: dict[str, Any],
    error: type[openai.APIStatusError],
    status: int,
    says: str,
) -> None:
    async with served(kind) as (engine, gateway), sdk(gateway) as client:
        if fault is not None:
            engine.add_fault(at="headers", do=fault)
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(
                model="model", messages=USER, max_tokens=3, stream=is_stream, extra_body=extra
            )
        assert type(caught.value) is error
        assert caught.value.status_code == status
        assert says in caught.value.message
        record = await gateway.record()
        assert caught.value.request_id == record.request_id


async def test_an_error_of_the_gateway_has_type_and_parameter(kind: str) -> None:
    async with served(kind) as (_, gateway), sdk(gateway) as client:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="nobody", messages=USER)
        assert (caught.value.type, caught.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("nobody")
        assert (caught.value.type, caught.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError) as caught:
            await client.files.list()
        assert caught.value.type == "not_found"


async def test_a_wrong_key_and_a_right_one(kind: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("right\n")
    async with served(kind, {"api_key_file": tmp_path / "keys"}) as (engine, gateway):
        async with sdk(gateway, api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError) as caught:
                await client.chat.completions.create(model="model", messages=USER)
            assert caught.value.type == "unauthorized"
        assert engine.log.requests_to(CHAT) == []
        async with sdk(gateway, api_key="right") as client:
            assert (await client.chat.completions.create(model="model", messages=USER, max_tokens=1)).choices


async def test_a_body_that_is_too_large(kind: str) -> None:
    async with served(kind, {"max_body_bytes": 1000}) as (_, gateway), sdk(gateway) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(model="model", prompt="a" * 2000)
        assert (caught.value.status_code, caught.value.type) == (413, "request_too_large")


async def test_without_workers_there_is_no_service() -> None:
    async with running_gateway() as gateway, sdk(gateway) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="model", messages=USER)
        assert (caught.value.status_code, caught.value.type) == (503, "unavailable")


async def test_the_packages_retry_is_a_second_request(kind: str) -> None:
    async with served(kind) as (engine, gateway), sdk(gateway, max_retries=1) as client:
        engine.add_fault(at="headers", do="status:503")
        answer = await client.chat.completions.create(model="model", messages=USER, max_tokens=2)
        assert answer.choices[0].finish_reason == "length"
        await gateway.record(2)
        assert [(record.status, record.outcome) for record in gateway.records] == [
            (503, "engine_error"),
            (200, "complete"),
        ]


# What goes wrong after it.


@pytest.mark.parametrize(
    ("do", "says", "outcome"),
    [
        pytest.param("status:500", "scripted status 500", "engine_error", id="the engine's error event"),
        pytest.param("reset", "broke off", "truncated", id="the engine is gone"),
    ],
)
async def test_a_stream_that_fails_raises(kind: str, do: str, says: str, outcome: str) -> None:
    async with served(kind) as (engine, gateway), sdk(gateway) as client:
        engine.add_fault(at="event:3", do=do)
        stream = await client.completions.create(model="model", prompt="a", max_tokens=50, stream=True)
        for _ in range(3):
            assert (await anext(stream)).choices
        with pytest.raises(openai.APIError, match=says) as caught:
            await anext(stream)
        assert not isinstance(caught.value, openai.APIConnectionError)
        assert (await gateway.record()).outcome == outcome


async def test_a_unary_answer_that_breaks_off_raises(kind: str) -> None:
    async with served(kind) as (engine, gateway), sdk(gateway) as client:
        engine.add_fault(at="end", do="reset")
        with pytest.raises(openai.InternalServerError, match="broke off"):
            await client.completions.create(model="model", prompt="a", max_tokens=5)


# Leaving.


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_a_timeout_stops_the_engine(kind: str, is_stream: bool) -> None:
    async with served(kind) as (engine, gateway), sdk(gateway, timeout=SHORT_TIMEOUT_S) as client:
        engine.freeze()
        with pytest.raises(openai.APITimeoutError):
            await client.completions.create(model="model", prompt="a", max_tokens=LONG, stream=is_stream)
        await is_told(engine)
        assert (await gateway.record()).outcome == "client_closed"
        await gateway.settle()


async def test_a_timeout_in_a_stream_stops_the_engine(kind: str) -> None:
    async with served(kind, inter_token_ms=1.0) as (engine, gateway), sdk(gateway, timeout=SHORT_TIMEOUT_S) as client:
        stream = await client.completions.create(model="model", prompt="a", max_tokens=LONG, stream=True)
        assert (await anext(stream)).choices
        engine.freeze()
        with pytest.raises(openai.APITimeoutError):
            async for _ in stream:
                pass
        await is_told(engine)
        assert (await gateway.record()).outcome == "client_closed"
        await gateway.settle()


@pytest.mark.parametrize("how", ["leave the block", "close", "cancel"])
async def test_leaving_a_stream_stops_the_engine(kind: str, how: str) -> None:
    async with served(kind, inter_token_ms=1.0) as (engine, gateway), sdk(gateway) as client:
        if how == "cancel":
            await _cancelled(client)
        else:
            stream = await client.chat.completions.create(model="model", messages=USER, max_tokens=LONG, stream=True)
            if how == "close":
                assert await anext(stream)
                await stream.close()
            else:
                async with stream:
                    async for _ in stream:
                        break
        await is_told(engine)
        assert only(engine, CHAT).ended == "client_closed"
        assert (await gateway.record()).outcome == "client_closed"
        await gateway.settle()
        # Nothing is left that would be in the way of the next one.
        assert (await client.chat.completions.create(model="model", messages=USER, max_tokens=2)).choices


async def _cancelled(client: AsyncOpenAI) -> None:
    """Begin to read a stream in a task, and cancel that."""
    began = asyncio.Event()

    async def read() -> None:
        stream = await client.chat.completions.create(model="model", messages=USER, max_tokens=LONG, stream=True)
        async with stream:
            async for _ in stream:
                began.set()

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        reading = group.create_task(read())
        await began.wait()
        reading.cancel()


async def test_leaving_a_stream_without_asyncio_stops_the_engine(kind: str) -> None:
    def use(url: str) -> None:
        http = openai.DefaultHttpxClient(trust_env=False)
        with (
            OpenAI(base_url=f"{url}/v1", api_key="unused", http_client=http, max_retries=0) as client,
            client.completions.create(model="model", prompt="a", max_tokens=LONG, stream=True) as stream,
        ):
            next(stream)

    async with served(kind, inter_token_ms=1.0) as (engine, gateway):
        await asyncio.to_thread(use, gateway.url)
        await is_told(engine)
        assert (await gateway.record()).outcome == "client_closed"
        await gateway.settle()

"""vLLM's answers, refusals and small routes."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from tests.simulator.conftest import StartEngine
from tests.simulator.vllm_requests import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    USER,
    abort,
    body,
    finishes,
    frozen,
    open_request,
    started,
)
from tests.simulator.wire import ask

# -- what comes out --------------------------------------------------------------------------------


async def test_the_same_tokens_as_the_other_engine_kind(start_engine: StartEngine) -> None:
    vllm, sglang = await started(start_engine, seed=7), await start_engine(seed=7)
    params = {"n": 2, "seed": 5, "temperature": 0.5, "max_tokens": 12}
    for path, prompt in ((COMPLETIONS, {"prompt": "abc"}), (CHAT, {"messages": USER})):
        answers = [(await ask(engine.port, path, {**prompt, **params})).json() for engine in (vllm, sglang)]
        texts = [[c.get("text") or c["message"]["content"] for c in found["choices"]] for found in answers]
        assert texts[0] == texts[1]
        assert texts[0][0] != texts[0][1]
    ids = (await ask(vllm.port, GENERATE, body(GENERATE, 12))).json()["choices"][0]["token_ids"]
    other = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 12}}
    assert ids == (await ask(sglang.port, "/generate", other)).json()["output_ids"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
async def test_a_stream_is_the_unary_answer_in_pieces(start_engine: StartEngine, path: str) -> None:
    engine = await started(start_engine)
    extra = {"output_mode": "text"} if path == GENERATE else {"seed": 3, "return_token_ids": True}
    unary = (await ask(engine.port, path, body(path, 300, **extra))).json()["choices"][0]
    events = (await ask(engine.port, path, body(path, 300, stream=True, **extra))).events()
    choices = [event["choices"][0] for event in events[:-1]]
    texts = [choice["delta"]["content"] if "delta" in choice else choice["text"] for choice in choices]
    assert "".join(texts) == (unary["message"]["content"] if path == CHAT else unary["text"])
    assert "" in texts[1:], "half a character has no text yet"
    assert [token for choice in choices for token in choice.get("token_ids", ())] == unary["token_ids"]


async def test_a_stop_string_is_not_sent_in_part(start_engine: StartEngine) -> None:
    engine = await started(start_engine)
    text = (await ask(engine.port, COMPLETIONS, body(COMPLETIONS, 60))).json()["choices"][0]["text"]
    stop = text[20:26]
    for keep in (False, True):
        fields = body(COMPLETIONS, 60, stop=[stop], stream=True, include_stop_str_in_output=keep)
        events = (await ask(engine.port, COMPLETIONS, fields)).events()[:-1]
        sent = "".join(event["choices"][0]["text"] for event in events)
        assert sent == text[: text.index(stop) + (len(stop) if keep else 0)]
        last = events[-1]["choices"][0]
        assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


async def test_cached_tokens_salts_and_adapters(start_engine: StartEngine) -> None:
    engine = await started(start_engine, page_size=4, model="m", lora_names="a,b")

    async def cached(**more: Any) -> int:
        fields = body(COMPLETIONS, 1, prompt=list(range(5, 25)), **more)
        answer = (await ask(engine.port, COMPLETIONS, fields)).json()
        assert answer["model"] == more.get("model", "m")
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert await cached() == 0
    assert await cached() == 16
    assert await cached(cache_salt="s") == 0
    assert await cached(cache_salt="s") == 16
    assert await cached(model="a") == 0
    assert await cached(model="b") == 0
    assert await cached(model="b") == 16
    assert await cached(prompt_logprobs=1) == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_prompt_and_answer(start_engine: StartEngine, stream: bool) -> None:
    engine = await started(start_engine)
    fields = body(COMPLETIONS, 3, logprobs=0, echo=True, stream=stream)
    answer = await ask(engine.port, COMPLETIONS, fields)
    found = answer.events()[:-1] if stream else [answer.json()]
    logprobs = [event["choices"][0]["logprobs"] for event in found]
    text = "".join(event["choices"][0]["text"] for event in found)
    assert text.startswith("abc")
    offsets = [offset for item in logprobs for offset in item["text_offset"]]
    assert offsets == list(range(6))
    values = [value for item in logprobs for value in item["token_logprobs"]]
    assert (values[0], len(values)) == (None, 6)
    if not stream:
        assert len(found[0]["choices"][0]["prompt_logprobs"]) == 3


async def test_logprobs_of_chat(start_engine: StartEngine) -> None:
    engine = await started(start_engine)
    fields = body(CHAT, 2, logprobs=True, top_logprobs=0, prompt_logprobs=2, return_tokens_as_token_ids=True)
    found = (await ask(engine.port, CHAT, fields)).json()
    entry = found["choices"][0]["logprobs"]["content"][0]
    assert entry["token"].startswith("token_id:")
    assert entry["top_logprobs"] == []
    assert [None if item is None else len(item) for item in found["prompt_logprobs"][:2]] == [None, 2]


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        pytest.param(COMPLETIONS, {"prompt": "a", "min_tokens": 9, "max_tokens": 2}, 400, id="min above max"),
        pytest.param(COMPLETIONS, {"prompt": "a", "top_k": -2}, 400, id="top_k"),
        pytest.param(COMPLETIONS, {"prompt": "a", "presence_penalty": 3}, 400, id="penalty"),
        pytest.param(COMPLETIONS, {"prompt": "a", "logprobs": -2}, 400, id="logprobs"),
        pytest.param(COMPLETIONS, {"prompt": "a", "logprobs": -1, "max_tokens": 1}, 200, id="all logprobs"),
        pytest.param(COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, 400, id="prompt logprobs"),
        pytest.param(COMPLETIONS, {"prompt": "a", "stop": 5}, 400, id="stop"),
        pytest.param(COMPLETIONS, {"prompt": "a", "stop": []}, 200, id="no stops"),
        pytest.param(COMPLETIONS, {"prompt": "a", "stop": ["x", ""]}, 400, id="empty stop in list"),
        pytest.param(COMPLETIONS, {"prompt": "a", "stop_token_ids": ["x"]}, 400, id="stop ids"),
        pytest.param(COMPLETIONS, {"prompt": 5}, 400, id="prompt"),
        pytest.param(COMPLETIONS, {"prompt": [1.5]}, 400, id="prompt float"),
        pytest.param(COMPLETIONS, {"prompt": [[5, 6], [7]], "max_tokens": 1}, 200, id="lists"),
        pytest.param(COMPLETIONS, {"prompt": [[5], []]}, 400, id="empty list"),
        pytest.param(COMPLETIONS, {"prompt": "a", "max_tokens": "3"}, 200, id="number as string"),
        pytest.param(COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, 400, id="float as integer"),
        pytest.param(COMPLETIONS, {"prompt": "a", "stream": "maybe"}, 400, id="string as boolean"),
        pytest.param(COMPLETIONS, {"prompt": "a", "stream": []}, 400, id="list as boolean"),
        pytest.param(COMPLETIONS, {"prompt": "a", "echo": "true", "max_tokens": 1}, 200, id="boolean as string"),
        pytest.param(COMPLETIONS, {"prompt": "a", "model": 5}, 400, id="model"),
        pytest.param(COMPLETIONS, [], 400, id="no object"),
        pytest.param(CHAT, {"messages": "x"}, 400, id="messages"),
        pytest.param(CHAT, {"messages": []}, 400, id="no messages"),
        pytest.param(CHAT, {"messages": USER, "top_logprobs": 2}, 400, id="tops without logprobs"),
        pytest.param(CHAT, {"messages": USER, "tools": [{}], "tool_choice": "none", "max_tokens": 1}, 200, id="tools"),
        pytest.param(CHAT, {"messages": USER, "structured_outputs": {"json": "{}"}, "max_tokens": 1}, 200, id="schema"),
        pytest.param(GENERATE, {"token_ids": [-1], "sampling_params": {}}, 400, id="negative id"),
        pytest.param(GENERATE, {"token_ids": [1], "sampling_params": 5}, 400, id="sampling"),
        pytest.param(GENERATE, {"sampling_params": {}}, 400, id="no ids"),
        pytest.param(GENERATE, {"token_ids": [1], "sampling_params": {"temperature": "x"}}, 400, id="temperature"),
        pytest.param("/v1/messages", {"messages": USER}, 400, id="messages without limit"),
        pytest.param("/v1/messages", {"messages": USER, "max_tokens": 1, "model": "x"}, 404, id="messages model"),
        pytest.param("/v1/messages/count_tokens", {"messages": USER}, 200, id="count"),
        pytest.param("/v1/messages/count_tokens", {}, 400, id="count nothing"),
        pytest.param("/v1/responses", {}, 400, id="responses without input"),
        pytest.param(
            "/v1/responses", {"input": USER, "instructions": "x", "max_output_tokens": 1}, 200, id="responses"
        ),
        pytest.param("/v1/responses/x/cancel", {}, 404, id="cancel"),
        pytest.param("/v1/embeddings", {"input": "x"}, 404, id="embeddings of a generation model"),
        pytest.param("/tokenize", {"prompt": 5}, 400, id="tokenize"),
        pytest.param("/tokenize", {"messages": USER, "add_generation_prompt": False}, 200, id="tokenize messages"),
        pytest.param("/detokenize", {}, 400, id="detokenize nothing"),
        pytest.param("/detokenize", {"tokens": "x"}, 400, id="detokenize"),
        pytest.param("/inference/v1/abort_requests", [], 400, id="abort"),
        pytest.param("/inference/v1/abort_requests", {"request_ids": "x"}, 200, id="abort one"),
        pytest.param("/pause", {}, 404, id="development route"),
        pytest.param("/generate", {}, 404, id="the other engine's route"),
    ],
)
async def test_status(start_engine: StartEngine, path: str, fields: Any, status: int) -> None:
    engine = await started(start_engine)
    answer = await ask(engine.port, path, fields)
    assert answer.status == status
    if status == 400:
        assert answer.json()["error"]["type"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/x", CHAT, "/health", "/inference/v1/generate"])
async def test_wrong_methods(start_engine: StartEngine, path: str) -> None:
    engine = await started(start_engine)
    assert (await ask(engine.port, path, method="DELETE")).status == 405


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue(start_engine: StartEngine, stream: bool) -> None:
    engine = await started(start_engine, max_running=1, max_queued=1)
    engine.freeze()
    async with asyncio.TaskGroup() as group:
        first = group.create_task(ask(engine.port, CHAT, body(CHAT, 2)))
        await engine.wait_for(lambda e: e.running == 1)
        second = group.create_task(ask(engine.port, CHAT, body(CHAT, 2)))
        await engine.wait_for(lambda e: e.waiting == 1)
        refused = await ask(engine.port, CHAT, body(CHAT, 2, stream=stream))
        assert (refused.status, refused.json()["error"]["type"]) == (503, "ServiceUnavailableError")
        engine.thaw()
    assert first.result().status == second.result().status == 200


# -- other routes ----------------------------------------------------------------------------------


async def test_metrics(start_engine: StartEngine) -> None:
    engine = await started(start_engine, dp_size=2, page_size=8, num_blocks=100, model="m", inter_token_ms=1)
    _, writer = await open_request(engine, CHAT, body(CHAT), X_data_parallel_rank="1")
    await engine.wait_for(frozen(1))
    answer = await ask(engine.port, "/metrics", method="GET")
    page = answer.body.decode()
    assert dict(answer.headers)["content-type"] == "text/plain; version=1.0.0; charset=utf-8"
    assert 'vllm:num_requests_running{engine="0",model_name="m"} 0.0\n' in page
    assert 'vllm:num_requests_running{engine="1",model_name="m"} 1.0\n' in page
    usage = re.search(r'vllm:kv_cache_usage_perc\{engine="1",model_name="m"\} (\S+)', page)
    assert usage is not None
    assert 0 < float(usage[1]) <= 1
    infos = re.findall(r"vllm:cache_config_info\{(.*)\} 1.0", page)
    assert len(infos) == 2
    for rank, labels in enumerate(infos):
        assert f'engine="{rank}"' in labels
        assert re.search(r'\bblock_size="8"', labels)
        assert 'num_gpu_blocks="100"' in labels
    assert (await ask(engine.port, "/load", method="GET")).json() == {"server_load": 1}
    writer.close()


async def test_every_boot_has_its_own_start_time(start_engine: StartEngine) -> None:
    engine = await started(start_engine)
    times = []
    for _ in range(2):
        page = (await ask(engine.port, "/metrics", method="GET")).body.decode()
        times += re.findall(r"^process_start_time_seconds (\S+)$", page, re.MULTILINE)
        assert (await ask(engine.port, "/_restart")).status == 200
    assert len(set(times)) == 2


async def test_metadata(start_engine: StartEngine) -> None:
    engine = await started(start_engine, model="m", context_length=100, engine_version="0.33.1")
    assert (await ask(engine.port, "/version", method="GET")).json() == {"version": "0.33.1"}
    assert (await ask(engine.port, "/v1/models", method="GET")).json()["data"][0]["max_model_len"] == 100
    assert (await ask(engine.port, "/kv_event_sources", method="GET")).status == 404
    assert (await ask(engine.port, "/server_info", method="GET")).status == 404


@pytest.mark.parametrize(("mode", "finish"), [("abort", "abort"), ("wait", "length"), ("keep", "length")])
async def test_pause(start_engine: StartEngine, mode: str, finish: str) -> None:
    engine = await started(start_engine, dev_mode=True, inter_token_ms=2)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(ask(engine.port, CHAT, body(CHAT, 400)))  # longer than anything here may take
        await engine.wait_for(lambda e: e.running == 1)
        assert (await ask(engine.port, f"/pause?mode={mode}")).json() == {"status": "paused"}
        assert engine.running == (1 if mode == "keep" else 0)
        assert (await ask(engine.port, "/is_paused", method="GET")).json() == {"is_paused": True}
        held = group.create_task(ask(engine.port, CHAT, body(CHAT, 3, stream=True), X_Request_Id="H"))
        await engine.wait_for(lambda e: e.held == 1)
        dropped = group.create_task(ask(engine.port, CHAT, body(CHAT, 3), X_Request_Id="D"))
        await engine.wait_for(lambda e: e.held == 2)
        page = (await ask(engine.port, "/metrics", method="GET")).body.decode()
        assert re.search(r"vllm:num_requests_waiting\{.*\} 2.0", page)
        await abort(engine, "chatcmpl-D")
        assert finishes(await dropped) == ["abort"]
        assert (await ask(engine.port, "/resume")).json() == {"status": "resumed"}
    assert finishes(task.result()) == [finish]
    assert held.result().events()[-1] == "[DONE]"
    assert (await ask(engine.port, "/pause?mode=sleep")).status == 400


async def test_other_development_routes(start_engine: StartEngine) -> None:
    engine = await started(start_engine, dev_mode=True, inter_token_ms=1)
    assert (await ask(engine.port, "/server_info", method="GET")).json()["vllm_config"]["cache_config"]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(engine.port, CHAT, body(CHAT), X_Request_Id=name)) for name in "ab"]
        await engine.wait_for(frozen(2))
        assert (await ask(engine.port, "/reset_prefix_cache")).json() == {"success": False}
        one = await ask(engine.port, "/abort_requests", {"request_ids": ["chatcmpl-a"]})
        rest = await ask(engine.port, "/abort_requests", {})
        assert one.json() == rest.json() == {"status": "aborted", "aborted": 1}
        engine.thaw()
    assert [finishes(task.result()) for task in tasks] == [["abort"], ["abort"]]
    assert (await ask(engine.port, "/abort_requests")).status == 400
    assert (await ask(engine.port, "/reset_prefix_cache")).json() == {"success": True}
    assert (await ask(engine.port, "/sleep?level=1")).status == 200
    assert (await ask(engine.port, "/is_sleeping", method="GET")).json() == {"is_sleeping": True}
    assert (await ask(engine.port, "/wake_up")).status == 200
    assert (await ask(engine.port, "/is_sleeping", method="GET")).json() == {"is_sleeping": False}
    assert (await ask(engine.port, CHAT, body(CHAT, 1))).status == 200


@pytest.mark.parametrize(("path", "kind"), [("/v1/embeddings", "embedding"), ("/pooling", "pooling")])
async def test_embeddings(start_engine: StartEngine, path: str, kind: str) -> None:
    engine = await started(start_engine, is_embedding=True)
    found = (await ask(engine.port, path, {"input": ["a", "bc"]}, X_Request_Id="X")).json()
    assert [(item["object"], item["index"]) for item in found["data"]] == [(kind, 0), (kind, 1)]
    assert (found["usage"]["prompt_tokens"], found["id"][-2:]) == (3, "-X")
    assert (await ask(engine.port, path, {"input": [5, 6]})).json()["usage"]["prompt_tokens"] == 2
    wrongs: tuple[dict[str, Any], ...] = ({}, {"input": []}, {"input": {}})
    for wrong in wrongs:
        assert (await ask(engine.port, path, wrong)).status == 400


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_streams_without_done(start_engine: StartEngine, path: str) -> None:
    engine = await started(start_engine, inter_token_ms=1)
    fields = body(path, 20, stream=True, system="s", stop_sequences=["nothing like it"], stop=None)
    answer = await ask(engine.port, path, fields)
    names = [chunk.split(b"\n")[0].decode() for chunk in answer.chunks]
    last = {"/v1/messages": "event: message_stop", "/v1/responses": "event: response.incomplete"}[path]
    assert names[-1] == last
    events = answer.events()
    deltas = [e["delta"] for e in events if e["type"] in ("content_block_delta", "response.output_text.delta")]
    text = "".join(delta if isinstance(delta, str) else delta["text"] for delta in deltas)
    unary = (await ask(engine.port, path, {**fields, "stream": False})).json()
    content = unary["content"] if path == "/v1/messages" else unary["output"][0]["content"]
    assert content[0]["text"] == text
    async with asyncio.TaskGroup() as group:
        task = group.create_task(ask(engine.port, path, fields))
        await engine.wait_for(frozen(1))
        assert (await ask(engine.port, "/_die")).status == 200
    assert "error" in task.result().chunks[-1].decode()

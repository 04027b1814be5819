"""Refusals and small routes, one line each."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.simulator.conftest import StartEngine
from tests.simulator.wire import ask

USER = [{"role": "user", "content": "hi"}]


def sampling(**params: Any) -> dict[str, Any]:
    return {"text": "abc", "sampling_params": params}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        pytest.param("/generate", sampling(top_k=0), 400, id="top_k"),
        pytest.param("/generate", sampling(frequency_penalty=3), 400, id="frequency_penalty"),
        pytest.param("/generate", sampling(min_new_tokens=5, max_new_tokens=3), 400, id="min_new_tokens"),
        pytest.param("/generate", sampling(ignore_eos="yes"), 400, id="boolean as string"),
        pytest.param("/generate", sampling(temperature=True), 400, id="boolean as number"),
        pytest.param("/generate", sampling(max_new_tokens=1.5), 400, id="float as integer"),
        pytest.param("/generate", sampling(max_new_tokens=[1]), 400, id="list as integer"),
        pytest.param("/generate", sampling(top_p={}), 400, id="map as number"),
        pytest.param("/generate", sampling(stop="e", no_stop_trim=True, max_new_tokens=200), 200, id="stop string"),
        pytest.param("/generate", sampling(max_new_tokens=None, n=None), 200, id="nulls"),
        pytest.param("/generate", {"text": ["a", "b"], "sampling_params": [{}]}, 400, id="too few samplings"),
        pytest.param("/generate", {"text": ["a"], "sampling_params": [{"max_new_tokens": 1}]}, 200, id="list"),
        pytest.param("/generate", {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, 400, id="different n"),
        pytest.param("/generate", {"input_ids": 5}, 400, id="ids no list"),
        pytest.param("/generate", {"input_ids": [1 << 40]}, 400, id="huge id"),
        pytest.param("/v1/chat/completions", {"messages": "x"}, 400, id="messages no list"),
        pytest.param("/v1/chat/completions", {"messages": USER, "stream": "x"}, 400, id="chat stream string"),
        pytest.param("/v1/chat/completions", {"messages": USER, "lora_path": "x"}, 400, id="chat lora"),
        pytest.param("/v1/chat/completions", {"messages": USER, "seed": 4, "min_tokens": 1, "max_tokens": 2}, 200),
        pytest.param("/v1/completions", {"prompt": "a", "logprobs": "x"}, 400, id="logprobs string"),
        pytest.param("/v1/completions", {"prompt": "a", "return_flat_raw_top_logprobs": True}, 400, id="flat"),
        pytest.param("/v1/completions", {"prompt": [[5, 6], [7]], "rid": "c", "max_tokens": 1}, 200, id="id lists"),
        pytest.param("/v1/messages", {"messages": USER}, 400, id="messages without limit"),
        pytest.param("/v1/messages", {"messages": USER, "max_tokens": -1}, 400, id="messages with bad limit"),
        pytest.param(
            "/v1/messages",
            {"messages": USER, "max_tokens": 99, "system": "s", "stop_sequences": ["e"]},
            200,
            id="messages with stop",
        ),
        pytest.param("/v1/messages/count_tokens", {"messages": []}, 400, id="count nothing"),
        pytest.param("/v1/responses", {"input": 5}, 400, id="responses input"),
        pytest.param("/v1/responses", {"input": "a", "instructions": "b", "max_output_tokens": -1}, 400),
        pytest.param("/tokenize", {"prompt": ["a", "b"]}, 200, id="tokenize list"),
        pytest.param("/tokenize", {"prompt": 5}, 400, id="tokenize number"),
        pytest.param("/detokenize", {"tokens": [[5], [6]]}, 200, id="detokenize lists"),
        pytest.param("/detokenize", {"tokens": "x"}, 400, id="detokenize string"),
        pytest.param("/v1/score", {"query": "a", "items": "b", "label_token_ids": [1]}, 200, id="score"),
        pytest.param("/v1/score", {"query": "a", "items": [], "label_token_ids": [1]}, 400, id="score nothing"),
        pytest.param("/v1/score", {"query": "a", "items": ["b"]}, 400, id="score without labels"),
        pytest.param("/pause_generation", {"mode": "sleep"}, 400, id="pause mode"),
        pytest.param("/update_weights_from_disk", {"model_path": "m", "weight_version": "9"}, 200, id="weights"),
        pytest.param("/update_weight_version", {"new_version": "9"}, 200, id="weight version"),
        pytest.param("/release_memory_occupation", {}, 200, id="release"),
        pytest.param("/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}, 400, id="lora"),
        pytest.param("/v1/responses/x/cancel", {}, 404, id="cancel unknown"),
    ],
)
async def test_status(start_engine: StartEngine, path: str, body: Any, status: int) -> None:
    engine = await start_engine()
    assert (await ask(engine.port, path, body)).status == status
    assert not engine.is_dead


@pytest.mark.parametrize("path", ["/encode", "/v1/embeddings", "/v1/rerank"])
async def test_embedding_routes_want_input(start_engine: StartEngine, path: str) -> None:
    engine = await start_engine(is_embedding=True)
    assert (await ask(engine.port, path, {})).status == 400


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/x", "/v1/chat/completions", "/_log"])
async def test_wrong_methods(start_engine: StartEngine, path: str) -> None:
    engine = await start_engine()
    assert (await ask(engine.port, path, method="DELETE")).status in (404, 405)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/completions"])
async def test_a_full_queue_inside_streams(start_engine: StartEngine, path: str) -> None:
    engine = await start_engine(max_running=1, max_queued=1)
    engine.freeze()
    limits = {"max_tokens": 3, "max_output_tokens": 3}
    body = {"messages": USER, "input": "hi", "prompt": "hi", "stream": True, **limits}
    async with asyncio.TaskGroup() as group:
        first = group.create_task(ask(engine.port, path, body))
        await engine.wait_for(lambda e: e.running == 1)
        second = group.create_task(ask(engine.port, path, body))
        await engine.wait_for(lambda e: e.waiting == 1)
        events = (await ask(engine.port, path, body)).events()
        assert "queue is full" in str(events[0])
        engine.thaw()
    assert first.result().status == second.result().status == 200

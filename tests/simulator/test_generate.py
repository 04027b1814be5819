"""Native answers: values that the captures cannot tell, ranks, keys, cache, health, embeddings."""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any

import numpy as np
import pytest

from simulator.server import WaitTimeout
from tests.simulator.conftest import StartEngine
from tests.simulator.wire import ask


def body(text: str = "Hello world, how are you", tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {"text": text, "sampling_params": {"max_new_tokens": tokens, **more.pop("params", {})}, **more}


async def test_answers_are_deterministic(start_engine: StartEngine) -> None:
    engines = [await start_engine(), await start_engine(), await start_engine(seed=1)]
    texts = [(await ask(engine.port, "/generate", body())).json()["text"] for engine in engines]
    assert texts[0] == texts[1] != texts[2]
    seeded = await ask(engines[0].port, "/generate", body(params={"sampling_seed": 5}))
    assert seeded.json()["text"] != texts[0]
    both = (await ask(engines[0].port, "/generate", body(params={"n": 2}))).json()
    assert both[0]["text"] == texts[0] != both[1]["text"]


async def test_stream_and_unary_agree(start_engine: StartEngine) -> None:
    engine = await start_engine()
    unary = (await ask(engine.port, "/generate", body(tokens=100))).json()
    stream = (await ask(engine.port, "/generate", body(tokens=100, stream=True))).events()
    assert stream[-2]["text"] == unary["text"]
    assert stream[-2]["output_ids"] == unary["output_ids"]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
    whole = (await ask(engine.port, "/v1/chat/completions", chat)).json()["choices"][0]["message"]["content"]
    events = (await ask(engine.port, "/v1/chat/completions", {**chat, "stream": True})).events()[:-1]
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == whole


async def test_flat_and_nested_say_the_same(start_engine: StartEngine) -> None:
    engine = await start_engine()
    asked = body(return_logprob=True, top_logprobs_num=3, logprob_start_len=0)
    nested = (await ask(engine.port, "/generate", asked)).json()["meta_info"]
    flags = {"return_flat_raw_top_logprobs": True, "return_flat_raw_output_top_logprobs": True}
    flat = (await ask(engine.port, "/generate", {**asked, **flags})).json()["meta_info"]
    packed_flags = {**flags, "return_flat_raw_top_logprobs_b64": True}
    packed = (await ask(engine.port, "/generate", {**asked, **packed_flags})).json()["meta_info"]
    for side in ("input", "output"):
        rows = [row for row in nested[f"{side}_top_logprobs"] if row is not None]
        values = [value for row in rows for value, _, _ in row]
        ids = [token for row in rows for _, token, _ in row]
        assert flat[f"{side}_top_logprobs_val_flat"] == values
        assert flat[f"{side}_top_logprobs_idx_flat"] == ids
        assert flat[f"{side}_top_logprobs_shape"] == [len(rows), 3]
        raw = base64.b64decode(packed[f"{side}_top_logprobs_val_flat_b64"])
        assert np.frombuffer(raw, "<f4").tolist() == values
        raw = base64.b64decode(packed[f"{side}_top_logprobs_idx_flat_b64"])
        assert np.frombuffer(raw, "<i4").tolist() == ids


async def test_a_very_long_flat_answer(start_engine: StartEngine) -> None:
    engine = await start_engine()
    flags: dict[str, Any] = {
        "return_logprob": True,
        "top_logprobs_num": 1000,
        "return_flat_raw_output_top_logprobs": True,
    }
    started = time.monotonic()
    answer = await ask(engine.port, "/generate", {**body(tokens=4000), **flags})
    assert len(answer.body) > 40_000_000
    assert answer.json()["meta_info"]["output_top_logprobs_shape"] == [4000, 1000]
    assert time.monotonic() - started < 30


async def test_ranks(start_engine: StartEngine) -> None:
    engine = await start_engine(dp_size=3)
    ranks = [(await ask(engine.port, "/generate", body())).json()["meta_info"]["dp_rank"] for _ in range(4)]
    assert ranks == [0, 1, 2, 0]
    chosen = await ask(engine.port, "/generate", body(routed_dp_rank=2), X_Data_Parallel_Rank="1")
    assert chosen.json()["meta_info"]["dp_rank"] == 2
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "routed_dp_rank": 0}
    await ask(engine.port, "/v1/chat/completions", chat, X_Data_Parallel_Rank="1")
    assert engine.log.requests[-1].dp_rank == 1
    for bad in ("x", "3", "-1"):
        assert (await ask(engine.port, "/v1/chat/completions", chat, X_Data_Parallel_Rank=bad)).status == 400
    loads = (await ask(engine.port, "/v1/loads?dp_rank=1&include=core", method="GET")).json()["loads"]
    assert [load["dp_rank"] for load in loads] == [1]
    assert "memory" not in loads[0]
    assert (await ask(engine.port, "/v1/loads?dp_rank=9", method="GET")).json()["loads"] == []


async def test_cached_prompts_are_faster_and_a_flush_forgets_them(start_engine: StartEngine) -> None:
    engine = await start_engine(page_size=4, prefill_tokens_per_s=10_000)
    prompt = list(range(3, 204)) * 3

    async def once() -> tuple[int, float]:
        asked = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}
        meta = (await ask(engine.port, "/generate", asked)).json()["meta_info"]
        return meta["cached_tokens"], meta["first_token_latency"]

    cold, warm = await once(), await once()
    assert (cold[0], warm[0]) == (0, 600)
    assert cold[1] >= 0.06 > warm[1]
    assert (await ask(engine.port, "/flush_cache")).status == 200
    assert (await once())[0] == 0
    engine.reset()
    assert (await once())[0] == 0
    engine.restart()
    assert (await once())[0] == 0


async def test_salted_prompts_share_nothing(start_engine: StartEngine) -> None:
    engine = await start_engine(page_size=4)
    cached = []
    for salt in ("a", "b", "a", None):
        answer = await ask(engine.port, "/generate", body(cache_salt=salt))
        cached.append(answer.json()["meta_info"]["cached_tokens"])
    assert cached == [0, 0, 20, 0]


@pytest.mark.parametrize(
    ("keys", "key", "normal", "admin"),
    [
        pytest.param({}, None, 200, 200, id="open"),
        pytest.param({"api_key": "a"}, None, 401, 401, id="no key"),
        pytest.param({"api_key": "a"}, "a", 200, 200, id="normal key"),
        pytest.param({"api_key": "a"}, "b", 401, 401, id="wrong key"),
        pytest.param({"api_key": "a", "admin_api_key": "b"}, "a", 200, 401, id="normal key for admin"),
        pytest.param({"api_key": "a", "admin_api_key": "b"}, "b", 401, 200, id="admin key"),
        pytest.param({"admin_api_key": "b"}, None, 200, 401, id="admin key only"),
    ],
)
async def test_keys(start_engine: StartEngine, keys: dict[str, Any], key: str | None, normal: int, admin: int) -> None:
    engine = await start_engine(**keys)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    assert (await ask(engine.port, "/generate", body(), **headers)).status == normal
    answer = await ask(engine.port, "/abort_request", {"rid": "x"}, **headers)
    assert answer.status == admin
    if admin == 401:
        assert answer.json() == {"error": "Unauthorized"}
    for path in ("/ready", "/metrics"):
        assert (await ask(engine.port, path, method="GET")).status == 200


@pytest.mark.parametrize("fields", [{"input_ids": [-1, 5]}, {"text": ""}], ids=["negative id", "empty text"])
async def test_deadly_requests_can_be_survived(start_engine: StartEngine, fields: dict[str, Any]) -> None:
    engine = await start_engine(die_on_bad_input=False)
    assert (await ask(engine.port, "/generate", fields)).status == 400
    assert not engine.is_dead


async def test_health_takes_its_time(start_engine: StartEngine) -> None:
    engine = await start_engine(health_min_s=1.0, speedup=20.0)
    started = time.monotonic()
    assert (await ask(engine.port, "/health", method="GET")).status == 200
    assert time.monotonic() - started >= 0.049
    assert engine.core.schedulers[0].totals.generated_tokens == 1


async def test_weight_version(start_engine: StartEngine) -> None:
    engine = await start_engine()
    answer = await ask(engine.port, "/update_weight_version", {"new_version": 7, "abort_all_requests": False})
    assert answer.json()["success"]
    assert (await ask(engine.port, "/generate", body())).json()["meta_info"]["weight_version"] == "7"
    assert (await ask(engine.port, "/model_info", method="GET")).json()["weight_version"] == "7"


async def test_embedding_engine(start_engine: StartEngine) -> None:
    engine = await start_engine(is_embedding=True)
    answer = (await ask(engine.port, "/v1/embeddings", {"model": "m", "input": ["a", "b"]})).json()
    assert [row["index"] for row in answer["data"]] == [0, 1]
    assert (await ask(engine.port, "/encode", {"text": "a"})).json()["embedding"]
    ranked = (await ask(engine.port, "/v1/rerank", {"query": "a", "documents": ["b", "c"]})).json()
    assert {row["index"] for row in ranked} == {0, 1}


async def test_chat_extras(start_engine: StartEngine) -> None:
    engine = await start_engine()
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 3}
    flags = {"logprobs": True, "top_logprobs": 2, "return_meta_info": True, "return_flat_raw_output_top_logprobs": True}
    extras = {"return_prompt_token_ids": True, "return_token_ids": True, "input_ids": [5, 6, 7]}
    choice = (await ask(engine.port, "/v1/chat/completions", {**chat, **flags, **extras})).json()["choices"][0]
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert len(choice["response_token_ids"]) == 3
    assert choice["meta_info"]["output_top_logprobs_val_flat_b64_dtype"] == "float32"
    assert (await ask(engine.port, "/v1/chat/completions", {**chat, **flags, "stream": True})).status == 400


async def test_stored_responses(start_engine: StartEngine) -> None:
    engine = await start_engine()
    made = (await ask(engine.port, "/v1/responses", {"input": "hi", "max_output_tokens": 4})).json()
    assert (await ask(engine.port, f"/v1/responses/{made['id']}", method="GET")).json() == made
    assert (await ask(engine.port, "/v1/responses/resp_x", method="GET")).status == 404
    stream = await ask(engine.port, "/v1/responses", {"input": "hi", "max_output_tokens": 4, "stream": True})
    events = stream.events()
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"]["output"][0]["content"][0]["text"]
    assert (
        await ask(engine.port, "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]})
    ).json()


async def test_a_predicate_that_fails_tells_its_waiter(start_engine: StartEngine) -> None:
    engine = await start_engine(inter_token_ms=1)
    calls = []

    def fails_later(_: object) -> bool:
        calls.append(1)
        if len(calls) > 1:
            raise LookupError
        return False

    async with asyncio.TaskGroup() as group:
        task = group.create_task(ask(engine.port, "/generate", body()))
        with pytest.raises(LookupError):
            await engine.wait_for(fails_later)
    assert task.result().status == 200
    with pytest.raises(WaitTimeout):
        await engine.wait_for(lambda e: False, timeout_s=0.01)

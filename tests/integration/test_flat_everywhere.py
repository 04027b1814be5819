"""Flat log-probabilities on every route and engine that has them: decoded with numpy they are the nested ones."""

import base64
from typing import Any

import numpy as np
import pytest

from tests.fakes.pair_fleet import pair_fleet
from tests.fakes.running import running_gateway
from tests.fakes.wire import call
from tests.integration.test_vllm import CHAT, COMPLETIONS, ask, engines, only, served

FLAT: dict[str, Any] = {"return_flat_raw_output_top_logprobs": True}
BASE64: dict[str, Any] = {**FLAT, "return_flat_raw_top_logprobs_b64": True}
# Tokens of the same text would be one in vLLM's lists.
IDS: dict[str, Any] = {"return_tokens_as_token_ids": True}
WIDTH = 3
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "logprobs": True, "top_logprobs": WIDTH,
        "temperature": 1.0,
    },
    COMPLETIONS: {"prompt": "hi", "max_tokens": 6, "logprobs": WIDTH},
    "/generate": {
        "input_ids": [5, 6], "return_logprob": True, "top_logprobs_num": WIDTH,
        "sampling_params": {"max_new_tokens": 6},
    },
}  # fmt: skip
Rows = list[list[float]]


def decoded(meta: dict[str, Any]) -> tuple[Rows, list[list[int]]]:
    """Values and ids of the output, row by row."""
    name = "output_top_logprobs"
    shape = meta[f"{name}_shape"]
    if f"{name}_val_flat" in meta:
        values, ids = np.array(meta[f"{name}_val_flat"], np.float64), np.array(meta[f"{name}_idx_flat"], np.int64)
    else:
        assert (meta[f"{name}_val_flat_b64_dtype"], meta[f"{name}_idx_flat_b64_dtype"]) == ("float32", "int32")
        values = np.frombuffer(base64.b64decode(meta[f"{name}_val_flat_b64"]), "<f4").astype(np.float64)
        ids = np.frombuffer(base64.b64decode(meta[f"{name}_idx_flat_b64"]), "<i4").astype(np.int64)
    assert meta[f"{name}_null_prefix"] == 0
    return values.reshape(shape).tolist(), ids.reshape(shape).tolist()


def metas(answer: Any) -> list[dict[str, Any]]:
    """The ``meta_info`` of every choice or item."""
    if isinstance(answer, dict) and "choices" in answer:
        answer = answer["choices"]
    return [one["meta_info"] for one in (answer if isinstance(answer, list) else [answer])]


Row = list[tuple[float, int]]


def nested(path: str, answer: Any) -> list[list[Row]]:
    """The likeliest tokens as the ordinary answer tells them, likeliest first, by choice; of texts the id is 0."""
    if path == "/generate":
        return [[[(top[0], top[1]) for top in row] for row in meta["output_top_logprobs"]] for meta in metas(answer)]
    found = []
    for choice in answer["choices"]:
        if path == CHAT:
            tops = [[(one["token"], one["logprob"]) for one in entry["top_logprobs"]] for entry in content(choice)]
        else:
            tops = [list(row.items()) for row in choice["logprobs"]["top_logprobs"]]
        rows = [[(value, int(name.partition("token_id:")[2] or 0)) for name, value in row] for row in tops]
        found.append([sorted(row, key=lambda one: -one[0])[:WIDTH] for row in rows])
    return found


def content(choice: dict[str, Any]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = choice["logprobs"]["content"]
    return entries


def assert_same(path: str, flat: Any, ordinary: Any) -> None:
    found = [decoded(meta) for meta in metas(flat)]
    for (values, ids), expected in zip(found, nested(path, ordinary), strict=True):
        assert np.shape(values) == np.shape(ids) == (6, WIDTH)
        assert np.allclose(values, [[value for value, _ in row] for row in expected], rtol=1e-6)
        known = [[token for _, token in row] for row in expected]
        assert ids == known or not np.any(known)


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("more", [FLAT, BASE64], ids=["lists", "Base64"])
@pytest.mark.parametrize("mode", ["match", "incremental"])
async def test_a_vllm_worker(path: str, more: dict[str, Any], mode: str) -> None:
    body = ASKED[path]
    async with served(settings={"upstream_mode": mode}) as (engine, gateway):
        flat = await ask(gateway, path, {**body, **more}, x_request_id="mine")
        assert (flat.status, flat.headers["content-length"]) == (200, str(len(flat.body)))
        assert b"mine" in flat.body
        if path != "/generate":
            assert only(engine, path).stream is False
        assert_same(path, flat.json(), (await ask(gateway, path, {**body, **IDS})).json())
        records = [await gateway.record(1), await gateway.record(2)]
        assert [record.completion_tokens for record in records] == [6, 6]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_samples_of_a_vllm_worker(path: str) -> None:
    body = {**ASKED[path], "n": 2, "temperature": 1.0, "seed": 5}
    async with served() as (_, gateway):
        flat = (await ask(gateway, path, {**body, **BASE64})).json()
        assert [choice["index"] for choice in flat["choices"]] == [0, 1]
        assert_same(path, flat, (await ask(gateway, path, {**body, **IDS})).json())


@pytest.mark.parametrize("path", [CHAT, "/generate"])
@pytest.mark.parametrize("more", [FLAT, BASE64], ids=["lists", "Base64"])
@pytest.mark.parametrize(("mode", "count"), [("match", 1), ("match", 2), ("incremental", 1)])
async def test_an_sglang_worker(path: str, more: dict[str, Any], mode: str, count: int) -> None:
    body = {**ASKED[path], "n": count}
    if path == "/generate":
        body = {**ASKED[path], "sampling_params": {"max_new_tokens": 6, "n": count}}
    async with (
        engines({"engine": "sglang"}) as (engine,),
        running_gateway(engine.url, upstream_mode=mode) as gateway,
    ):
        flat = await ask(gateway, path, {**body, **more})
        assert flat.status == 200
        assert len(metas(flat.json())) == count
        if path == CHAT:
            assert {entry.stream for entry in engine.log.requests_to(path)} == {False}
        assert_same(path, flat.json(), (await ask(gateway, path, body)).json())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("count", [1, 2])
async def test_a_vllm_pair(path: str, count: int) -> None:
    body = {**ASKED[path], "n": count, "temperature": 1.0, "seed": 5}
    async with pair_fleet(engine="vllm") as fleet:
        flat = await fleet.call(path, {**body, **BASE64})
        assert (flat.status, "x-forebay-prefill-worker" in flat.headers) == (200, True)
        assert len(metas(flat.json())) == count
        assert_same(path, flat.json(), (await fleet.call(path, {**body, **IDS})).json())


async def test_an_sglang_pair() -> None:
    async with pair_fleet() as fleet:
        flat = await fleet.call(CHAT, {**ASKED[CHAT], **FLAT})
        assert flat.status == 200
        assert_same(CHAT, flat.json(), (await fleet.call(CHAT, ASKED[CHAT])).json())


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("path", ASKED)
async def test_streams_are_refused(kind: str, path: str) -> None:
    async with engines({"engine": kind}) as (engine,), running_gateway(engine.url) as gateway:
        answer = await ask(gateway, path, {**ASKED[path], **FLAT, "stream": True})
        assert (answer.status, answer.json()["error"]["param"]) == (400, "return_flat_raw_output_top_logprobs")
        assert engine.log.requests_to(path) == []


async def test_completions_on_sglang_are_refused_and_go_to_vllm_where_there_is_one() -> None:
    body = {**ASKED[COMPLETIONS], **FLAT}
    async with engines({"engine": "sglang"}, {}) as (sglang, vllm):
        async with running_gateway(sglang.url) as gateway:
            answer = await ask(gateway, COMPLETIONS, body)
            assert (answer.status, answer.json()["error"]["param"]) == (400, "return_flat_raw_output_top_logprobs")
        async with running_gateway(sglang.url, vllm.url) as gateway:
            for _ in range(6):
                assert (await ask(gateway, COMPLETIONS, body)).status == 200
            pinned = {"x-forebay-worker": sglang.url.removeprefix("http://")}
            assert (await call(gateway.address, COMPLETIONS, body, headers=pinned)).status == 400
        assert sglang.log.requests_to(COMPLETIONS) == []


async def test_without_log_probabilities_there_are_no_arrays() -> None:
    async with served() as (_, gateway):
        answer = await ask(gateway, COMPLETIONS, {"prompt": "hi", "max_tokens": 2, **FLAT})
        assert (answer.status, "meta_info" in answer.json()["choices"][0]) == (200, False)
        refused = await ask(gateway, COMPLETIONS, {**ASKED[COMPLETIONS], **FLAT, "echo": True})
        assert (refused.status, refused.json()["error"]["param"]) == (400, "echo")

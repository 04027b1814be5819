"""Pairs of simulated engines against bytes of real ones: SGLang 0.5.23 (mooncake) and vLLM 0.32.0 (NIXL).

Compared as in the other capture tests, error messages whole but for ids and addresses.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from simulator.server import SimulatedEngine
from tests.simulator.conftest import StartEngine
from tests.simulator.pd_pairs import Pair, pins, queues, start_pair
from tests.simulator.shapes import problems
from tests.simulator.test_captures import assert_same_shape
from tests.simulator.test_vllm_captures import assert_same_shape as assert_same_vllm_shape
from tests.simulator.wire import (
    CAPTURES,
    VLLM_CAPTURES,
    Capture,
    ask,
    load_capture,
    load_vllm_capture,
    parse_answer,
    send,
    send_one,
)

OPTIONS: dict[str, Any] = {
    "page_size": 4,
    "num_blocks": 512,
    "context_length": 2048,
    "health_min_s": 0.01,
    "unary_disconnect_poll_s": 0.05,
}
VLLM_OPTIONS: dict[str, Any] = {
    "engine": "vllm",
    "model": "tiny",
    "page_size": 32,
    "num_blocks": 320,
    "context_length": 2048,
}

BOTH = ["unary", "stream", "logprob", "logprob_stream", "batch", "batch_scalar_room", "chat", "after_n2"]
ALONE = [
    *("no_bootstrap_p_prefill", "no_bootstrap_d_decode", "bad_text_prefill", "bad_text_decode", "prefill_toolong"),
    *("prefill_no_bootstrap", "prefill_fake", "prefill_fake_stream", "prefill_health", "decode_health"),
    "prefill_loads",
]
IN_SCENARIOS = [
    *("decode_first_decode", "n2_prefill", "n2_decode", "prefill_model_info", "decode_model_info"),
    *("abort_both_prefill", "abort_both_decode", "abort_decode_prefill", "abort_decode_decode"),
    *("prefill_only_abort_prefill", "prefill_only_abort_call", "decode_only_abort_decode", "decode_only_abort_call"),
    *("prefill_orphan_abort", "prefill_orphan_abort_abortcall", "prefill_orphan_abort_loads"),
    *("prefill_orphan_stream_abort", "prefill_orphan_stream_abort_abortcall", "prefill_orphan_stream_abort_loads"),
    *("decode_bad_host_decode", "prefill_dies_unary_prefill", "prefill_dies_unary_decode"),
    *("prefill_killed_before_decode", "prefill_killed_before_stream_decode"),
    *("prefill_killed_during_prefill", "prefill_killed_during_decode"),
]
# Answers that were never read: test_pd_sglang has what the other half and the queues then did.
CLOSED = [
    *("close_decode_stream_prefill", "close_decode_stream_decode"),
    *("close_decode_unary_prefill", "close_decode_unary_decode"),
    *("decode_alone_close_decode", "prefill_alone_close_prefill"),
]
# 556 keys; test_pd_sglang checks the ones that gateways read.
LONG = ["prefill_server_info"]


def pd(name: str) -> Capture:
    return load_capture(f"http_pd/{name}")


def for_pair(capture: Capture, prefill: SimulatedEngine, **changes: Any) -> bytes:
    """Return the captured request with the bootstrap port of ``prefill``."""
    port: Any = prefill.options.bootstrap_port
    if isinstance(json.loads(capture.body)["bootstrap_port"], list):
        port = [port] * len(json.loads(capture.body)["bootstrap_port"])
    return capture.with_json(bootstrap_port=port, **changes)


def without_names(raw: bytes) -> str:
    """Return the error message of an answer or of its first event, without ids and addresses."""
    answer = parse_answer(raw)
    assert answer is not None
    shown = answer.events()[0]["meta_info"]["finish_reason"] if answer.is_stream else answer.json()
    return re.sub(r"rid='[^']*'|127.0.0.1:\d+", "", shown["message"])


def assert_same_failure(capture: Capture, raw: bytes) -> None:
    assert_same_shape(capture, raw)
    assert without_names(raw) == without_names(capture.response)


@pytest.mark.parametrize("name", BOTH)
async def test_both_halves(start_engine: StartEngine, name: str) -> None:
    pair = await start_pair(start_engine, **OPTIONS)
    captures = [pd(f"{name}_prefill"), pd(f"{name}_decode")]
    async with asyncio.TaskGroup() as group:
        requests = [for_pair(capture, pair[0]) for capture in captures]
        tasks = [group.create_task(send(e.port, r)) for e, r in zip(pair, requests, strict=True)]
    for capture, task in zip(captures, tasks, strict=True):
        assert_same_shape(capture, task.result())
        expected, actual = parse_answer(capture.response), parse_answer(task.result())
        assert expected is not None
        assert actual is not None
        assert reasons(actual) == reasons(expected)
        assert input_logprobs(actual) == input_logprobs(expected)


def items(answer: Any) -> list[dict[str, Any]]:
    found = answer.events()[:-1] if answer.is_stream else answer.json()
    return found if isinstance(found, list) else [found]


def reasons(answer: Any) -> list[Any]:
    """Return how every item of the answer ended."""
    return [item["meta_info"]["finish_reason"] for item in items(answer) if "meta_info" in item]


def input_logprobs(answer: Any) -> list[Any]:
    """Return for how many prompt tokens every item has log-probabilities: all on prefill, none on decode."""
    metas = [item["meta_info"] for item in items(answer) if "meta_info" in item]
    return [bool(meta["input_token_logprobs"]) for meta in metas if "input_token_logprobs" in meta]


@pytest.mark.parametrize("name", ALONE)
async def test_one_half(start_engine: StartEngine, name: str) -> None:
    pair = await start_pair(start_engine, **OPTIONS)
    capture = pd(name)
    engine = pair[1] if "decode" in name or name.startswith("no_bootstrap_d") else pair[0]
    raw = await send(engine.port, capture.request)
    assert_same_shape(capture, raw)
    answer, expected = parse_answer(raw), parse_answer(capture.response)
    assert answer is not None
    assert expected is not None
    if answer.status == 400:
        message = re.compile(r"rid='\w*'")
        got, wanted = (found.json()["error"]["message"] for found in (answer, expected))
        assert message.sub("", got) == message.sub("", wanted)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_model_info(start_engine: StartEngine, role: str) -> None:
    pair = await start_pair(start_engine, **OPTIONS)
    engine = pair[0] if role == "prefill" else pair[1]
    captured = parse_answer(pd(f"{role}_model_info").response)
    assert captured is not None
    expected, actual = captured.json(), (await ask(engine.port, "/model_info", method="GET")).json()
    assert actual["disaggregation_mode"] == expected["disaggregation_mode"] == role
    assert actual["embedding"]["cache"] == expected["embedding"]["cache"]
    assert problems({**expected, "embedding": {}}, {**actual, "embedding": {}}) == []


async def test_decode_before_prefill(start_engine: StartEngine) -> None:
    pair = await start_pair(start_engine, **OPTIONS)
    capture = pd("decode_first_decode")
    async with asyncio.TaskGroup() as group:
        request = for_pair(capture, pair[0])
        decode = group.create_task(send(pair[1].port, request))
        await pair[1].wait_for(lambda e: e.transfers["rooms"] and e.transfers["rooms"][0]["is_joined"])
        await send(pair[0].port, request)
    assert_same_shape(capture, decode.result())


async def test_n2(start_engine: StartEngine) -> None:
    pair = await start_pair(start_engine, **OPTIONS)
    capture = pd("n2_prefill")
    request = for_pair(capture, pair[0])
    async with asyncio.TaskGroup() as group:
        decode = group.create_task(send(pair[1].port, request))
        assert_same_shape(capture, await send(pair[0].port, request))
        await pair[1].wait_for(lambda e: queues(e) == {"decode_prealloc": 0, "decode_transfer": 1})
        await pair[1].wait_for(lambda e: not e.running)
        assert pair[1].core.live_rids != []
        decode.cancel()  # hangs, as captured


@pytest.mark.parametrize("name", ["abort_decode", "abort_both"])
async def test_abort_while_decode_runs(start_engine: StartEngine, name: str) -> None:
    pair = await start_pair(start_engine, **OPTIONS, decode={"inter_token_ms": 2})
    captures = [pd(f"{name}_prefill"), pd(f"{name}_decode")]
    rid = json.loads(captures[0].body)["rid"]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send(e.port, for_pair(c, pair[0]))) for e, c in zip(pair, captures, strict=True)]
        await pair[1].wait_for(lambda e: e.core.schedulers[0].totals.generated_tokens > 5)
        for engine in pair if name == "abort_both" else pair[1:]:
            assert (await ask(engine.port, "/abort_request", {"rid": rid})).status == 200
    for capture, task in zip(captures, tasks, strict=True):
        assert_same_shape(capture, task.result())


@pytest.mark.parametrize(
    ("name", "half", "call"),
    [
        pytest.param("prefill_only_abort_prefill", 0, "prefill_only_abort_call", id="prefill"),
        pytest.param("decode_only_abort_decode", 1, "decode_only_abort_call", id="decode"),
        pytest.param("prefill_orphan_abort", 0, "prefill_orphan_abort_abortcall", id="prefill, older run"),
        pytest.param("prefill_orphan_stream_abort", 0, "prefill_orphan_stream_abort_abortcall", id="prefill stream"),
    ],
)
async def test_abort_of_a_half_that_waits(start_engine: StartEngine, name: str, half: int, call: str) -> None:
    pair = await start_pair(start_engine, **OPTIONS)
    capture, engine = pd(name), pair[half]
    async with asyncio.TaskGroup() as group:
        task = group.create_task(send(engine.port, for_pair(capture, pair[0])))
        stage = "bootstrap" if half == 0 else "transfer"
        await engine.wait_for(lambda e: e.live_rooms and e.transfers["rooms"][0]["requests"][0]["stage"] == stage)
        assert_same_shape(pd(call), await send(engine.port, pd(call).request))
    assert_same_failure(capture, task.result())
    if "orphan" in name:
        state = pd(f"{name}_loads")
        assert_same_shape(state, await send(engine.port, state.request))


async def test_nobody_at_the_bootstrap_port(start_engine: StartEngine) -> None:
    _, decode = await start_pair(start_engine, **OPTIONS, speedup=1000)
    capture = pd("decode_bad_host_decode")
    assert_same_failure(capture, await send(decode.port, capture.request))


@pytest.mark.parametrize("name", ["prefill_dies_unary", "prefill_killed_before"])
async def test_prefill_dies_before_the_transfer(start_engine: StartEngine, name: str) -> None:
    pair = await start_pair(start_engine, **OPTIONS, speedup=1000)
    pair[0].add_fault(at="transfer", do="hang")
    capture = pd(f"{name}_decode")
    async with asyncio.TaskGroup() as group:
        request = for_pair(capture, pair[0])
        tasks = [group.create_task(send(engine.port, request)) for engine in pair]
        await pair[0].wait_for(lambda e: queues(e)["prefill_inflight"] == 1)
        pair[0].die()
    assert tasks[0].result() == b"" == pd("prefill_dies_unary_prefill").response.strip()
    assert_same_failure(capture, tasks[1].result())


async def test_prefill_is_dead_already(start_engine: StartEngine) -> None:
    pair = await start_pair(start_engine, **OPTIONS, speedup=1000)
    pair[0].die()
    capture = pd("prefill_killed_before_stream_decode")
    assert_same_failure(capture, await send(pair[1].port, for_pair(capture, pair[0])))


async def test_prefill_dies_after_the_transfer(start_engine: StartEngine) -> None:
    pair = await start_pair(start_engine, **OPTIONS, decode={"inter_token_ms": 1})
    captures = [pd("prefill_killed_during_prefill"), pd("prefill_killed_during_decode")]
    async with asyncio.TaskGroup() as group:
        decode = group.create_task(send(pair[1].port, for_pair(captures[1], pair[0])))
        assert_same_shape(captures[0], await send(pair[0].port, for_pair(captures[0], pair[0])))
        pair[0].die()
    assert_same_shape(captures[1], decode.result())


def test_every_sglang_capture_is_accounted_for() -> None:
    names = {path.stem for path in (CAPTURES / "http_pd").glob("*.http")}
    replayed = [f"{name}_{half}" for name in BOTH for half in ("prefill", "decode")]
    listed = [*replayed, *ALONE, *IN_SCENARIOS, *CLOSED, *LONG]
    assert len(listed) == len(set(listed))
    assert set(listed) == names


# -- vLLM ------------------------------------------------------------------------------------------

VLLM_BOTH = ["completions-unary", "completions-decode-stream", "chat", "generate"]
VLLM_ALONE = ["monolithic-check", "monolithic-on-D-first"]
VLLM_STREAMS = ["prefill-stream-chat", "prefill-stream-completions", "prefill-stream-generate"]
DEADLY = ["fail-flat-block-ids", "fail-missing-block-ids", "fail-only-flag"]
VLLM_SCENARIOS = [
    *("decode-n2", "decode-reused-handoff-1", "decode-reused-handoff-2", "fail-d-side-404", "fail-d-side-validation"),
    *("fail-missing-remote-request-id", "fail-unknown-remote-request-id"),
    *("fail-prefill-node-dead", "fail-prefill-node-dead-stream"),
]
ELSEWHERE = ["abort-before-first-token-stream"]


def nixl(name: str) -> Capture:
    return load_vllm_capture(f"pd/{name}")


async def kept(prefill: SimulatedEngine, capture: Capture) -> dict[str, Any]:
    """Send the prefill half of a captured decode request and return its ``kv_transfer_params``."""
    fields = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}, "max_tokens": 1}
    body = {**json.loads(capture.body), **fields, "model": "tiny", "temperature": 0, "n": 1, "stream": False}
    body.pop("stream_options", None)
    answer = await ask(prefill.port, "/v1/completions", body)
    params: dict[str, Any] = answer.json()["kv_transfer_params"]
    return params


async def vllm_pair(start_engine: StartEngine, **options: Any) -> Pair:
    return await start_pair(start_engine, **{**VLLM_OPTIONS, **options})


@pytest.mark.parametrize("name", VLLM_BOTH)
async def test_vllm_prefill_then_decode(start_engine: StartEngine, name: str) -> None:
    prefill, decode = await vllm_pair(start_engine)
    captures = [nixl(f"{name}.prefill"), nixl(f"{name}.decode")]
    raw = await send_one(prefill.port, captures[0].request)
    assert_same_vllm_shape(captures[0], raw)
    answer, expected = parse_answer(raw), parse_answer(captures[0].response)
    assert answer is not None
    assert expected is not None
    params, captured = (found.json()["kv_transfer_params"] for found in (answer, expected))
    fixed = ("do_remote_prefill", "do_remote_decode", "transfer_mode", "tp_size", "dcp_size", "pp_size")
    assert {key: params[key] for key in fixed} == {key: captured[key] for key in fixed}
    assert params["remote_blocks_expiry_time"] is captured["remote_blocks_expiry_time"] is None
    assert params["remote_port"] == prefill.options.bootstrap_port
    if name != "chat":
        assert params["remote_num_tokens"] == captured["remote_num_tokens"]
        assert len(params["remote_block_ids"][0]) == len(captured["remote_block_ids"][0])
    without_end = re.compile(r"-[0-9a-f]{8}$")
    names = [without_end.sub("-", found["remote_request_id"]) for found in (params, captured)]
    assert names[0] == names[1]
    raw = await send_one(decode.port, captures[1].with_json(kv_transfer_params=params))
    assert_same_vllm_shape(captures[1], raw)
    await prefill.wait_for(lambda e: not e.pinned_blocks)


@pytest.mark.parametrize("name", VLLM_ALONE)
async def test_vllm_engine_with_a_role_alone(start_engine: StartEngine, name: str) -> None:
    prefill, decode = await vllm_pair(start_engine)
    engine = decode if "on-D" in name else prefill
    assert_same_vllm_shape(nixl(name), await send_one(engine.port, nixl(name).request))


@pytest.mark.parametrize("name", VLLM_STREAMS)
async def test_vllm_streamed_prefill_tells_nothing(start_engine: StartEngine, name: str) -> None:
    prefill, _ = await vllm_pair(start_engine)
    raw = await send_one(prefill.port, nixl(name).request)
    assert_same_vllm_shape(nixl(name), raw)
    assert b"remote_block_ids" not in raw
    assert prefill.pinned_blocks > 0


@pytest.mark.parametrize("name", ["decode-n2", "decode-reused-handoff-1"])
async def test_vllm_one_handoff_for_two(start_engine: StartEngine, name: str) -> None:
    prefill, decode = await vllm_pair(start_engine)
    params = await kept(prefill, nixl(name))
    names = ["decode-n2"] if name == "decode-n2" else ["decode-reused-handoff-1", "decode-reused-handoff-2"]
    for each in names:
        request = nixl(each).with_json(kv_transfer_params=params)
        assert_same_vllm_shape(nixl(each), await send_one(decode.port, request))
    await prefill.wait_for(lambda e: pins(e).late_notifications == 1)
    assert prefill.pinned_blocks == 0


async def test_vllm_made_up_id(start_engine: StartEngine) -> None:
    prefill, decode = await vllm_pair(start_engine)
    capture = nixl("fail-unknown-remote-request-id")
    params = {**json.loads(capture.body)["kv_transfer_params"], "remote_port": prefill.options.bootstrap_port}
    raw = await send_one(decode.port, capture.with_json(kv_transfer_params=params))
    assert_same_vllm_shape(capture, raw)
    await prefill.wait_for(lambda e: pins(e).late_notifications == 1)


@pytest.mark.parametrize("name", ["fail-d-side-404", "fail-d-side-validation"])
async def test_vllm_refusal_on_decode_frees_the_blocks(start_engine: StartEngine, name: str) -> None:
    prefill, decode = await vllm_pair(start_engine)
    params = await kept(prefill, nixl(name))
    assert prefill.pinned_blocks == 4
    raw = await send_one(decode.port, nixl(name).with_json(kv_transfer_params=params))
    assert_same_vllm_shape(nixl(name), raw)
    await prefill.wait_for(lambda e: not e.pinned_blocks)
    assert pins(prefill).expired_requests == 0


@pytest.mark.parametrize("name", DEADLY)
async def test_vllm_bad_params_kill_decode(start_engine: StartEngine, name: str) -> None:
    _, decode = await vllm_pair(start_engine, death_grace_s=0.01)
    assert_same_vllm_shape(nixl(name), await send_one(decode.port, nixl(name).request))
    await decode.wait_for(lambda e: e.is_dead)


async def test_vllm_missing_request_id_kills_decode_when_the_client_leaves(start_engine: StartEngine) -> None:
    _, decode = await vllm_pair(start_engine, death_grace_s=0.01)
    capture = nixl("fail-missing-remote-request-id")
    assert capture.response.strip() == b""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(send(decode.port, capture.request))
        await decode.wait_for(lambda e: e.waiting == 1)
        assert not decode.is_dead
        task.cancel()
    await decode.wait_for(lambda e: e.is_dead)


@pytest.mark.parametrize("name", ["fail-prefill-node-dead", "fail-prefill-node-dead-stream"])
async def test_vllm_prefill_is_dead(start_engine: StartEngine, name: str) -> None:
    prefill, decode = await vllm_pair(start_engine, speedup=1000, transfer_lease_s=1e6)
    params = await kept(prefill, nixl(name))
    prefill.restart()
    await prefill.stop()
    request = nixl(name).with_json(kv_transfer_params=params)
    assert_same_vllm_shape(nixl(name), await send_one(decode.port, request))


def test_every_vllm_capture_is_accounted_for() -> None:
    names = {path.stem for path in (VLLM_CAPTURES / "pd").glob("*.resp")}
    replayed = [f"{name}.{half}" for name in VLLM_BOTH for half in ("prefill", "decode")]
    listed = [*replayed, *VLLM_ALONE, *VLLM_STREAMS, *DEADLY, *VLLM_SCENARIOS, *ELSEWHERE]
    assert len(listed) == len(set(listed))
    assert set(listed) == names

"""Pairs of simulated vLLM engines: kept blocks and who frees them, fetches, deaths and faults."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from simulator.server import SimulatedEngine
from tests.simulator.conftest import StartEngine
from tests.simulator.pd_pairs import (
    Pair,
    assert_idle,
    begin,
    connector,
    metric,
    opened,
    parsed,
    pins,
    start_pair,
)
from tests.simulator.vllm_requests import CHAT, COMPLETIONS, GENERATE, USER, abort
from tests.simulator.wire import ask

PROMPT = list(range(300, 400))
KEEP = {"do_remote_decode": True, "do_remote_prefill": False}
LATE = "vllm:nixl_num_notifications_after_expiry_total"
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
BLOCKS = 4  # of 32 tokens, the last one not full


async def vllm_pair(start_engine: StartEngine, **options: Any) -> Pair:
    return await start_pair(start_engine, **{"engine": "vllm", "page_size": 32, "num_blocks": 64, **options})


def fields(path: str, params: dict[str, Any], tokens: int = 6, **more: Any) -> dict[str, Any]:
    """Return a body for any of the routes."""
    more["kv_transfer_params"] = params
    if path == GENERATE:
        return {"token_ids": PROMPT, "sampling_params": {"max_tokens": tokens}, **more}
    prompt = {"messages": USER} if path == CHAT else {"prompt": PROMPT}
    return {**prompt, "max_tokens": tokens, **more}


async def keep(prefill: SimulatedEngine, path: str = COMPLETIONS) -> dict[str, Any]:
    """Run the prefill half and return what decode has to be sent."""
    answer = await ask(prefill.port, path, fields(path, KEEP, 1))
    params: dict[str, Any] = answer.json()["kv_transfer_params"]
    return params


def text_of(answer: Any) -> Any:
    choice = answer.json()["choices"][0]
    return choice.get("text") or choice.get("token_ids") or choice["message"]["content"]


def heard(engine: SimulatedEngine) -> list[str]:
    """Return what happened to the engine's transfers, in order."""
    return [entry.event for entry in engine.log.transfers]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
async def test_decode_says_what_a_plain_engine_says(start_engine: StartEngine, path: str) -> None:
    prefill, decode = await vllm_pair(start_engine)
    plain = await start_engine(engine="vllm")
    params = await keep(prefill, path)
    usage = await metric(prefill, "vllm:kv_cache_usage_perc")
    blocks = len(params["remote_block_ids"][0])
    assert prefill.pinned_blocks == blocks == usage * 64
    answer = await ask(decode.port, path, fields(path, params))
    assert text_of(answer) == text_of(await ask(plain.port, path, fields(path, {})))
    assert answer.json()["kv_transfer_params"] is None
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    await prefill.wait_for(lambda e: not e.pinned_blocks)
    assert_idle(prefill, decode)
    assert heard(prefill) == ["pinned", "asked", "fetched"]
    assert heard(decode) == ["fetched"]
    tokens = answer.json()["usage"]["prompt_tokens"]
    assert await metric(decode, BY_SOURCE, source="external_kv_transfer") == tokens
    assert await metric(decode, BY_SOURCE, source="local_compute") == 0
    assert await metric(prefill, BY_SOURCE, source="local_compute") == tokens
    assert (await metric(prefill, EXPIRED), await metric(prefill, LATE)) == (0, 0)


async def test_params_mean_nothing_without_a_role(start_engine: StartEngine) -> None:
    engine = await start_engine(engine="vllm")
    answer = await ask(engine.port, COMPLETIONS, fields(COMPLETIONS, KEEP, 1))
    assert (answer.status, answer.json()["kv_transfer_params"]) == (200, None)
    assert (await ask(engine.port, COMPLETIONS, fields(COMPLETIONS, {"do_remote_prefill": True}))).status == 200


async def test_unfetched_blocks_are_freed_by_their_lease(start_engine: StartEngine) -> None:
    prefill, decode = await vllm_pair(start_engine, prefill={"transfer_lease_s": 0.05})
    params = await keep(prefill)
    state = (await ask(prefill.port, "/_transfers", method="GET")).json()
    if state["pinned"]:  # a slow machine is later than the lease
        assert state["pinned"][0]["request_id"] == params["remote_request_id"]
        assert state["pinned"][0]["block_ids"] == params["remote_block_ids"][0]
    await prefill.wait_for(lambda e: not e.pinned_blocks)
    assert await metric(prefill, EXPIRED) == 1
    late = await ask(decode.port, COMPLETIONS, fields(COMPLETIONS, params))
    assert late.status == 200  # whatever lay in those blocks
    await prefill.wait_for(lambda e: pins(e).late_notifications == 1)
    assert await metric(prefill, LATE) == 1
    assert heard(prefill) == ["pinned", "expired", "asked", "late"]


async def test_kept_blocks_are_room_that_is_missing(start_engine: StartEngine) -> None:
    prefill, decode = await vllm_pair(start_engine, prefill={"num_blocks": 6})
    params = await keep(prefill)
    async with asyncio.TaskGroup() as group:
        body = {"prompt": list(range(500, 600)), "max_tokens": 1}
        second = begin(group, prefill, COMPLETIONS, body)
        await prefill.wait_for(lambda e: e.waiting == 1)
        assert (await ask(decode.port, COMPLETIONS, fields(COMPLETIONS, params))).status == 200
    assert parsed(second.result()).status == 200
    assert_idle(prefill)


async def test_an_aborted_prefill_keeps_nothing(start_engine: StartEngine) -> None:
    prefill, _ = await vllm_pair(start_engine, prefill={"prefill_tokens_per_s": 100, "chunked_prefill_tokens": 1})
    async with asyncio.TaskGroup() as group:
        task = begin(group, prefill, COMPLETIONS, fields(COMPLETIONS, KEEP, 1, request_id="a"))
        await prefill.wait_for(lambda e: e.running == 1)
        await abort(prefill, "cmpl-a-0")
    answer = parsed(task.result())
    assert answer.json()["choices"][0]["finish_reason"] == "abort"
    assert answer.json()["kv_transfer_params"] is None
    assert_idle(prefill)


# -- decode's client leaves ------------------------------------------------------------------------


async def test_decode_closed_before_its_first_contact(start_engine: StartEngine) -> None:
    prefill, decode = await vllm_pair(start_engine, decode={"transfer_setup_ms": 60_000})
    params = await keep(prefill)
    _, writer = await opened(decode, COMPLETIONS, fields(COMPLETIONS, params, stream=True))
    await decode.wait_for(lambda e: e.waiting == 1)
    assert await metric(decode, "vllm:num_requests_waiting_by_reason", reason="deferred") == 1
    assert await metric(decode, "vllm:num_requests_waiting") == 1
    writer.close()
    await decode.wait_for(lambda e: not e.core.live_rids)
    assert decode.waiting == 0
    assert heard(decode) == []
    assert prefill.pinned_blocks == BLOCKS


async def test_a_close_right_after_the_request_is_before_the_contact(start_engine: StartEngine) -> None:
    prefill, decode = await vllm_pair(start_engine, decode={"transfer_setup_ms": 200})
    params = await keep(prefill)
    _, writer = await opened(decode, COMPLETIONS, fields(COMPLETIONS, params))
    writer.close()
    await decode.wait_for(lambda e: e.log.disconnects and not e.live_rooms)
    assert prefill.pinned_blocks == BLOCKS


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_a_transfer_goes_on_without_its_request(start_engine: StartEngine, how: str) -> None:
    prefill, decode = await vllm_pair(start_engine, decode={"transfer_setup_ms": 0})
    prefill.add_fault(at="transfer", do="delay:100")
    params = await keep(prefill)
    body = fields(COMPLETIONS, params, stream=True, request_id="d")
    async with asyncio.TaskGroup() as group:
        task = begin(group, decode, COMPLETIONS, body)
        await prefill.wait_for(lambda e: not e.fault_list)
        if how == "close":
            task.cancel()
        else:
            await abort(decode, "cmpl-d-0")
            assert parsed(await task).events() == ["[DONE]"]
    await decode.wait_for(lambda e: not e.core.live_rids)
    await prefill.wait_for(lambda e: not e.pinned_blocks)
    assert pins(prefill).expired_requests == 0
    await decode.wait_for(lambda e: not e.live_rooms)
    assert_idle(prefill, decode)


async def test_decode_closed_after_its_first_token(start_engine: StartEngine) -> None:
    prefill, decode = await vllm_pair(start_engine, decode={"inter_token_ms": 5})
    params = await keep(prefill)
    reader, writer = await opened(decode, COMPLETIONS, fields(COMPLETIONS, params, 400, stream=True))
    await reader.readuntil(b"\n\n")
    await prefill.wait_for(lambda e: not e.pinned_blocks)
    writer.close()
    await decode.wait_for(lambda e: not e.core.live_rids)
    assert_idle(prefill, decode)


# -- deaths ----------------------------------------------------------------------------------------


async def test_prefill_dies_during_the_transfer(start_engine: StartEngine) -> None:
    prefill, decode = await vllm_pair(start_engine, decode={"lost_prefill_s": 0.01})
    prefill.add_fault(at="transfer", do="hang")
    params = await keep(prefill)
    async with asyncio.TaskGroup() as group:
        task = begin(group, decode, COMPLETIONS, fields(COMPLETIONS, params))
        await prefill.wait_for(lambda e: not e.fault_list)
        assert decode.waiting == 1
        prefill.restart()
    answer = parsed(task.result())
    assert (answer.status, answer.json()["error"]["message"]) == (500, "Internal server error")
    assert_idle(prefill, decode)


async def test_blocks_do_not_outlive_the_engine(start_engine: StartEngine) -> None:
    prefill, decode = await vllm_pair(start_engine)
    params = await keep(prefill)
    prefill.restart()
    assert_idle(prefill)
    assert (await ask(decode.port, COMPLETIONS, fields(COMPLETIONS, params))).status == 200
    await prefill.wait_for(lambda e: pins(e).late_notifications == 1)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_deadly_params_kill_on_every_route(start_engine: StartEngine, path: str) -> None:
    _, decode = await vllm_pair(start_engine)
    body = {"messages": USER, "input": "hi", "max_tokens": 4, "kv_transfer_params": {"do_remote_prefill": True}}
    answer = await ask(decode.port, path, body)
    assert answer.status == 500
    await decode.wait_for(lambda e: e.is_dead)


async def test_deadly_params_can_be_survived(start_engine: StartEngine) -> None:
    _, decode = await vllm_pair(start_engine, die_on_bad_input=False)
    answer = await ask(decode.port, COMPLETIONS, fields(COMPLETIONS, {"do_remote_prefill": True}))
    assert answer.status == 400
    assert_idle(decode)
    assert not decode.is_dead


async def test_the_cache_is_not_reset_under_kept_blocks(start_engine: StartEngine) -> None:
    prefill, _ = await vllm_pair(start_engine, dev_mode=True)
    await keep(prefill)
    assert (await ask(prefill.port, "/reset_prefix_cache")).json() == {"success": False}
    await ask(prefill.port, "/_reset")
    assert_idle(prefill)
    assert (await ask(prefill.port, "/reset_prefix_cache")).json() == {"success": True}


# -- scripted faults -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("half", "do", "status", "is_freed"),
    [
        pytest.param(0, "hang", None, False, id="prefill hangs"),
        pytest.param(0, "delay:20", 200, True, id="prefill is late"),
        pytest.param(0, "fail", 500, False, id="prefill fails"),
        pytest.param(0, "drop", 500, False, id="prefill cuts"),
        pytest.param(1, "hang", None, False, id="decode hangs"),
        pytest.param(1, "delay:20", 200, True, id="decode is late"),
        pytest.param(1, "fail", 500, False, id="decode fails"),
        pytest.param(1, "drop", 200, False, id="decode does not tell"),
    ],
)
async def test_faults(start_engine: StartEngine, half: int, do: str, status: int | None, is_freed: bool) -> None:
    pair = await vllm_pair(start_engine, lost_prefill_s=0.01, transfer_setup_ms=0)
    params = await keep(pair[0])
    pair[half].add_fault(at="transfer", do=do)
    async with asyncio.TaskGroup() as group:
        task = begin(group, pair[1], COMPLETIONS, fields(COMPLETIONS, params))
        await pair[half].wait_for(lambda e: not e.fault_list)
        if status is None:
            await pair[1].wait_for(lambda e: e.live_rooms == [params["remote_request_id"]])
            assert not task.done()
            task.cancel()
        else:
            assert parsed(await task).status == status
    await pair[1].wait_for(lambda e: not e.core.live_rids)
    if is_freed:
        await pair[0].wait_for(lambda e: not e.pinned_blocks)
    assert pair[0].pinned_blocks == (0 if is_freed else BLOCKS)


async def test_transfers_take_time_by_their_tokens(start_engine: StartEngine) -> None:
    prefill, decode = await vllm_pair(start_engine, transfer_tokens_per_s=500)
    params = await keep(prefill)
    await ask(decode.port, COMPLETIONS, fields(COMPLETIONS, params))
    await prefill.wait_for(lambda e: not e.pinned_blocks)
    _, asked, fetched = prefill.log.transfers
    assert fetched.at_s - asked.at_s >= 0.2


async def test_ranks_name_themselves(start_engine: StartEngine) -> None:
    prefill, _ = await vllm_pair(start_engine, dp_size=2)
    ids = [(await keep(prefill))["remote_engine_id"] for _ in range(2)]
    assert [name[-4:] for name in ids] == ["_dp0", "_dp1"]
    assert ids[0][:-4] == ids[1][:-4]
    state = prefill.transfers
    assert [pin["dp_rank"] for pin in state["pinned"]] == [0, 1]
    assert state["pinned_blocks"] == 2 * BLOCKS


async def test_nothing_is_left_of_many_pairs(start_engine: StartEngine) -> None:
    dice = random.Random(7)
    prefill, decode = await vllm_pair(
        start_engine, num_blocks=2000, transfer_setup_ms=1, prefill={"transfer_lease_s": 0.3}
    )

    async def one(number: int) -> None:
        params = await keep(prefill)
        if dice.random() < 0.2:
            return
        fate = dice.choice(["done", "abort", "close"])
        body = fields(COMPLETIONS, params, 20, stream=dice.random() < 0.5, request_id=f"r{number}")
        async with asyncio.TaskGroup() as group:
            task = begin(group, decode, COMPLETIONS, body)
            if fate == "done":
                return
            await asyncio.sleep(dice.random() * 0.02)
            if fate == "abort":
                await abort(decode, f"cmpl-r{number}-0")
            else:
                task.cancel()

    async with asyncio.TaskGroup() as group:
        for number in range(60):
            group.create_task(one(number))
    await decode.wait_for(lambda e: not e.core.live_rids and not e.live_rooms, timeout_s=10)
    await prefill.wait_for(lambda e: not e.pinned_blocks, timeout_s=10)
    assert_idle(prefill, decode)
    assert connector(decode).pins is None
    events = heard(prefill)
    assert events.count("pinned") == 60 == events.count("fetched") + events.count("expired")

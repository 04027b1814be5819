"""Pairs of simulated SGLang engines: rooms, waiting, failing, ranks and faults."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from simulator.server import SimulatedEngine
from tests.simulator.conftest import StartEngine
from tests.simulator.pd_pairs import (
    TEXT,
    Pair,
    assert_idle,
    at,
    begin,
    both,
    loads,
    opened,
    parsed,
    queues,
    start_pair,
)
from tests.simulator.wire import ask

FAST_POLLS: dict[str, Any] = {"unary_disconnect_poll_s": 0.02}


def heard(engine: SimulatedEngine) -> list[str]:
    """Return what happened to the engine's transfers, in order."""
    return [entry.event for entry in engine.log.transfers]


async def waits(engine: SimulatedEngine, queue: str) -> None:
    await engine.wait_for(lambda e: queues(e)[queue] == 1)


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
async def test_decode_says_what_a_plain_engine_says(start_engine: StartEngine, stream: bool) -> None:
    pair, plain = await start_pair(start_engine), await start_engine()
    params = {"temperature": 0.7, "sampling_seed": 5, "stop": ["zzzz"]}
    answers = await both(pair, "/generate", at(pair[0], 7, tokens=20, params=params, stream=stream))
    alone = await ask(plain.port, "/generate", at(pair[0], 7, tokens=20, params=params, stream=stream))
    texts = [a.events()[-2]["text"] if stream else a.json()["text"] for a in (*answers, alone)]
    assert texts[1] == texts[2] != ""
    assert texts[1].startswith(texts[0])
    assert len(texts[0]) < len(texts[1])
    assert heard(pair[0]) == ["waiting", "computed", "sent"]
    assert heard(pair[1]) == ["waiting", "joined", "received"]
    await pair[0].wait_for(lambda e: not e.live_rooms)
    assert_idle(*pair)


async def test_prefill_computes_and_decode_does_not(start_engine: StartEngine) -> None:
    pair = await start_pair(start_engine, page_size=4)
    ids = list(range(10, 110))
    for room, cached in ((1, 0), (2, 96)):
        body = at(pair[0], room, text=None, input_ids=ids)
        for answer in await both(pair, "/generate", body):
            assert answer.json()["meta_info"]["cached_tokens"] == cached
    prefill, decode = (engine.core.schedulers[0] for engine in pair)
    assert prefill.totals.prefill_tokens == 100 + 4
    assert decode.totals.prefill_tokens == 2
    assert decode.totals.transferred_tokens == 200
    assert prefill.cache.stored_blocks == 25
    assert decode.cache.stored_blocks == 0  # decode engines run without a prefix cache


async def test_prefill_ends_with_one_token_whatever_it_is(start_engine: StartEngine) -> None:
    pair, plain = await start_pair(start_engine), await start_engine()
    first = (await ask(plain.port, "/generate", at(pair[0], 1, tokens=1))).json()["output_ids"][0]
    answers = await both(pair, "/generate", at(pair[0], 1, params={"stop_token_ids": [first]}))
    assert answers[0].json()["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert answers[0].json()["output_ids"] == [first]
    assert answers[1].json()["meta_info"]["finish_reason"] == {"type": "stop", "matched": first}


async def test_transfers_take_time_by_their_tokens(start_engine: StartEngine) -> None:
    pair = await start_pair(start_engine, transfer_tokens_per_s=1000)
    await both(pair, "/generate", at(pair[0], 3, text=None, input_ids=list(range(3, 203))))
    moments = {entry.event: entry.at_s for entry in pair[0].log.transfers}
    assert moments["sent"] - moments["waiting"] >= 0.2


async def test_a_room_that_nobody_joins_stays_open(start_engine: StartEngine) -> None:
    pair = await start_pair(start_engine, **FAST_POLLS)
    async with asyncio.TaskGroup() as group:
        task = begin(group, pair[0], "/generate", at(pair[0], 11, rid="alone"))
        await waits(pair[0], "prefill_bootstrap")
        state = (await ask(pair[0].port, "/_transfers", method="GET")).json()
        assert state["rooms"] == [
            {
                "room": 11,
                "dp_rank": 0,
                "is_joined": False,
                "requests": [{"rid": "alone", "stage": "bootstrap"}],
            }
        ]
        load = await loads(pair[0])
        assert load["num_waiting_reqs"] == 1
        assert load["disaggregation"]["mode"] == "prefill"
        assert load["disaggregation"]["prefill_bootstrap_queue_reqs"] == 1
        assert not task.done()
        task.cancel()
    await pair[0].wait_for(lambda e: not e.core.live_rids)
    assert_idle(*pair)


async def test_a_decode_that_waits_is_seen_and_closed(start_engine: StartEngine) -> None:
    pair = await start_pair(start_engine)
    _, writer = await opened(pair[1], "/generate", at(pair[0], 12, stream=True))
    await waits(pair[1], "decode_transfer")
    load = await loads(pair[1])
    assert load["num_waiting_reqs"] == load["disaggregation"]["decode_transfer_queue_reqs"] == 1
    assert pair[0].live_rooms == pair[1].live_rooms == [12]
    writer.close()
    await pair[1].wait_for(lambda e: not e.core.live_rids)
    await pair[0].wait_for(lambda e: not e.live_rooms)
    assert_idle(*pair)


async def test_prefill_does_not_notice_that_decode_left(start_engine: StartEngine) -> None:
    pair = await start_pair(start_engine, transfer_tokens_per_s=20)
    async with asyncio.TaskGroup() as group:
        prefill = begin(group, pair[0], "/generate", at(pair[0], 13, rid="p"))
        _, writer = await opened(pair[1], "/generate", at(pair[0], 13, stream=True))
        await waits(pair[0], "prefill_inflight")
        writer.close()
        await pair[1].wait_for(lambda e: not e.core.live_rids)
        await pair[0].wait_for(lambda e: not e.transfers["rooms"][0]["is_joined"])
        assert queues(pair[0])["prefill_inflight"] == 1
        await ask(pair[0].port, "/abort_request", {"rid": "p"})
    answer = parsed(prefill.result())
    assert answer.status == 500
    assert answer.json()["message"].startswith("Prefill transfer failed for request rank=0 req.rid='p'")
    assert_idle(*pair)


async def test_an_abort_of_prefill_fails_decode(start_engine: StartEngine) -> None:
    pair = await start_pair(start_engine, prefill={"prefill_tokens_per_s": 50, "chunked_prefill_tokens": 1})
    async with asyncio.TaskGroup() as group:
        body = at(pair[0], 14, rid="x")
        tasks = [begin(group, engine, "/generate", body) for engine in pair]
        await pair[0].wait_for(lambda e: e.running == 1)
        await ask(pair[0].port, "/abort_request", {"rid": "x"})
    assert parsed(tasks[0].result()).json()["meta_info"]["finish_reason"]["type"] == "abort"
    decode = parsed(tasks[1].result())
    assert decode.status == 500
    assert "it might be dead" in decode.json()["message"]
    await pair[0].wait_for(lambda e: not e.live_rooms)
    assert_idle(*pair)


@pytest.mark.parametrize("half", [0, 1], ids=["prefill", "decode"])
async def test_waiting_ends_after_a_while(start_engine: StartEngine, half: int) -> None:
    pair = await start_pair(start_engine, speedup=10_000)
    answer = await ask(pair[half].port, "/generate", at(pair[0], 15))
    assert answer.status == 500
    assert "timed out after 300.0s in KVPoll" in answer.json()["message"]
    await pair[0].wait_for(lambda e: not e.live_rooms)
    assert_idle(*pair)


async def test_a_restart_of_prefill_finds_its_port_again(start_engine: StartEngine) -> None:
    pair = await start_pair(start_engine, speedup=1000)
    port = pair[0].options.bootstrap_port
    async with asyncio.TaskGroup() as group:
        decode = begin(group, pair[1], "/generate", at(pair[0], 16))
        await waits(pair[1], "decode_transfer")
        pair[0].restart()
    assert "Lost connection with prefill instance" in parsed(decode.result()).json()["message"]
    assert pair[0].options.bootstrap_port == port
    assert (await both(pair, "/generate", at(pair[0], 17)))[1].status == 200


async def test_a_room_that_failed_stays_closed(start_engine: StartEngine) -> None:
    pair = await start_pair(start_engine)
    pair[0].add_fault(at="transfer", do="fail")
    for _ in range(2):
        answers = await both(pair, "/generate", at(pair[0], 19))
        assert [answer.status for answer in answers] == [500, 500]
    assert "failed before" in answers[0].json()["message"]
    assert_idle(*pair)


async def test_several_samples_that_are_aborted_before_their_warm_up(start_engine: StartEngine) -> None:
    pair = await start_pair(start_engine)
    async with asyncio.TaskGroup() as group:
        task = begin(group, pair[0], "/generate", at(pair[0], 23, params={"n": 2}))
        await waits(pair[0], "prefill_bootstrap")
        await ask(pair[0].port, "/abort_request", {"abort_all": True})
    answer = parsed(task.result())
    assert (answer.status, answer.json()["type"]) == (500, "500")
    assert_idle(*pair)


async def test_the_port_answers_http(start_engine: StartEngine) -> None:
    prefill, _ = await start_pair(start_engine, prefill={"dp_size": 2, "page_size": 8})
    port = prefill.options.bootstrap_port
    query = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
    route = await ask(port, f"/route?{query}", method="GET")
    assert (route.status, route.json()["dp_size"], route.json()["page_size"]) == (200, 2, 8)
    assert route.json()["follow_bootstrap_room"] is True
    assert (await ask(port, "/health", method="GET")).status == 200
    assert (await ask(port, "/other", method="GET")).status == 404


async def test_what_an_engine_says_of_its_role(start_engine: StartEngine) -> None:
    pair = await start_pair(start_engine)
    infos = [(await ask(engine.port, "/server_info", method="GET")).json() for engine in pair]
    assert [info["disaggregation_mode"] for info in infos] == ["prefill", "decode"]
    assert [info["disable_radix_cache"] for info in infos] == [False, True]
    assert infos[0]["disaggregation_bootstrap_port"] == pair[0].options.bootstrap_port > 0


async def test_health_while_a_room_waits(start_engine: StartEngine) -> None:
    pair = await start_pair(start_engine, health_min_s=0.01, health_timeout_s=0.5)
    _, writer = await opened(pair[0], "/generate", at(pair[0], 18, stream=True))
    await waits(pair[0], "prefill_bootstrap")
    for engine in pair:
        assert (await ask(engine.port, "/health_generate", method="GET")).status == 200
    writer.close()


# -- data-parallel ranks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("room", "fields", "rank"),
    [
        pytest.param(8, {}, 0, id="by the room"),
        pytest.param(9, {}, 1, id="by the room, odd"),
        pytest.param(9, {"routed_dp_rank": 1}, 1, id="by the room and the body"),
        pytest.param(9, {"routed_dp_rank": 0, "disagg_prefill_dp_rank": 0}, 0, id="by the body, both told"),
    ],
)
async def test_prefill_ranks(start_engine: StartEngine, room: int, fields: dict[str, Any], rank: int) -> None:
    pair = await start_pair(start_engine, prefill={"dp_size": 2})
    told = {key: value for key, value in fields.items() if key == "disagg_prefill_dp_rank"}
    async with asyncio.TaskGroup() as group:
        prefill = begin(group, pair[0], "/generate", at(pair[0], room, **fields))
        decode = begin(group, pair[1], "/generate", at(pair[0], room, **told))
    assert parsed(prefill.result()).json()["meta_info"]["dp_rank"] == rank
    assert parsed(decode.result()).status == 200


async def test_a_rank_that_does_not_go_with_the_room(start_engine: StartEngine) -> None:
    pair = await start_pair(start_engine, prefill={"dp_size": 2})
    answer = await ask(pair[0].port, "/generate", at(pair[0], 9, routed_dp_rank=0))
    assert answer.status == 500
    assert "follow_bootstrap_room conflict" in answer.json()["message"]
    assert_idle(pair[0])


async def test_decode_waits_on_the_wrong_rank(start_engine: StartEngine) -> None:
    pair = await start_pair(start_engine, prefill={"dp_size": 2}, **FAST_POLLS)
    async with asyncio.TaskGroup() as group:
        prefill = begin(group, pair[0], "/generate", at(pair[0], 9))
        decode = begin(group, pair[1], "/generate", at(pair[0], 9, disagg_prefill_dp_rank=0))
        await waits(pair[1], "decode_transfer")
        await pair[0].wait_for(lambda e: len(e.live_rooms) == 2)
        assert not prefill.done()
        assert not decode.done()
        prefill.cancel()
        decode.cancel()
    await pair[0].wait_for(lambda e: not e.core.live_rids and not e.live_rooms)


async def test_a_missing_room_kills_prefill_with_ranks(start_engine: StartEngine) -> None:
    pair = await start_pair(start_engine, prefill={"dp_size": 2})
    async with asyncio.TaskGroup() as group:
        task = begin(group, pair[0], "/generate", {"text": TEXT})
    assert task.result() == b""
    assert pair[0].is_dead


# -- scripted faults -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("half", "do", "prefill", "decode"),
    [
        pytest.param(0, "hang", None, None, id="prefill hangs"),
        pytest.param(0, "delay:20", 200, 200, id="prefill is late"),
        pytest.param(0, "fail", 500, 500, id="prefill fails"),
        pytest.param(0, "drop", 200, None, id="prefill sends nothing"),
        pytest.param(1, "hang", None, None, id="decode hangs"),
        pytest.param(1, "delay:20", 200, 200, id="decode is late"),
        pytest.param(1, "fail", None, 500, id="decode fails"),
        pytest.param(1, "drop", 200, None, id="decode hears nothing"),
    ],
)
async def test_faults(start_engine: StartEngine, half: int, do: str, prefill: int | None, decode: int | None) -> None:
    pair = await start_pair(start_engine)
    pair[half].add_fault(at="transfer", do=do, match={"rid": "r"})
    async with asyncio.TaskGroup() as group:
        tasks = [begin(group, engine, "/generate", at(pair[0], 20, rid="r")) for engine in pair]
        for engine, task, status in zip(pair, tasks, (prefill, decode), strict=True):
            if status is not None:
                assert parsed(await task).status == status
                continue
            await engine.wait_for(lambda e: e.live_rooms)
            assert not task.done()
        await pair[half].wait_for(lambda e: not e.fault_list)
        for engine in pair:
            await ask(engine.port, "/abort_request", {"abort_all": True})
    for task, status in zip(tasks, (prefill, decode), strict=True):
        assert parsed(task.result()).status == (status or 500)
    await pair[0].wait_for(lambda e: not e.live_rooms)
    assert_idle(*pair)
    assert (await both(pair, "/generate", at(pair[0], 21)))[1].status == 200


async def test_faults_strike_the_request_they_are_for(start_engine: StartEngine) -> None:
    pair = await start_pair(start_engine)
    pair[0].add_fault(at="transfer", do="fail", match={"rid": "other"})
    assert [a.status for a in await both(pair, "/generate", at(pair[0], 22, rid="mine"))] == [200, 200]
    assert len(pair[0].fault_list) == 1


# -- many at once ----------------------------------------------------------------------------------


async def test_nothing_is_left_of_many_pairs(start_engine: StartEngine) -> None:
    dice = random.Random(5)
    pair = await start_pair(start_engine, transfer_tokens_per_s=5000, decode={"inter_token_ms": 0.2}, **FAST_POLLS)

    async def one(room: int) -> None:
        body = at(pair[0], room, tokens=20, stream=dice.random() < 0.5, rid=f"r{room}-")
        fate = dice.choice(["done", "abort", "close"])
        async with asyncio.TaskGroup() as group:
            tasks = [begin(group, engine, "/generate", body) for engine in pair]
            if fate == "done":
                return
            await asyncio.sleep(dice.random() * 0.02)
            for engine, task in zip(pair, tasks, strict=True):
                if fate == "abort":
                    await ask(engine.port, "/abort_request", {"rid": f"r{room}-"})
                    if engine.log.aborts[-1].hit == () and not task.done():
                        task.cancel()  # one half had not arrived or was between its stages
                else:
                    task.cancel()
            async with asyncio.timeout(10):
                await asyncio.wait(tasks)

    async with asyncio.TaskGroup() as group:
        for room in range(60):
            group.create_task(one(room))
    for engine in pair:
        await engine.wait_for(lambda e: not e.core.live_rids and not e.live_rooms, timeout_s=10)
    assert_idle(*pair)
    log = (await ask(pair[0].port, "/_log", method="GET")).json()
    assert {entry["event"] for entry in log["transfers"]} <= {"waiting", "computed", "sent", "failed"}
    assert json.dumps(log)


async def test_a_batch_has_a_room_for_each_prompt(start_engine: StartEngine) -> None:
    pair: Pair = await start_pair(start_engine)
    body = at(pair[0], 30, text=["a", "b", "c"], bootstrap_room=[30, 41, 52])
    answers = await both(pair, "/generate", body)
    assert [len(answer.json()) for answer in answers] == [3, 3]
    assert {entry.room for entry in pair[0].log.transfers} == {30, 41, 52}
    short = await ask(pair[0].port, "/generate", {**body, "bootstrap_room": [30, 41]})
    assert short.status == 400

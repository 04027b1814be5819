"""KV events of simulated engines, followed by a running gateway over real sockets."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.api.workers import describe_member
from kv_events.hashing import block_hashes
from kv_events.types import BASE
from simulator.cache_dump import dump_caches
from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import RunningGateway, running_gateway, until
from tests.fakes.wire import call

BLOCK = 16
PROMPT = list(range(1, 65))
EVENTS = {"kv_events": "tcp://127.0.0.1:0", "replay": "tcp://127.0.0.1:0", "page_size": BLOCK}


@asynccontextmanager
async def followed(**options: Any) -> AsyncIterator[tuple[SimulatedEngine, RunningGateway]]:
    """An engine that publishes events, and a gateway that follows them."""
    engine = SimulatedEngine(EngineOptions(**{**EVENTS, **options}))
    await engine.start()
    try:
        async with running_gateway(engine.url, health_interval_s=0.1) as gateway:
            yield engine, gateway
            await gateway.settle()
    finally:
        await engine.stop()


async def generate(gateway: RunningGateway, ids: list[int], **more: Any) -> dict[str, Any]:
    """One short generation."""
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}, **more}
    answer = await call(gateway.address, "/generate", body)
    assert answer.status == 200
    found: dict[str, Any] = answer.json()
    return found


def held(gateway: RunningGateway, engine: SimulatedEngine, ids: list[int], dp_rank: int = 0) -> int:
    """Leading blocks of a prompt that the gateway knows on a rank."""
    hashes = block_hashes(ids, BLOCK, BASE)
    overlap = gateway.gateway.kv.index.overlap(hashes)
    return overlap.device.get((engine.url.removeprefix("http://"), dp_rank), 0)


def worker_of(gateway: RunningGateway) -> dict[str, Any]:
    """The only worker's line of ``GET /workers``, without a request."""
    (member,) = gateway.gateway.services.fleet
    found: dict[str, Any] = json.loads(json.dumps(describe_member(gateway.gateway.services, member)))
    return found


async def test_what_an_engine_caches_is_known() -> None:
    async with followed() as (engine, gateway):
        await until(lambda: worker_of(gateway)["kv"]["state"] == "live", "the source is live")
        await generate(gateway, PROMPT)
        await until(lambda: held(gateway, engine, PROMPT) == len(PROMPT) // BLOCK, "the prompt's blocks")
        kv = worker_of(gateway)["kv"]
        assert kv["blocks"] >= 4
        assert kv["last_seq"] >= 1
        text = (await gateway.client.get("/metrics")).text
        worker = engine.url.removeprefix("http://")
        assert f'forebay_kv_source_state{{dp_rank="0",state="live",worker="{worker}"}} 1.0' in text
        assert f'forebay_kv_events_total{{kind="stored",worker="{worker}"}}' in text


async def test_a_flush_on_the_engine_empties_the_view() -> None:
    async with followed() as (engine, gateway):
        await generate(gateway, PROMPT)
        await until(lambda: held(gateway, engine, PROMPT) == 4, "the prompt's blocks")
        assert (await call(("127.0.0.1", engine.port), "/flush_cache", {})).status == 200
        await until(lambda: held(gateway, engine, PROMPT) == 0, "the view is empty")


def cached(engine: SimulatedEngine, ids: list[int]) -> int:
    """Leading blocks of a prompt that the engine really holds."""
    blocks = dump_caches(engine.core)["ranks"][0]["blocks"]
    names = {(block["parent_hash"], tuple(block["tokens"])): block["hash"] for block in blocks}
    parent = None
    for at in range(0, len(ids), BLOCK):
        if (found := names.get((parent, tuple(ids[at : at + BLOCK])))) is None:
            return at // BLOCK
        parent = found
    return len(ids) // BLOCK


@pytest.mark.parametrize("fault", ["drop", "duplicate", "reorder", "lose", "garbage", "unknown_tag", "renumber"])
async def test_a8_4_whatever_happens_to_events_no_false_hit_stays(fault: str) -> None:
    prompts = [PROMPT, *(list(range(start, start + 64)) for start in range(100, 1600, 100))]
    async with followed(num_blocks=24) as (engine, gateway):
        for number, prompt in enumerate(prompts):
            if number == 3:
                engine.add_fault(at="kv", do=fault, times=2)
            await generate(gateway, prompt)
        await until(lambda: all(held(gateway, engine, p) <= cached(engine, p) for p in prompts), "no false hit")
        await until(lambda: held(gateway, engine, prompts[-1]) == 4, "and later blocks are known")


async def test_a_restarted_engine_is_followed_without_a_false_hit() -> None:
    async with followed() as (engine, gateway):
        await generate(gateway, PROMPT)
        await until(lambda: held(gateway, engine, PROMPT) == 4, "the prompt's blocks")
        engine.add_fault(at="headers", do="restart", times=1)
        await call(gateway.address, "/generate", {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}})
        await until(lambda: held(gateway, engine, PROMPT) == 0, "its blocks are forgotten")
        await gateway.ready(1)
        await generate(gateway, PROMPT)
        await until(lambda: held(gateway, engine, PROMPT) == 4, "it is followed again")


async def test_each_rank_has_its_own_source() -> None:
    async with followed(dp_size=2) as (engine, gateway):
        await generate(gateway, PROMPT, routed_dp_rank=None)
        await call(
            gateway.address,
            "/generate",
            {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}},
            headers={"x-data-parallel-rank": "1"},
        )
        await until(lambda: held(gateway, engine, PROMPT, 1) == 4, "rank 1 has it")
        ranks = worker_of(gateway)["ranks"]
        assert [rank["kv"]["state"] for rank in ranks] == ["live", "live"]


async def test_events_can_be_switched_off_for_a_worker() -> None:
    engine = SimulatedEngine(EngineOptions(kv_events="tcp://127.0.0.1:0"))
    await engine.start()
    try:
        async with running_gateway(f"{engine.url},kv_events=off") as gateway:
            assert worker_of(gateway)["kv"]["state"] == "off"
            assert not gateway.gateway.kv.follows_any
    finally:
        await engine.stop()


async def test_a_source_that_cannot_be_the_workers_is_shown_and_not_used() -> None:
    async with followed() as (engine, gateway):
        # What is published before the subscription has arrived is read as it was meant, from the replay.
        engine.add_fault(at="kv", do="wrong_block_size", times=1000)
        for start in range(100, 900, 10):
            await generate(gateway, list(range(start, start + 64)))
            if worker_of(gateway)["kv"]["state"] == "misconfigured":
                break
        await until(lambda: worker_of(gateway)["kv"]["state"] == "misconfigured", "it is noticed")
        assert held(gateway, engine, PROMPT) == 0
        assert (await generate(gateway, PROMPT))["meta_info"]
        assert "blocks of" in worker_of(gateway)["kv"]["problem"]
        assert (await call(("127.0.0.1", engine.port), "/_reset", {})).status == 200
        engine.add_fault(at="headers", do="restart", times=1)
        await call(gateway.address, "/generate", {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}})
        await gateway.ready(1)
        await until(lambda: worker_of(gateway)["kv"]["state"] == "live", "the new process is judged by itself")
        assert worker_of(gateway)["kv"]["problem"] == ""
        await generate(gateway, PROMPT)
        await until(lambda: held(gateway, engine, PROMPT) == 4, "and its events are used")

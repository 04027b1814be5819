"""KV-aware routing in front of simulated engines of both kinds, each with a cache and events of its own."""

import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from gateway.prefixes import MIN_TEXT_BYTES
from kv_events.hashing import pack_tokens
from kv_events.index import PrefixIndex
from kv_events.index_intake import RankIntake
from kv_events.index_types import ApplyReport
from kv_events.types import BlockStored
from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.kv_fleet import ANY_PORT, BLOCK, PROMPT, TEXT, Fleet, fleet
from tests.fakes.running import TIME_SCALE, running_gateway, until
from tests.fakes.script_engine import METADATA, Reply, ScriptEngine, SeenRequest, script_engine
from tests.fakes.wire import Answer, call, request_bytes, wire

BLOCKS = len(PROMPT) // BLOCK


def placed(answer: Answer) -> tuple[str, int]:
    return answer.headers["x-forebay-worker"], int(answer.headers["x-forebay-overlap-blocks"])


async def complete(f: Fleet, prompt: object, **more: Any) -> Answer:
    """One completion, on engines of either kind."""
    body = {"model": "model", "prompt": prompt, "max_tokens": 1, **more}
    answer = await call(f.gateway.address, "/v1/completions", body)
    assert answer.status == 200, answer.body
    return answer


# vLLM.


async def test_vllm_s_events_are_followed_for_prompts_in_ids_and_in_text() -> None:
    async with fleet(3, engine="vllm") as f:
        first = await complete(f, PROMPT)
        assert placed(first)[1] == 0
        await f.settled()
        for tail in range(3):
            again = await complete(f, [*PROMPT, 300 + tail])
            assert placed(again) == (placed(first)[0], BLOCKS)
            await f.settled()
        text = await complete(f, TEXT)
        await f.settled()
        again = await complete(f, TEXT)
        assert placed(again)[0] == placed(text)[0]
        assert placed(again)[1] >= len(TEXT) // BLOCK - 1


async def test_a8_9_vllm_s_adapters_and_salts_are_not_mixed_up() -> None:
    async with fleet(3, engine="vllm", lora_names="ad,other") as f:
        seen: dict[str, tuple[str, int]] = {}
        ways: dict[str, dict[str, Any]] = {
            "plain": {}, "adapter": {"model": "ad"}, "salted": {"cache_salt": "tenant-a"},
            "salted adapter": {"model": "ad", "cache_salt": "tenant-a"},
        }  # fmt: skip
        for name, more in ways.items():
            seen[name] = placed(await complete(f, PROMPT, **more))
            assert seen[name][1] == 0, name
            await f.settled()
        for name, more in ways.items():
            assert placed(await complete(f, PROMPT, **more)) == (seen[name][0], BLOCKS), name
        strangers: list[dict[str, Any]] = [{"model": "other"}, {"cache_salt": "tenant-b"}]
        for more in strangers:
            assert placed(await complete(f, PROMPT, **more))[1] == 0


async def test_vllm_ranks_have_caches_of_their_own() -> None:
    async with fleet(1, engine="vllm", dp_size=2) as f:
        first = await complete(f, PROMPT)
        await f.settled()
        for _ in range(3):
            again = await complete(f, [*PROMPT, 5])
            assert again.headers["x-forebay-dp-rank"] == first.headers["x-forebay-dp-rank"]
            assert placed(again)[1] == BLOCKS


# What clears the view.


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_field_case_49_and_76_a_restarted_engine_has_an_empty_cache(kind: str) -> None:
    async with fleet(2, engine=kind, gateway={"health_interval_s": 0.05}) as f:
        first = await complete(f, PROMPT)
        worker = placed(first)[0]
        await f.settled()
        kv = f.gateway.gateway.kv
        assert kv.blocks(worker, 0) >= BLOCKS
        f.engine_of(first).restart()
        await until(lambda: kv.blocks(worker, 0) == 0, "its blocks are forgotten")
        await f.gateway.ready(2)
        await f.settled()
        text = (await f.gateway.client.get("/metrics")).text
        assert f'worker="{worker}"' in "".join(line for line in text.splitlines() if "forebay_kv_resets_total" in line)
        other = [500 + token for token in PROMPT]
        again = await complete(f, other)
        await f.settled()
        assert placed(await complete(f, other)) == (placed(again)[0], BLOCKS)


@pytest.mark.parametrize("path", ["update_weights_from_disk", "flush_cache"])
async def test_new_weights_make_the_cache_worthless(path: str) -> None:
    async with fleet(1) as f:
        worker = placed(await f.generate(PROMPT))[0]
        await f.settled()
        kv = f.gateway.gateway.kv
        assert kv.blocks(worker, 0) >= BLOCKS
        body = {"model_path": "model", "flush_cache": True} if path.startswith("update") else {}
        answer = await call(f.gateway.address, f"/workers/{worker}/call/{path}", body)
        assert answer.status == 200, answer.body
        assert kv.blocks(worker, 0) == 0
        assert placed(await f.generate(PROMPT))[1] == 0


# Field cases.


ROUTES: dict[str, dict[str, Any]] = {
    "/generate ids": {"input_ids": PROMPT},
    "/generate text": {"text": TEXT},
    "/v1/completions ids": {"prompt": PROMPT},
    "/v1/completions text": {"prompt": TEXT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}]},
    "/v1/responses": {"input": TEXT},
    "/v1/messages": {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1},
}


@pytest.mark.parametrize("name", ROUTES)
async def test_field_case_58_every_route_finds_its_prefix(name: str) -> None:
    assert len(TEXT) > MIN_TEXT_BYTES
    path = name.partition(" ")[0]
    body = {"model": "model", **ROUTES[name]}
    async with (
        script_engine() as one,
        script_engine() as two,
        running_gateway(one.url, two.url, seed=1, policy="prefix-approximate") as gateway,
    ):
        first = await call(gateway.address, path, body)
        again = await call(gateway.address, path, body)
        assert first.status == again.status == 200
        assert placed(again)[0] == placed(first)[0]
        assert (placed(first)[1], placed(again)[1] > 0) == (0, True)


async def test_field_case_64_a_protected_engine_s_events_are_found_with_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ENGINE_KEY", "secret")
    engine = SimulatedEngine(EngineOptions(api_key="secret", kv_events=ANY_PORT, replay=ANY_PORT))
    await engine.start()
    name = engine.url.removeprefix("http://")
    try:
        async with running_gateway(f"{engine.url},api_key_env=ENGINE_KEY") as gateway:
            await until(lambda: gateway.gateway.kv.state(name, 0) == "live", "its events are followed")
        async with running_gateway(engine.url, wait_ready=0) as gateway:
            (member,) = gateway.gateway.services.fleet
            await until(lambda: "401" in member.detail, "the refusal is shown")
            assert gateway.gateway.kv.state(name, 0) == "off"
    finally:
        await engine.stop()


async def test_field_case_83_ranks_are_chosen_among_those_that_each_worker_has() -> None:
    async with script_engine() as small, script_engine() as large:
        large.metadata["/server_info"] = {**METADATA["/server_info"], "dp_size": 8}
        async with running_gateway(small.url, large.url, seed=1) as gateway:
            body = {"input_ids": PROMPT}
            for _ in range(40):
                assert (await call(gateway.address, "/generate", body)).status == 200
            answer = await call(gateway.address, "/generate", body, headers={"x-data-parallel-rank": "9"})
            assert answer.status == 400
            assert "valid ranks are 0 to 7" in answer.json()["error"]["message"]
        ranks = {json.loads(seen.body).get("routed_dp_rank") for seen in large.requests}
        assert ranks <= set(range(8))
        assert len(ranks) > 1
        assert {json.loads(seen.body).get("routed_dp_rank") for seen in small.requests} <= {None}


async def test_forebay_explain_asks_a_running_gateway(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps({"input_ids": PROMPT}))
    async with fleet(2) as f:
        worker = placed(await f.generate(PROMPT))[0]
        await f.settled()
        assert await asyncio.to_thread(main, ["explain", "--url", f.gateway.url, str(path)]) == 0
        head, *lines = capsys.readouterr().out.splitlines()
        assert head.split()[:3] == ["WORKER", "RANK", "OVERLAP"]
        (chosen,) = [line.split() for line in lines if line.startswith("*")]
        assert chosen[1:4] == [worker, "0", f"{BLOCKS}/{BLOCKS}"]
        assert lines[-1].startswith(f"to {worker} rank 0: the lowest cost")


class Held:
    """Scripted engines that keep every request until they are let go."""

    def __init__(self, engines: list[ScriptEngine]) -> None:
        self.engines = engines
        self.released = asyncio.Event()
        for engine in engines:
            engine.script = self.script

    async def script(self, request: SeenRequest, reply: Reply) -> None:
        await self.released.wait()
        await reply.whole(b"{}")

    def counts(self) -> list[int]:
        return [len(engine.requests) for engine in self.engines]


@pytest.mark.parametrize("name", ["/generate ids", "/v1/chat/completions", "/v1/messages", "/v1/embeddings"])
async def test_field_case_68_and_70_a_burst_of_one_prefix_is_spread(name: str) -> None:
    path = name.partition(" ")[0]
    body = {"model": "model", **ROUTES.get(name, {"input": TEXT})}
    async with script_engine() as a, script_engine() as b, script_engine() as c, script_engine() as d:
        held = Held([a, b, c, d])
        async with running_gateway(*(engine.url for engine in held.engines), seed=1) as gateway:
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(call(gateway.address, path, body)) for _ in range(80)]
                await until(lambda: sum(held.counts()) == 80, "all are on engines")
                held.released.set()
            assert max(held.counts()) - min(held.counts()) <= 2
            assert {one.result().status for one in calls} == {200}


async def test_field_case_71_new_prompts_go_to_the_idle_engine_with_the_full_cache() -> None:
    async with fleet(2, inter_token_ms=50) as f:
        name = [engine.url.removeprefix("http://") for engine in f.engines]
        for number in range(10):  # a big cache on the second one
            headers = {"x-forebay-worker": name[1]}
            ids = [1000 + 200 * number + token for token in PROMPT]
            body = {"input_ids": [token % 1000 for token in ids], "sampling_params": {"max_new_tokens": 1}}
            assert (await call(f.gateway.address, "/generate", body, headers=headers)).status == 200
        await f.settled()
        async with asyncio.TaskGroup() as group:
            busy = {"sampling_params": {"max_new_tokens": 5000}, "stream": True}
            connections = []
            for number in range(6):
                connection = await group.create_task(_open(f, {**busy, "input_ids": [number, *PROMPT]}, name[0]))
                connections.append(connection)
            await f.engines[0].wait_for(lambda engine: engine.running == 6)
            for number in range(4):
                ids = [(7 * number + 3 * token) % 1000 for token in range(160)]
                answer = await f.generate(ids)
                assert answer.headers["x-forebay-worker"] == name[1]
            for connection in connections:
                await connection.__aexit__(None, None, None)


async def _open(f: Fleet, body: dict[str, Any], worker: str) -> Any:
    connection = wire(f.gateway.address)
    opened = await connection.__aenter__()
    await opened.send(request_bytes("/generate", body, headers={"x-forebay-worker": worker}))
    return connection


async def test_field_case_73_whatever_ends_requests_none_stays_counted() -> None:
    async with script_engine() as one, script_engine() as two:
        for engine in (one, two):
            engine.script = _mixed_endings
        async with running_gateway(one.url, two.url, seed=1, max_attempts=1) as gateway:
            async with asyncio.TaskGroup() as group:
                for number in range(60):
                    group.create_task(_some_call(gateway.address, number))
            await gateway.settle()
            assert [member.in_flight for member in gateway.gateway.services.fleet] == [0, 0]
            await gateway.ready(2)
            for engine in (one, two):
                engine.requests.clear()
            held = Held([one, two])
            async with asyncio.TaskGroup() as group:
                for _ in range(20):
                    group.create_task(call(gateway.address, "/generate", {"input_ids": PROMPT}))
                await until(lambda: sum(held.counts()) == 20, "all are on engines")
                held.released.set()
            assert max(held.counts()) - min(held.counts()) <= 2


async def _mixed_endings(request: SeenRequest, reply: Reply) -> None:
    match len(request.body) % 3:
        case 0:
            await reply.whole(b'{"error":"x"}', status=500)
        case 1:
            reply.reset()
        case _:
            await reply.whole(b"{}")


async def _some_call(address: tuple[str, int], number: int) -> None:
    body = {"input_ids": [*PROMPT, *([1] * number)]}
    if number % 4 == 3:  # leaves
        async with wire(address) as connection:
            await connection.send(request_bytes("/generate", body))
        return
    answer = await call(address, "/generate", body)
    assert answer.status in (200, 502, 503)


# The loop stays free.


@pytest.fixture
def burst() -> list[BlockStored]:
    """A hundred thousand blocks in chains of 100."""
    events = []
    for chain in range(1000):
        names = tuple(range(chain * 100 + 1, chain * 100 + 101))
        events.append(BlockStored(names, None, pack_tokens([chain, *range(100 * BLOCK - 1)]), BLOCK))
    return events


def test_a8_6_lookups_go_on_through_a_burst_of_events(burst: list[BlockStored]) -> None:
    """No piece of work between two lookups is long, whatever the machine does meanwhile: nine in ten are short."""
    index = PrefixIndex()
    rank = ("a", 0)
    index.add_rank(rank)
    intake, report = RankIntake(index, rank), ApplyReport()
    wanted = list(range(512))
    pieces: list[float] = []
    lookups: list[float] = []
    for event in burst:
        steps = intake.apply(event, 0.0, report)
        while True:
            started = time.perf_counter()
            is_done = next(steps, True)
            pieces.append(time.perf_counter() - started)
            if is_done:
                break
        if len(lookups) * 5 < len(pieces):
            started = time.perf_counter()
            index.overlap(wanted)
            lookups.append(time.perf_counter() - started)
    assert index.rank_blocks(rank) == 100_000
    assert len(lookups) >= 200
    assert statistics.quantiles(pieces, n=10)[-1] < 0.02 * TIME_SCALE
    assert statistics.quantiles(lookups, n=10)[-1] < 0.02 * TIME_SCALE


def test_field_case_67_distinct_prompts_leave_no_more_than_the_engine_holds() -> None:
    """An engine that forgets to announce removals, or loses them: the index has a bound of its own."""
    index = PrefixIndex()
    rank = ("a", 0)
    index.add_rank(rank, capacity_blocks=1000)
    report = ApplyReport()
    for name in range(20_000):
        index.store(rank, BlockStored((name,), None, pack_tokens([name] * BLOCK), BLOCK), report)
    assert index.distinct_blocks() == 1250
    assert report.is_over_capacity

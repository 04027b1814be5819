"""Many requests over pairs at one time, of which many are left by their clients or failed by a leg."""

import asyncio
import random
import re
from collections import Counter
from typing import Any

import pytest

from gateway.outcome import Outcome
from tests.fakes.pair_fleet import IDS, PairFleet, pair_fleet
from tests.fakes.running import PATIENCE_S, TIME_SCALE
from tests.fakes.wire import request_bytes, wire
from tests.simulator.pd_pairs import pins

REQUESTS = 120
AT_ONCE = 40


async def one(f: PairFleet, rng: random.Random, path: str, number: int) -> str:
    """One request; how its client saw it end."""
    is_stream, leaves = rng.random() < 0.5, rng.random() < 0.3
    ids = [number % 20 * 40 + token for token in IDS]
    if path == "/generate":
        body: dict[str, Any] = {"input_ids": ids, "sampling_params": {"max_new_tokens": 6}, "stream": is_stream}
    else:
        body = {"model": f.alone.options.model, "prompt": ids, "max_tokens": 6, "stream": is_stream}
    async with wire(f.gateway.address) as client:
        await client.send(request_bytes(path, body, headers={"x-request-id": f"r{number}"}))
        if leaves:
            await asyncio.sleep(rng.random() * 0.08 * TIME_SCALE)
            return "left"
        async with asyncio.timeout(3 * PATIENCE_S):
            answer = await client.answer()
    assert answer.is_whole, answer
    if answer.status != 200 or b'"error"' in answer.body:
        return "failed"
    return "served"


@pytest.mark.parametrize(("engine", "path"), [("sglang", "/generate"), ("vllm", "/v1/completions")])
async def test_a0_15_nothing_is_left_of_a_crowd(engine: str, path: str) -> None:
    """Mutation: rooms are given back only where both legs end well; then some stay."""
    rng = random.Random(7)
    async with pair_fleet(
        2,
        2,
        engine=engine,
        prefill={"prefill_tokens_per_s": 20_000, "transfer_lease_s": 3 * TIME_SCALE},
        decode={"inter_token_ms": 4},
    ) as f:
        for number, each in enumerate(f.engines):
            each.add_fault(at="headers", do="status:503", times=3)
            each.add_fault(at="headers", do=("reset", "status:500")[number % 2], times=3)
        slots = asyncio.Semaphore(AT_ONCE)

        async def in_turn(number: int) -> str:
            async with slots:
                return await one(f, rng, path, number)

        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(in_turn(number)) for number in range(REQUESTS)]
        seen = Counter(client.result() for client in clients)
        await f.gateway.record(REQUESTS)
        await f.settle()
        told = Counter(record.outcome for record in f.gateway.records)
        assert len(f.gateway.records) == REQUESTS
        assert seen["served"] >= REQUESTS // 3
        # A client that leaves may do so just when it has its whole answer.
        assert told[Outcome.COMPLETE] >= seen["served"]
        assert told[Outcome.CLIENT_CLOSED] <= seen["left"]
        assert told[Outcome.COMPLETE] + told[Outcome.CLIENT_CLOSED] + seen["failed"] >= REQUESTS
        if engine == "vllm":
            expired = sum(pins(each).expired_requests for each in f.prefills)
            lost = re.search(rb"\nforebay_handoff_abandoned_total (\d+)", f.gateway.gateway.services.metrics.render())
            assert lost is not None
            # Whether a prefill that is closed with its client had just got its prompt ready, nobody can tell.
            assert int(lost[1]) <= expired <= int(lost[1]) + seen["left"]
        state = f.gateway.state()
        assert (state["live_rooms"], state["prefill_background_tasks"], state["booked_blocks"]) == (0, 0, 0)

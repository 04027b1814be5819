"""The rollout loop of docs/rl.md runs as it stands there, and groups of samples land together."""

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.kv_fleet import BLOCK, Fleet, fleet
from tests.fakes.running import PATIENCE_S, running_gateway
from tests.fakes.wire import Answer, call

GUIDE = (Path(__file__).parents[2] / "docs/rl.md").read_text("utf-8")
# Each of them as a process of its own takes a second to start.
MAX_LINES = 45


def rollout_loop() -> str:
    """The loop's text."""
    code = GUIDE.partition("## A rollout loop\n")[2].partition("```python\n")[2].partition("```\n")[0]
    assert code
    return code


def test_the_loop_is_short() -> None:
    assert sum(1 for line in rollout_loop().splitlines() if line.strip()) <= MAX_LINES


async def test_the_loop_of_the_guide_runs() -> None:
    # Not all of a step's samples at once: when the first are enough to learn from, others are in the middle.
    options = EngineOptions(inter_token_ms=5.0, max_running=6, weight_version="0")
    engines = [SimulatedEngine(options) for _ in range(2)]
    for engine in engines:
        await engine.start()
    async with running_gateway(*(engine.url for engine in engines)) as gateway:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", rollout_loop(), env={"GATEWAY": gateway.url},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(3 * PATIENCE_S):
                out, errors = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert (process.returncode, errors.decode()) == (0, "")
        steps = re.findall(r"^step (\d): learn from (\d+), (\d+) of them cut$", out.decode(), re.M)
        assert [step for step, _, _ in steps] == ["0", "1", "2"]
        assert all(int(batch) >= 16 for _, batch, _ in steps)
        # The steps overlap, so that later ones learn from samples that an update has cut and that went on.
        assert sum(int(cut) for _, _, cut in steps) > 0
        assert {member.weight_number for member in gateway.gateway.services.fleet} == {3}
        assert {record.outcome for record in gateway.records} == {"complete", "aborted"}
    for engine in engines:
        await engine.stop()


# --- groups


async def at_once(f: Fleet, body: Any, count: int) -> list[Answer]:
    """The answers to so many equal requests in parallel."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call(f.gateway.address, "/generate", body)) for _ in range(count)]
    return [task.result() for task in tasks]


def prompt_of(group: int) -> list[int]:
    """A prompt of some blocks, with a beginning of its own."""
    return [100 + group, *range(1, 12 * BLOCK)]


@pytest.mark.parametrize("way", ["n", "parallel requests"])
async def test_groups_land_together(way: str) -> None:
    """The second sample comes long before the first one's blocks are announced."""
    groups, samples = 6, 4
    async with fleet(3, inter_token_ms=5.0, prefill_tokens_per_s=20_000.0) as f:

        async def ask(group: int) -> list[Answer]:
            sampling: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}
            count = samples if way == "parallel requests" else 1
            if way == "n":
                sampling["n"] = samples
            body = {"input_ids": prompt_of(group), "sampling_params": sampling}
            return await at_once(f, body, count)

        for group in range(groups):
            answers = await ask(group)
            assert all(answer.status == 200 for answer in answers)
            assert len({answer.headers["x-forebay-worker"] for answer in answers}) == 1, group
            if way == "n":
                assert len(answers[0].json()) == samples
        used = {engine: len(engine.log.requests_to("/generate")) for engine in f.engines}
        assert sum(used.values()) == groups * samples
        assert all(used.values()), "groups are spread, if samples are not"


async def test_a_group_that_is_too_large_for_one_worker_is_spread() -> None:
    """The imbalance guard: four requests, and half as many again, above the mean are too many."""
    async with fleet(3, inter_token_ms=20.0) as f:
        body = {"input_ids": prompt_of(0), "sampling_params": {"max_new_tokens": 30, "ignore_eos": True}}
        answers = await at_once(f, body, 30)
        assert {answer.status for answer in answers} == {200}
        used = [len(engine.log.requests_to("/generate")) for engine in f.engines]
        assert all(used)
        assert max(used) - sum(used) / len(used) <= max(4, sum(used) / len(used) / 2) + 1

"""Groups of siblings whose prompts all begin alike: each group's own part is computed once, too."""

import asyncio
import json
from typing import Any

import pytest

from tests.fakes.kv_fleet import BLOCK, PROMPT, Fleet, fleet
from tests.fakes.running import PATIENCE_S, until
from tests.fakes.wire import Answer, call

ON: dict[str, Any] = {"kv_coalesce_tokens": BLOCK}
# A rank takes all that there are at once, and computes them side by side in steps of two blocks.
SLOW: dict[str, Any] = {"inter_token_ms": 20.0, "prefill_tokens_per_s": 50_000.0, "chunked_prefill_tokens": 2 * BLOCK}
SHARED = PROMPT[: 4 * BLOCK]


def prompt(group: int) -> list[int]:
    """A prompt of one group; its last token is always computed."""
    return [*SHARED, *[800 + group] * (6 * BLOCK), 7]


async def burst(f: Fleet, groups: int, each: int, **more: Any) -> list[list[Answer]]:
    """Send each group's prompt so many times, all while the engine computes the first of them."""
    (engine,) = f.engines
    await f.generate([900, *PROMPT[1:]])  # so that the engine has been heard
    await f.settled()
    engine.freeze()
    body = {"sampling_params": {"max_new_tokens": 30, "ignore_eos": True}, **more}
    async with asyncio.TaskGroup() as tasks:
        sent = [
            [
                tasks.create_task(call(f.gateway.address, "/generate", {**body, "input_ids": prompt(group)}))
                for _ in range(each)
            ]
            for group in range(groups)
        ]
        await until(lambda: f.gateway.state()["held_requests"] == groups * each - 1, "all others are held")
        await engine.wait_for(lambda one: one.running + one.waiting == 1, PATIENCE_S)
        engine.thaw()
    return [[one.result() for one in group] for group in sent]


def cached_tokens(answer: Answer) -> int:
    """What the engine says that it found in its cache."""
    document = json.loads(answer.events()[-2]) if answer.events() else answer.json()
    found = document["meta_info"]["cached_tokens"]
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("is_stream", [False, True])
async def test_what_only_a_group_shares_is_computed_once(is_stream: bool) -> None:
    async with fleet(1, gateway=ON, **SLOW) as f:
        answers = await burst(f, groups=3, each=4, stream=is_stream)
        own = len(prompt(0)) - 1
        found = sorted(sorted(map(cached_tokens, group)) for group in answers)
        assert found == [[0, own, own, own], *[[len(SHARED), own, own, own]] * 2]
        await f.gateway.settle()
        page = (await f.gateway.client.get("/metrics")).text
        assert "\nforebay_coalesced_total 11.0\n" in page  # each counts once, however often it waited
        queued = [record.queue_s for record in f.gateway.records[1:]]
        assert queued.count(None) == 1
        assert all(record.queue_s is None or record.queue_s <= record.duration_s for record in f.gateway.records)

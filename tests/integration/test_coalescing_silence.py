"""Requests are not held back for what a rank was to tell and does not."""

import asyncio
from typing import Any

import pytest

import gateway.coalescing
from tests.fakes.kv_fleet import BLOCK, PROMPT, Fleet, fleet
from tests.fakes.running import PATIENCE_S, until
from tests.fakes.wire import call, request_bytes, wire

ON: dict[str, Any] = {"kv_coalesce_tokens": BLOCK}


async def two_at_once(f: Fleet, first: int, at_engine: int) -> None:
    """Send one prompt twice while the engine's time stands still, and let go when so many have arrived."""
    (engine,) = f.engines
    engine.freeze()
    body = {"input_ids": [first, *PROMPT], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    async with asyncio.TaskGroup() as group:
        calls = [group.create_task(call(f.gateway.address, "/generate", body)) for _ in range(2)]
        await engine.wait_for(lambda one: one.running + one.waiting == at_engine, PATIENCE_S)
        engine.thaw()
    assert {one.result().status for one in calls} == {200}


@pytest.mark.parametrize(("mute_s", "at_engine", "held"), [(60.0, 2, 1.0), (0.0, 1, 2.0)], ids=["mute", "heard again"])
async def test_a_rank_that_has_fallen_silent_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch, mute_s: float, at_engine: int, held: float
) -> None:
    monkeypatch.setattr(gateway.coalescing, "MUTE_S", mute_s)
    async with fleet(1, gateway=ON) as f:
        await f.generate(PROMPT)
        await f.settled()
        f.engines[0].add_fault(at="kv", do="silence", times=1)
        await two_at_once(f, 500, 1)
        await two_at_once(f, 600, at_engine)
        page = (await f.gateway.client.get("/metrics")).text
        assert f"\nforebay_coalesced_total {held}\n" in page


async def test_a_look_up_that_fails_costs_the_wait_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet(1, gateway=ON) as f:
        await f.generate(PROMPT)
        await f.settled()
        monkeypatch.setattr(f.gateway.gateway.services.prefixes, "_by_events", lambda *_: 1 / 0)
        await two_at_once(f, 500, 1)
        assert "could not be looked up" in caplog.text
        caplog.clear()


async def test_a_rank_is_relied_on_again_as_soon_as_it_tells_something() -> None:
    async with fleet(1, gateway=ON) as f:
        await f.generate(PROMPT)
        await f.settled()
        f.engines[0].add_fault(at="kv", do="delay:300", times=2)
        await two_at_once(f, 500, 1)  # answered before anything is told
        await f.settled()
        await two_at_once(f, 600, 1)


@pytest.mark.parametrize("fault", ["wrong_block_size", "garbage"])
async def test_a_rank_that_is_not_understood_any_more_is_waited_for_no_longer(fault: str) -> None:
    """The first one's answer is far away, and nothing will tell that its prompt is computed."""
    async with fleet(1, gateway=ON, inter_token_ms=20) as f, wire(f.gateway.address) as first:
        await f.generate(PROMPT)
        await f.settled()
        (engine,) = f.engines
        engine.add_fault(at="kv", do=fault, times=None)
        engine.freeze()
        endless = {
            "input_ids": [500, *PROMPT],
            "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": True},
        }
        await first.send(request_bytes("/generate", endless))
        await engine.wait_for(lambda one: one.running + one.waiting == 1, PATIENCE_S)
        async with asyncio.TaskGroup() as group:
            second = group.create_task(f.generate([500, *PROMPT]))
            await until(lambda: f.gateway.state()["held_requests"] == 1, "the second one is held")
            engine.thaw()
        assert second.result().status == 200
        assert f.gateway.state()["awaited_prefills"] == 0
        first.close()
        await f.gateway.settle()
        page = (await f.gateway.client.get("/metrics")).text
        assert "\nforebay_coalesced_late_total 0.0\n" in page

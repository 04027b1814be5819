"""Why a request would go over a prefill and a decode worker, told by a running gateway."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import zmq

from kv_events.hashing import pack_tokens
from kv_events.types import BlockStored
from tests.fakes.kv_fleet import BLOCK, PROMPT, announces
from tests.fakes.kv_publisher import KvPublisher
from tests.fakes.running import RunningGateway, running_gateway, until
from tests.fakes.script_engine import METADATA, ScriptEngine, script_engine
from tests.fakes.wire import call

BLOCKS = len(PROMPT) // BLOCK


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def name_of(engine: ScriptEngine) -> str:
    return engine.url.removeprefix("http://")


@asynccontextmanager
async def roles_fleet(
    *roles: str, options: dict[str, Any] | None = None, publisher: KvPublisher | None = None
) -> AsyncIterator[tuple[list[ScriptEngine], RunningGateway]]:
    """Workers that have these roles and cut blocks of 16, decode of 64; the first may publish KV events."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(script_engine()) for _ in roles]
        for engine, role in zip(engines, roles, strict=True):
            page_size = 4 * BLOCK if role == "decode" else BLOCK
            engine.metadata["/server_info"] = {
                **METADATA["/server_info"],
                "disaggregation_mode": role,
                "page_size": page_size,
            }
        if publisher is not None:
            announces(engines[0], publisher, disaggregation_mode=roles[0])
        gateway = await stack.enter_async_context(
            running_gateway(*(engine.url for engine in engines), seed=1, **(options or {}))
        )
        yield engines, gateway
        assert not any(engine.requests for engine in engines)  # explaining sends nothing


async def explained(gateway: RunningGateway, body: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = await call(gateway.address, "/route/explain", body, **more)
    assert answer.status == 200
    found: dict[str, Any] = answer.json()
    return found


async def test_all_roles_are_shown_and_both_choices() -> None:
    async with roles_fleet("prefill", "decode", "null") as (engines, gateway):
        found = await explained(gateway, {"text": "a"})
        prefill, decode, regular = (name_of(engine) for engine in engines)
        assert [(one["worker_id"], one["role"]) for one in found["candidates"]] == [
            (prefill, "prefill"),
            (decode, "decode"),
            (regular, "regular"),
        ]
        assert (found["chosen"]["worker_id"], found["chosen"]["role"]) == (decode, "decode")
        assert found["chosen"]["prefill"] == found["candidates"][0]
        assert found["reason"].startswith("prefill: the only rank")
        assert "; decode: the only rank" in found["reason"]


async def test_prefill_goes_where_the_prompt_is_cached_though_decode_cuts_other_blocks(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    publisher = KvPublisher(context)
    try:
        roles = ("prefill", "prefill", "decode", "decode")
        async with roles_fleet(*roles, publisher=publisher) as (engines, gateway):
            await until(lambda: publisher.subscriptions >= 1, "subscribed")
            kv = gateway.gateway.kv
            await until(lambda: kv.trusts_all(kv.index.ranks()), "trusted")
            publisher.publish(BlockStored(tuple(range(1, BLOCKS + 1)), None, pack_tokens(list(PROMPT)), BLOCK))
            cached = name_of(engines[0])
            await until(lambda: kv.blocks(cached, 0) == BLOCKS, "the blocks")
            decode = gateway.gateway.services.fleet.get(name_of(engines[2]))
            assert decode is not None
            booking = decode.load_of(0).book(requests=1, blocks=9, prefill_tokens=0)
            found = await explained(gateway, {"input_ids": PROMPT})
            booking.release()
            chosen = found["chosen"]
            assert chosen["worker_id"] == name_of(engines[3])
            assert (chosen["overlap_blocks"], chosen["prompt_blocks"]) == (0, len(PROMPT) // (4 * BLOCK))
            assert chosen["prefill"]["worker_id"] == cached
            assert (chosen["prefill"]["overlap_blocks"], chosen["prefill"]["prompt_blocks"]) == (BLOCKS, BLOCKS)
            assert f"{BLOCKS} of {BLOCKS} blocks are cached there; decode: the lowest cost" in found["reason"]
            assert found["blocks_hashed"] == BLOCKS
            assert all(one["cost"] is not None for one in found["candidates"])
    finally:
        publisher.stop()


@pytest.mark.parametrize(
    ("roles", "body", "path", "chosen", "reason"),
    [
        pytest.param(["decode"], {"text": "a"}, None, None, "no prefill worker is ready", id="no prefill"),
        pytest.param(["prefill"], {"text": "a"}, None, None, "no decode worker is ready", id="no decode"),
        pytest.param(["prefill", "decode"], {"input": "a"}, None, None, "serves requests alone", id="no pair can"),
        pytest.param(["prefill", "decode", "null"], {"input": "a"}, None, 2, "by one worker alone", id="one can"),
        pytest.param(["prefill", "null"], {"text": "a"}, None, 1, "by one worker alone", id="there is no pair"),
        pytest.param(["decode"], {"model": "x", "text": "a"}, None, None, "'x' is not served", id="no model"),
        pytest.param(["decode"], {"prompt": "a"}, "/tokenize", 0, "only rank", id="a route for all roles"),
    ],
)
async def test_what_no_pair_serves(
    roles: list[str], body: dict[str, Any], path: str | None, chosen: int | None, reason: str
) -> None:
    async with roles_fleet(*roles) as (engines, gateway):
        query = "" if path is None else f"?path={path}"
        answer = await call(gateway.address, f"/route/explain{query}", body)
        found = json.loads(answer.body)
        assert reason in found["reason"]
        assert (found["chosen"] or {}).get("worker_id") == (None if chosen is None else name_of(engines[chosen]))
        assert "prefill" not in (found["chosen"] or {})
        assert {one["worker_id"] for one in found["candidates"]} == {name_of(engine) for engine in engines}


async def test_short_prompts_are_explained_by_one_worker() -> None:
    async with roles_fleet("prefill", "decode", "null", options={"short_prompt_tokens": 4}) as (engines, gateway):
        short = await explained(gateway, {"input_ids": [1, 2, 3, 4]})
        assert short["chosen"]["worker_id"] == name_of(engines[2])
        longer = await explained(gateway, {"input_ids": [1, 2, 3, 4, 5]})
        assert longer["chosen"]["worker_id"] == name_of(engines[1])


async def test_why_workers_are_left_out() -> None:
    options = {"max_in_flight_per_worker": 1, "breaker_failures": 5, "breaker_open_s": 600.0}
    async with roles_fleet("prefill", "prefill", "prefill", "decode", options=options) as (engines, gateway):
        services = gateway.gateway.services
        tripped, full, _, decode = (services.fleet.get(name_of(engine)) for engine in engines)
        assert tripped is not None
        assert full is not None
        assert decode is not None
        for _ in range(5):
            services.fleet.failed(tripped, services.clock())
        booking = full.load_of(0).book(requests=1, blocks=0, prefill_tokens=0)
        found = await explained(gateway, {"text": "a"})
        booking.release()
        reasons = {one["worker_id"]: one["excluded"] for one in found["candidates"]}
        assert [reasons[name_of(engine)] for engine in engines] == [
            "has failed its last requests, and is left alone for a moment",
            "has as many requests as it is given at once",
            None,
            None,
        ]
        pinned = await explained(gateway, {"text": "a"}, headers={"x-forebay-worker": name_of(engines[2])})
        assert pinned["chosen"]["prefill"]["worker_id"] == name_of(engines[2])


async def test_pairs_that_lost_handoffs_are_explained_as_nothing() -> None:
    async with roles_fleet("prefill", "decode") as (engines, gateway):
        services = gateway.gateway.services
        prefill, decode = (name_of(engine) for engine in engines)
        for _ in range(3):
            services.pairs.health.abandoned(prefill, decode, services.clock())
        found = await explained(gateway, {"text": "a"})
        assert found["chosen"] is None
        assert "not paired for a moment" in found["reason"]
        assert {one["role"] for one in found["candidates"]} == {"prefill", "decode"}
        member = services.fleet.get(decode)
        assert member is not None
        gateway.gateway.workers.remove(member, 0.0)
        await until(lambda: services.fleet.get(decode) is None, "removed")
        assert not services.pairs.health.is_tracking

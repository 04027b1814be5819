"""The policies by option: how evenly they spread, and what sticks."""

from collections import Counter
from contextlib import AsyncExitStack

import pytest

from tests.fakes.running import RunningGateway, running_gateway
from tests.fakes.script_engine import Reply, SeenRequest, script_engine
from tests.fakes.wire import request_bytes, wire
from tests.integration.test_dynamic_workers import UNARY, id_of


async def spread(gateway: RunningGateway, count: int, headers: list[dict[str, str]] | None = None) -> list[str]:
    """The workers that served some requests, one after the other."""
    served: list[str] = []
    async with wire(gateway.address) as connection:
        for number in range(count):
            one = headers[number] if headers else None
            await connection.send(request_bytes("/generate", UNARY, headers=one))
            answer = await connection.answer()
            assert answer.status == 200
            served.append(answer.headers["x-forebay-worker"])
    return served


async def test_round_robin_takes_turns() -> None:
    async with script_engine() as one, script_engine() as two, script_engine() as three:
        urls = one.url, two.url, three.url
        async with running_gateway(*urls, policy="round-robin") as gateway:
            served = await spread(gateway, 30)
            assert all(len(set(served[i : i + 3])) == 3 for i in range(0, 30, 3))


async def begun(request: SeenRequest, reply: Reply) -> None:
    """Begins a stream that does not end."""
    await reply.start_chunked()
    await reply.event(b'{"text":"a","meta_info":{"id":"%b"}}' % request.rid.encode())
    await reply.gone()


@pytest.mark.parametrize("policy", ["power-of-two", "least-loaded", "round-robin"])
async def test_load_is_spread_over_busy_workers(policy: str) -> None:
    async with script_engine(begun) as one, script_engine(begun) as two, AsyncExitStack() as stack:
        urls = one.url, two.url
        gateway = await stack.enter_async_context(running_gateway(*urls, policy=policy, seed=1))
        async with AsyncExitStack() as connections:
            for _ in range(10):
                connection = await connections.enter_async_context(wire(gateway.address))
                await connection.send(request_bytes("/generate", {**UNARY, "stream": True}))
                await connection.head()
            assert [member.in_flight for member in gateway.gateway.services.fleet] == [5, 5]


KEYS = [f"session-{number}" for number in range(40)]


@pytest.mark.parametrize("header", ["X-SMG-Routing-Key", "X-Session-Id"])
async def test_consistent_hash_keeps_sessions_where_they_are(header: str) -> None:
    headers = [{header: key} for key in KEYS]
    async with script_engine() as one, script_engine() as two, script_engine() as three:
        urls = one.url, two.url, three.url
        async with running_gateway(*urls, policy="consistent-hash") as gateway:
            before = await spread(gateway, len(KEYS), headers)
            assert await spread(gateway, len(KEYS), headers) == before
            assert min(Counter(before).values()) >= 5
            assert len(Counter(before)) == 3
            # The worker that leaves takes only its own sessions with it.
            leaving = gateway.gateway.services.fleet.get(id_of(two))
            assert leaving is not None
            gateway.gateway.workers.remove(leaving, 0.0)
            after = await spread(gateway, len(KEYS), headers)
            assert [new for new, old in zip(after, before, strict=True) if old != id_of(two)] == [
                old for old in before if old != id_of(two)
            ]
            assert id_of(two) not in after
        # Another gateway, with the workers in another order, sends them to the same place.
        async with running_gateway(*reversed(urls), policy="consistent-hash") as gateway:
            assert await spread(gateway, len(KEYS), headers) == before


async def test_consistent_hash_without_a_key_goes_by_load() -> None:
    async with script_engine() as one, script_engine() as two:
        urls = one.url, two.url
        async with running_gateway(*urls, policy="consistent-hash", seed=1) as gateway:
            assert min(Counter(await spread(gateway, 60)).values()) >= 10

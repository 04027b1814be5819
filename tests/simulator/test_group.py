"""Engines of two nodes: who publishes which rank, what a node that is not the first answers, and either coming back."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from simulator.group import ranks_of
from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import PATIENCE_S, until


@dataclass
class Group:
    """Two nodes with two ranks each."""

    nodes: list[SimulatedEngine]
    clients: list[httpx.AsyncClient] = field(default_factory=list)

    async def generate(self, dp_rank: int, length: int = 32) -> None:
        """Have one rank fill some blocks."""
        body = {
            "input_ids": [10 + dp_rank + i for i in range(length)],
            "sampling_params": {"max_new_tokens": 1},
            "routed_dp_rank": dp_rank,
        }
        answer = await self.clients[0].post("/generate", json=body)
        assert answer.status_code == 200

    async def sources(self, number: int) -> list[dict[str, Any]]:
        """What a node tells of its publishers."""
        answer = await self.clients[number].get("/server_info")
        listed: list[dict[str, Any]] = answer.json()["kv_event_sources"]
        return listed


def options(number: int, address: str) -> EngineOptions:
    """Of one node."""
    return EngineOptions(
        dp_size=4,
        page_size=16,
        nnodes=2,
        node_rank=number,
        dist_init_addr=address,
        kv_events="tcp://127.0.0.1:0",
        replay="tcp://127.0.0.1:0",
    )


@asynccontextmanager
async def group_of_two() -> AsyncIterator[Group]:
    """Both nodes, running."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        # By name, as operators write it; sockets are bound to numbers only.
        address = f"localhost:{free.getsockname()[1]}"
    made = Group([SimulatedEngine(options(number, address)) for number in range(2)])
    try:
        for node in made.nodes:
            await node.start()
            fresh = httpx.Limits(max_keepalive_connections=0)
            made.clients.append(httpx.AsyncClient(base_url=node.url, trust_env=False, limits=fresh))
        yield made
    finally:
        for client in made.clients:
            await client.aclose()
        for node in made.nodes:
            await node.stop()


async def replayed(source: dict[str, Any], enough: int) -> list[Any]:
    """Ask a publisher for all its batches until there are enough."""
    context = zmq.asyncio.Context()
    batches: list[Any] = []

    async def ask() -> None:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(source["replay_endpoint"])
        await dealer.send_multipart([b"", bytes(8)])
        batches.clear()
        while (frames := await dealer.recv_multipart())[2] != b"\xff" * 8:
            batches.append((int.from_bytes(frames[2], "big"), msgspec.msgpack.decode(frames[3])))
        dealer.close(linger=0)

    try:
        async with asyncio.timeout(PATIENCE_S):
            while len(batches) < enough:
                await ask()
    finally:
        context.destroy(linger=0)
    return batches


@pytest.mark.parametrize(
    ("dp_size", "nnodes", "expected"),
    [(4, 2, [[0, 1], [2, 3]]), (4, 1, [[0, 1, 2, 3]]), (3, 2, [[0, 1], [2]]), (1, 2, [[0], []])],
)
def test_ranks_are_spread_evenly(dp_size: int, nnodes: int, expected: list[list[int]]) -> None:
    assert [list(ranks_of(dp_size, nnodes, number)) for number in range(nnodes)] == expected


async def test_each_node_lists_and_publishes_its_own_ranks() -> None:
    async with group_of_two() as group:
        listed = [await group.sources(number) for number in range(2)]
        assert [[source["dp_rank"] for source in sources] for sources in listed] == [[0, 1], [2, 3]]
        for rank in range(4):
            await group.generate(rank)
        for rank, source in enumerate([*listed[0], *listed[1]]):
            batches = await replayed(source, 2)
            assert [number for number, _ in batches] == list(range(len(batches)))
            assert {batch[2] for _, batch in batches} == {rank}
            assert batches[0][1][1][0]["type"] == "AllBlocksCleared"
            assert batches[1][1][1][0]["type"] == "BlockStored"


async def test_live_batches_reach_the_subscribers_of_the_second_node() -> None:
    async with group_of_two() as group:
        source = (await group.sources(1))[1]
        await replayed(source, 1)
        context = zmq.asyncio.Context()
        subscriber = context.socket(zmq.SUB)
        subscriber.subscribe(b"")
        subscriber.connect(source["endpoint"])
        try:
            for length in range(32, 320, 16):
                await group.generate(3, length)
                if await subscriber.poll(200):
                    break
            topic, _, payload = await subscriber.recv_multipart(zmq.NOBLOCK)
            assert topic == b"kv-events"
            assert msgspec.msgpack.decode(payload)[2] == 3
        finally:
            context.destroy(linger=0)


async def test_a_node_that_is_not_the_first_serves_nobody() -> None:
    async with group_of_two() as group:
        second = group.clients[1]
        for path in ("/health", "/ping", "/health_generate"):
            assert (await second.get(path)).status_code == 200
        assert (await second.post("/generate", json={"text": "x"})).status_code == 404
        assert (await second.get("/v1/models")).status_code == 404
        told = (await second.get("/get_server_info")).json()
        assert (told["node_rank"], told["nnodes"], told["dp_size"]) == (1, 2, 4)


async def test_a_first_node_that_restarts_begins_the_ranks_of_all_nodes_anew() -> None:
    async with group_of_two() as group:
        source = (await group.sources(1))[0]
        await group.generate(2)
        before = await replayed(source, 2)
        group.nodes[0].restart()
        await group.generate(2)
        await until(lambda: group.nodes[0].core.requests_total > 0, "the new life has served")
        async with asyncio.timeout(PATIENCE_S):
            while (after := await replayed(source, 2))[0] == before[0]:
                pass
        assert [number for number, _ in after] == [0, 1]


async def test_a_second_node_that_restarts_gets_everything_again() -> None:
    async with group_of_two() as group:
        await group.generate(2)
        group.nodes[1].restart()
        batches = await replayed((await group.sources(1))[0], 2)
        assert [number for number, _ in batches] == [0, 1]

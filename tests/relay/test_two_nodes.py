"""All of it: an engine of two nodes, a relay process beside each, and a gateway, over real sockets."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import RunningGateway, running_gateway, until
from tests.relay.test_command import LIFE_S, line_with, process

PAGE = 16
BLOCKS = 2


@dataclass
class System:
    """Two nodes with two ranks each, and a gateway that knows neither yet."""

    gateway: RunningGateway
    nodes: list[SimulatedEngine]
    ready_urls: dict[int, str] = field(default_factory=dict)

    async def relay(self, stack: AsyncExitStack, number: int) -> asyncio.subprocess.Process:
        """Start the relay of one node."""
        arguments = ["--engine", self.nodes[number].url, "--gateway", self.gateway.url, "--health-port", "0"]
        child = await stack.enter_async_context(process([*arguments, *(["--register"] if number == 0 else [])]))
        self.ready_urls[number] = await line_with(child.stderr, r"status at (http://\S+/ready)")
        return child

    async def is_ready(self, number: int) -> bool:
        """Ask a relay whether it is ready."""
        async with httpx.AsyncClient(trust_env=False) as client:
            return (await client.get(self.ready_urls[number])).status_code == 200

    async def fill(self, dp_rank: int, first_token: int) -> None:
        """Have a rank cache some blocks."""
        body = {
            "input_ids": [first_token + i for i in range(PAGE * BLOCKS + 1)],
            "sampling_params": {"max_new_tokens": 1},
            "routed_dp_rank": dp_rank,
        }
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.post(f"{self.nodes[0].url}/generate", json=body)).status_code == 200

    def blocks(self) -> list[int]:
        """What the gateway's index has of each rank."""
        kv = self.gateway.gateway.services.kv
        (member,) = self.gateway.gateway.services.fleet
        return [kv.blocks(member.worker.id, rank) for rank in range(4)]


@asynccontextmanager
async def system() -> AsyncIterator[System]:
    """The nodes and the gateway, running."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    async with AsyncExitStack() as stack:
        nodes = []
        for number in range(2):
            options = EngineOptions(
                dp_size=4,
                page_size=PAGE,
                nnodes=2,
                node_rank=number,
                dist_init_addr=address,
                kv_events="tcp://127.0.0.1:0",
                replay="tcp://127.0.0.1:0",
            )
            node = SimulatedEngine(options)
            await node.start()
            stack.push_async_callback(node.stop)
            nodes.append(node)
        gateway = await stack.enter_async_context(running_gateway(kv_listen="tcp://127.0.0.1:0"))
        yield System(gateway, nodes)


async def eventually(ask: Callable[[], Any], what: str) -> None:
    """Wait until an asynchronous question is answered with yes."""
    async with asyncio.timeout(LIFE_S):
        while not await ask():  # noqa: ASYNC110 -- another process gives no event
            await asyncio.sleep(0.05)


async def test_a1_1_the_index_has_the_ranks_of_both_nodes_under_the_leader() -> None:
    async with system() as found, AsyncExitStack() as stack:
        leader = await found.relay(stack, 0)
        follower = await found.relay(stack, 1)
        await eventually(lambda: found.is_ready(0), "the leader is ready")
        await eventually(lambda: found.is_ready(1), "the follower is ready")
        for rank in range(4):
            await found.fill(rank, 100 * rank + 10)
        await until(lambda: found.blocks() == [BLOCKS] * 4, "the index has them", LIFE_S)
        (member,) = found.gateway.gateway.services.fleet
        assert member.worker.url == found.nodes[0].url
        # A1.16, A1.13: one that goes and comes back, first the follower's relay, then the leader's.
        follower.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(follower.wait(), LIFE_S) == 0
        await until(lambda: found.blocks()[:2] == [BLOCKS] * 2, "the leader's ranks stay")
        await found.relay(stack, 1)
        await eventually(lambda: found.is_ready(1), "the follower is ready again")
        await until(lambda: found.blocks() == [BLOCKS] * 4, "the index is whole again", LIFE_S)
        leader.kill()
        await leader.wait()
        await found.relay(stack, 0)
        await eventually(lambda: found.is_ready(0), "the leader is ready again")
        await until(lambda: found.blocks() == [BLOCKS] * 4, "the index is whole again", LIFE_S)
        assert await found.is_ready(1)

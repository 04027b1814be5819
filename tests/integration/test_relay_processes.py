"""An engine of two nodes, their relays and a gateway, each a process: whoever is killed, the index ends as the truth.

What the gateway's index has is asked over HTTP, block by block: every chain of the engine's cache must be matched on
just the ranks that hold it, and no rank may have a block more.
"""

import asyncio
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import TIME_SCALE

PAGE = 16
RANKS = 4
# Kept small, so that blocks are evicted all the time.
BLOCKS_A_RANK = 24
PATIENCE_S = 60.0 * TIME_SCALE
START = "import sys; from gateway.cli import main; sys.exit(main(sys.argv[1:]))"
# Leases of dead relays end soon.
START_GATEWAY = f"""
import functools, gateway.kv_listen as listen
times = dict(beat_s={0.2 * TIME_SCALE}, lease_s={2.0 * TIME_SCALE}, grace_s={2.0 * TIME_SCALE})
listen.ListenTimes = functools.partial(listen.ListenTimes, **times)
{START}
"""
NAMES = ("node 0", "node 1", "relay 0", "relay 1", "gateway")


def free_run(count: int) -> int:
    """The first of some ports in a row that are free, below those that the system gives out."""
    while True:
        first = random.randrange(20_000, 30_000)
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first


@dataclass
class System:
    """The five processes, which come back by themselves if they end by themselves, as under any supervisor.

    Attributes:
        first_port: Everything has a fixed address from here on, so that it can come back.
        log: Directory of what they write.
        chance: Chooses the prompts.
        ended: Exit codes of those that ended by themselves.
    """

    first_port: int
    log: Path
    chance: random.Random
    client: httpx.AsyncClient
    children: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)
    ended: list[tuple[str, int]] = field(default_factory=list)

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.first_port + NAMES.index(name)}"

    def _arguments(self, name: str) -> Sequence[str]:
        kind, _, number = name.partition(" ")
        port = self.first_port + NAMES.index(name)
        if kind == "gateway":
            return ["serve", "--port", str(port), "--kv-listen", f"tcp://127.0.0.1:{self.first_port + 6}"]
        if kind == "node":
            places = {"kv-events": 10, "replay": 20}
            endpoints = [f"--{name}=tcp://127.0.0.1:{self.first_port + more}" for name, more in places.items()]
            group = [f"--nnodes=2 --node-rank={number}", f"--dist-init-addr=127.0.0.1:{self.first_port + 5}"]
            sizes = f"--dp-size={RANKS} --page-size={PAGE} --num-blocks={BLOCKS_A_RANK}"
            return ["simulate", "--port", str(port), *endpoints, *" ".join(group).split(), *sizes.split()]
        role = ["--register"] if number == "0" else []
        addresses = ["--engine", self.url(f"node {number}"), "--gateway", self.url("gateway")]
        return ["relay", *addresses, "--health-port", str(port), *role]

    async def start(self, name: str) -> None:
        with (self.log / name).open("ab") as log:
            self.children[name] = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                START_GATEWAY if name == "gateway" else START,
                *self._arguments(name),
                stdout=log,
                stderr=log,
            )

    async def kill(self, name: str) -> None:
        """Kill a process without a word."""
        child = self.children[name]
        child.send_signal(signal.SIGKILL)
        assert await child.wait() == -signal.SIGKILL

    async def work(self, requests: int) -> None:
        """Have the ranks cache prompts that share their beginnings."""

        async def one() -> None:
            letters = self.chance.choices((10, 20, 30), k=self.chance.randint(1, 5))
            body = {
                "input_ids": [*(letter for letter in letters for _ in range(PAGE)), 1],
                "sampling_params": {"max_new_tokens": 1},
                "routed_dp_rank": self.chance.randrange(RANKS),
            }
            answer = await self.client.post(f"{self.url('node 0')}/generate", json=body)
            assert answer.status_code == 200, answer.text

        for _ in range(requests):
            await one()

    async def until(self, ask: Callable[[], Any], what: str) -> None:
        """Wait for an answer of yes, and start again who has ended."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not await self._asked(ask):
                    for name, child in self.children.items():
                        if child.returncode is not None:
                            self.ended.append((name, child.returncode))
                            await self.start(name)
                    await asyncio.sleep(0.1)
        except TimeoutError:
            logs = "".join(f"\n--- {name}\n{(self.log / name).read_text()[-3000:]}" for name in NAMES)
            raise AssertionError(f"not within {PATIENCE_S:g} s: {what}{logs}") from None

    async def _asked(self, ask: Callable[[], Any]) -> bool:
        try:
            return bool(await ask())
        except httpx.TransportError:
            return False

    async def index_is_truth(self) -> bool:
        """Whether the gateway's index has just the blocks of the engine's caches."""
        caches = [await self._chains(rank) for rank in range(RANKS)]
        workers = (await self.client.get(f"{self.url('gateway')}/workers")).json()["workers"]
        if len(workers) != 1 or workers[0]["url"] != self.url("node 0"):
            return False
        ranks = workers[0]["ranks"]
        if [rank["kv"]["blocks"] for rank in ranks] != [len(chains) for chains in caches]:
            return False
        if {rank["kv"]["state"] for rank in ranks} != {"live"}:
            return False
        everything = set().union(*caches)
        # Their beginnings are asked for along with them.
        for chain in everything - {chain[:-PAGE] for chain in everything}:
            body = {"input_ids": [*chain, 1]}
            answer = await self.client.post(
                f"{self.url('gateway')}/route/explain", params={"path": "/generate"}, json=body
            )
            found = {one["dp_rank"]: one["overlap_blocks"] for one in answer.json()["candidates"]}
            if found != {rank: _held(chain, chains) for rank, chains in enumerate(caches)}:
                return False
        return True

    async def _chains(self, rank: int) -> set[tuple[int, ...]]:
        """Each block of a rank's cache, as all tokens up to its end."""
        cache = (await self.client.get(f"{self.url('node 0')}/_cache")).json()["ranks"][rank]
        chains: dict[int, tuple[int, ...]] = {}
        for block in cache["blocks"]:
            parent = block["parent_hash"]
            chains[block["hash"]] = (() if parent is None else chains[parent]) + tuple(block["tokens"])
        return set(chains.values())

    async def are_ready(self) -> bool:
        answers = [await self.client.get(f"{self.url(name)}/ready") for name in ("relay 0", "relay 1", "gateway")]
        return {answer.status_code for answer in answers} == {200}


def _held(chain: tuple[int, ...], held: set[tuple[int, ...]]) -> int:
    """Leading blocks of a chain that are held."""
    ends = range(PAGE, len(chain) + 1, PAGE)
    return next((n for n, end in enumerate(ends) if chain[:end] not in held), len(ends))


@asynccontextmanager
async def system(log: Path) -> AsyncIterator[System]:
    """All of it, started at once."""
    async with httpx.AsyncClient(trust_env=False) as client:
        found = System(free_run(30), log, random.Random(8), client)
        try:
            for name in NAMES:
                await found.start(name)
            yield found
        finally:
            for child in found.children.values():
                if child.returncode is None:
                    child.kill()
                await child.wait()


@pytest.mark.timeout(300 * TIME_SCALE)
async def test_whoever_is_killed_the_index_ends_as_the_truth(tmp_path: Path) -> None:
    async with system(tmp_path) as found:
        await found.until(found.are_ready, "all are ready")
        await found.work(60)
        await found.until(found.index_is_truth, "the index is the truth at first")
        for name in ("relay 1", "relay 0", "gateway", "node 1", "node 0"):
            await found.kill(name)
            if name != "node 0":
                # What happens meanwhile must not be lost, or must be known to be.
                await found.work(20)
            await found.start(name)
            await found.until(found.are_ready, f"all are ready after {name} was killed")
            await found.work(20)
            await found.until(found.index_is_truth, f"the index is the truth after {name} was killed")
        assert set(found.ended) <= {("relay 0", 1), ("relay 1", 1)}

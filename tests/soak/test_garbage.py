"""Nothing of a request is left to the garbage collector: what it would free rarely would pass for a leak."""

import asyncio
import gc
from collections import Counter

import pytest

from tests.fakes.pair_fleet import pair_fleet
from tests.soak.bodies import MODEL, VLLM_MODEL
from tests.soak.client import Client
from tests.soak.pair_bodies import OFTEN, PAIR_ASKS
from tests.soak.plan import MAX_BODY_BYTES, plan

REQUESTS = 120
CLIENTS = 8
_OWN = ("gateway.", "backends.", "routers.", "simulator.")


@pytest.fixture
def anyio_backend() -> str:
    """Without debug mode, which keeps what it tells of."""
    return "asyncio"


async def _serve(address: tuple[str, int], seed: int) -> None:
    plans = iter([plan(seed, number, PAIR_ASKS, OFTEN) for number in range(REQUESTS)])

    async def work() -> None:
        client = Client(address)
        for one in plans:
            await client.carry_out(one)
        client.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(work())


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
async def test_requests_leave_no_cycles_behind(engine: str) -> None:
    """Clients leave, abort and send nonsense. Mutation tried: any one of the cycles that this has found."""
    model = MODEL if engine == "sglang" else VLLM_MODEL
    limits = {"max_body_bytes": MAX_BODY_BYTES}
    async with pair_fleet(engine=engine, model=model, gateway=limits, checks_idle=False) as f:  # vLLM: leases stay
        await _serve(f.gateway.address, 1)  # what is made once
        await f.gateway.settle()
        gc.collect()
        gc.disable()
        try:
            await _serve(f.gateway.address, 2)
            await f.gateway.settle()
            await asyncio.sleep(0)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            found = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        own = {name: count for name, count in found.items() if name.startswith(_OWN)}
        assert not own

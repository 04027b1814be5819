"""Token counts of requests with several items in the access log: the same, however the answer was asked for."""

from typing import Any

import pytest

from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.pair_fleet import pair_fleet
from tests.fakes.running import RunningGateway, running_gateway
from tests.fakes.wire import call

BATCH: dict[str, Any] = {
    "input_ids": [[5] * 20, [6, 7], [8]],
    "sampling_params": [{"max_new_tokens": 3}, {"max_new_tokens": 5}, {"max_new_tokens": 7}],
}
SAMPLES: dict[str, Any] = {"input_ids": [9] * 20, "sampling_params": {"max_new_tokens": 4, "n": 2}}


async def counted(gateway: RunningGateway, body: dict[str, Any], *, stream: bool) -> tuple[int | None, int | None]:
    """Tokens of prompt and answer in the record of one request."""
    gateway.records.clear()
    assert (await call(gateway.address, "/generate", {**body, "stream": stream})).status == 200
    record = await gateway.record()
    return record.prompt_tokens, record.completion_tokens


@pytest.mark.parametrize(
    ("body", "tokens"),
    [pytest.param(BATCH, (23, 15), id="batch"), pytest.param(SAMPLES, (40, 8), id="samples")],
)
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
async def test_items_are_added_up(kind: str, body: dict[str, Any], tokens: tuple[int, int], stream: bool) -> None:
    engine = SimulatedEngine(EngineOptions(engine=kind))
    await engine.start()
    try:
        async with running_gateway(engine.url) as gateway:
            assert await counted(gateway, body, stream=stream) == tokens
    finally:
        await engine.stop()


async def test_a_pairs_batch_likewise() -> None:
    async with pair_fleet() as fleet:
        assert await counted(fleet.gateway, BATCH, stream=True) == (23, 15)

"""Embeddings: the engine takes ids of a batch as a list only."""

import json

from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import running_gateway
from tests.fakes.wire import call


async def test_single_texts_and_batches_get_their_vectors() -> None:
    engine = SimulatedEngine(EngineOptions(is_embedding=True))
    await engine.start()
    try:
        async with running_gateway(engine.url) as gateway:
            one = await call(gateway.address, "/v1/embeddings", {"model": "model", "input": "a"})
            two = await call(gateway.address, "/v1/embeddings", {"model": "model", "input": ["a", "b"], "rid": "r"})
            assert (one.status, len(one.json()["data"])) == (200, 1)
            assert (two.status, len(two.json()["data"])) == (200, 2)
            assert two.headers["x-request-id"] == "r"
            first, second = (json.loads(entry.body or b"")["rid"] for entry in engine.log.requests_to("/v1/embeddings"))
            assert isinstance(first, str)
            assert isinstance(second, list)
            assert [len(rid) for rid in (first, *second)] == [32, 32, 32]
    finally:
        await engine.stop()

"""Whether an engine ran a request on the rank that was chosen for it, as far as its answers tell."""

import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.fakes.running import RunningGateway, running_gateway
from tests.fakes.script_engine import METADATA, Reply, ScriptEngine, SeenRequest, script_engine
from tests.fakes.wire import call

MISMATCHES = "forebay_rank_mismatches_total"


@pytest.fixture
async def engine() -> AsyncIterator[ScriptEngine]:
    async with script_engine() as scripted:
        scripted.metadata["/server_info"] = {**METADATA["/server_info"], "dp_size": 4}
        yield scripted


@pytest.fixture
async def gateway(engine: ScriptEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine.url) as running:
        yield running


def script(rank: Callable[[int], object], *, text: str = "a") -> Any:
    """Answer on the rank that ``rank`` makes of the one asked for."""

    async def answer(request: SeenRequest, reply: Reply) -> None:
        body = json.loads(request.body)
        meta = {"id": body["rid"], "finish_reason": {"type": "stop"}, "dp_rank": rank(body["routed_dp_rank"])}
        document = json.dumps({"text": text, "meta_info": meta}).encode()
        if body.get("stream"):
            await reply.start_chunked()
            await reply.event(document)
            await reply.event(b"[DONE]")
            await reply.end_chunked()
        else:
            await reply.whole(document)

    return answer


async def mismatches(gateway: RunningGateway) -> float:
    lines = (await gateway.client.get("/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(MISMATCHES))


@pytest.mark.parametrize("mode", ["match", "incremental"])
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_another_rank_is_counted_each_time_and_told_once(
    engine: ScriptEngine, caplog: pytest.LogCaptureFixture, is_stream: bool, mode: str
) -> None:
    engine.script = script(lambda rank: (rank + 1) % 4)
    async with running_gateway(engine.url, upstream_mode=mode) as gateway:
        with caplog.at_level(logging.WARNING, "forebay.exchange"):
            for _ in range(3):
                answer = await call(gateway.address, "/generate", {"text": "a", "stream": is_stream})
                assert answer.status == 200
        assert await mismatches(gateway) == 3
    (told,) = [record.getMessage() for record in caplog.records if "routed_dp_rank" in record.getMessage()]
    assert engine.url.removeprefix("http://") in told


@pytest.mark.parametrize(
    ("rank", "text"),
    [
        pytest.param(lambda rank: rank, "a", id="right"),
        pytest.param(lambda rank: None, "a", id="not told"),
        pytest.param(lambda rank: rank, '{"dp_rank":7}', id="a rank in the text"),
    ],
)
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "unary"])
async def test_what_is_no_mismatch(
    gateway: RunningGateway, engine: ScriptEngine, rank: Callable[[int], object], text: str, is_stream: bool
) -> None:
    engine.script = script(rank, text=text)
    for _ in range(3):
        answer = await call(gateway.address, "/generate", {"text": "a", "stream": is_stream})
        assert answer.headers["x-forebay-dp-rank"] in {"0", "1", "2", "3"}
    assert await mismatches(gateway) == 0

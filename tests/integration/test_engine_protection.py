"""What kills engines stops at the gateway, whichever engine is behind it, and the rest passes as it is."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import RunningGateway, running_gateway
from tests.fakes.script_engine import Reply, ScriptEngine, SeenRequest
from tests.fakes.wire import call

CHAT, COMPLETIONS, SCORE = "/v1/chat/completions", "/v1/completions", "/v1/score"
USER = [{"role": "user", "content": "hi"}]
# One row for each row of docs/engine-protection.md.
DEADLY: dict[str, tuple[str, Any]] = {
    "negative id": ("/generate", {"input_ids": [1, -1]}),
    "negative id in a batch": ("/generate", {"input_ids": [[1], [2, -1]]}),
    "negative id in a chat": (CHAT, {"messages": USER, "input_ids": [-1]}),
    "negative id in a completion": (COMPLETIONS, {"prompt": [-1]}),
    "negative id to score": (SCORE, {"query": [1], "items": [[-1]]}),
    "id above 31 bits": ("/generate", {"input_ids": [2**31]}),
    "id with an exponent": ("/generate", b'{"input_ids":[1e9]}'),
    "id in a string": ("/generate", {"input_ids": ["-1"]}),
    "ids among texts": (COMPLETIONS, {"prompt": ["-1", 5]}),
    "empty text": ("/generate", {"text": ""}),
    "empty text in a batch": ("/generate", {"text": ["a", ""]}),
    "empty prompt in a batch": (COMPLETIONS, {"prompt": ["a", ""]}),
    "no ids in a batch": ("/generate", {"input_ids": [[1, 2], []]}),
    "no ids in a batch of prompts": (COMPLETIONS, {"prompt": [[1, 2], []]}),
    "top-k": ("/generate", {"text": "a", "return_logprob": True, "top_logprobs_num": 5000}),
    "top-k of a chat": (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 5000}),
    "top-k of a completion": (COMPLETIONS, {"prompt": "a", "logprobs": 5000}),
    "embeddings over tokens": ("/generate", {"text": "a", "positional_embed_overrides": {"embeds": []}}),
    "nothing to score": (SCORE, {"query": "", "items": []}),
}
HARMLESS: dict[str, tuple[str, Any]] = {
    "id outside of a small vocabulary": ("/generate", {"input_ids": [5000]}),
    "empty prompt": (COMPLETIONS, {"prompt": ""}),
    "logit bias": ("/generate", {"text": "a", "sampling_params": {"logit_bias": {"-5": 1}}}),
    "log-probabilities of ids": ("/generate", {"text": "a", "token_ids_logprob": [-5]}),
    "empty content": (CHAT, {"messages": [{"role": "user", "content": ""}]}),
    "empty input": ("/v1/responses", {"input": ""}),
}


@pytest.fixture(params=["sglang", "vllm"], scope="module")
async def simulated(request: pytest.FixtureRequest, anyio_backend: object) -> AsyncIterator[SimulatedEngine]:
    """An engine that dies as the real one does."""
    engine = SimulatedEngine(EngineOptions(engine=request.param))
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture(scope="module")
async def guarded(simulated: SimulatedEngine) -> AsyncIterator[RunningGateway]:
    """A gateway in front of ``simulated``."""
    async with running_gateway(simulated.url) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", list(DEADLY))
async def test_what_kills_an_engine_reaches_none(
    guarded: RunningGateway, simulated: SimulatedEngine, name: str, stream: bool
) -> None:
    path, body = DEADLY[name]
    simulated.log.clear()
    raw = body if isinstance(body, bytes) else json.dumps({**body, "stream": stream}).encode()
    answer = await call(guarded.address, path, raw)
    assert (answer.status, answer.json()["error"]["type"]) == (400, "invalid_request")
    assert answer.json()["error"]["param"]
    assert simulated.log.requests_to(path) == []
    alive = await call(guarded.address, COMPLETIONS, {"model": "model", "prompt": "a", "max_tokens": 1})
    assert alive.status == 200


@pytest.mark.parametrize("name", list(HARMLESS))
async def test_what_an_engine_survives_is_its_own_business(
    front: RunningGateway, scripted: ScriptEngine, name: str
) -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.whole(b"{}")

    scripted.script = script
    path, body = HARMLESS[name]
    assert (await call(front.address, path, body)).status == 200
    sent = json.loads(scripted.requests[0].body)
    assert {key: sent[key] for key in body} == body

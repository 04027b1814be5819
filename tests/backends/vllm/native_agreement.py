"""One native request to two simulated engines of the same seed: SGLang as it is, vLLM through the translation."""

import json
from dataclasses import replace
from typing import Any

from backends.json_body import JsonBody
from backends.slices import whole
from backends.sse import events
from backends.vllm.native_answer import answer
from backends.vllm.native_request import PATH, NativeLeg, NativePlan, translate
from backends.vllm.native_stream import NativeStream
from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.simulator.wire import Answer, ask, parse_answer, request_bytes, send

OPTIONS = EngineOptions(seed=7, inter_token_ms=0, context_length=512)
# What both tell; times are SGLang's own, and a cache is as warm as the requests before made it.
TOLD = ("finish_reason", "prompt_tokens", "completion_tokens", "weight_version", "weight_versions")
PUBLIC = [f"public-{index}" for index in range(64)]


def engine_of(kind: str, **changes: Any) -> SimulatedEngine:
    """An engine that is not started yet."""
    return SimulatedEngine(replace(OPTIONS, engine=kind, **changes))


def plan_of(body: dict[str, Any], **more: Any) -> NativePlan:
    """The translation of a request."""
    return translate(JsonBody.parse(json.dumps(body).encode()), **more)


async def ask_leg(port: int, leg: NativeLeg) -> Answer:
    """One leg's answer."""
    headers = {name.decode(): value.decode() for name, value in leg.headers}
    raw = await send(port, request_bytes(PATH, json.loads(leg.body), method="POST", close=True, **headers))
    found = parse_answer(raw)
    assert found is not None
    return found


async def through_vllm(port: int, body: dict[str, Any], *, is_incremental: bool = False) -> Any:
    """The whole answer of a vLLM worker: the body, or the payloads of all events."""
    plan = plan_of(body)
    answers = [await ask_leg(port, leg) for leg in plan.legs]
    assert [one.status for one in answers] == [200] * len(answers), answers[0].body
    if not plan.is_stream:
        return json.loads(whole(answer(plan, [one.body for one in answers], PUBLIC)))
    stream = NativeStream(plan, PUBLIC, is_incremental=is_incremental)
    told = b"".join(stream.feed(leg, event) for leg, one in enumerate(answers) for event in events(one.body))
    assert stream.is_ended
    return payloads(told)


async def through_sglang(port: int, body: dict[str, Any]) -> Any:
    """The same of an SGLang worker."""
    found = await ask(port, "/generate", body)
    assert found.status == 200, found.body
    return payloads(found.body) if body.get("stream") else found.json()


def payloads(stream: bytes) -> list[Any]:
    """Payloads of a stream that ends as it should."""
    assert stream.endswith(b"data: [DONE]\n\n")
    return [json.loads(event[6:]) for event in events(stream) if event != b"data: [DONE]\n\n"]


def items_of(answered: Any) -> list[Any]:
    """The items of an answer, whether or not it is a list."""
    return answered if isinstance(answered, list) else [answered]


def told(item: dict[str, Any]) -> dict[str, Any]:
    """What has to agree of one item or event."""
    meta = item["meta_info"]
    logprobs = {name: value for name, value in meta.items() if "logprobs" in name}
    rest = {name: value for name, value in item.items() if name not in ("meta_info", "text")}
    return {**rest, **logprobs, **{name: meta[name] for name in TOLD if name in meta}}

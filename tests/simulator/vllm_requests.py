"""Requests that the tests of the vLLM side send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from simulator.server import SimulatedEngine
from tests.simulator.conftest import StartEngine
from tests.simulator.wire import Answer, ask, request_bytes

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/inference/v1/generate"
USER = [{"role": "user", "content": "hi"}]


def body(path: str, tokens: int = 400, **more: Any) -> dict[str, Any]:
    """Return a body for any of the routes."""
    if path == GENERATE:
        return {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": tokens, **more.pop("params", {})}, **more}
    prompt = (
        {"messages": USER, "input": "hi", "max_output_tokens": tokens} if path != COMPLETIONS else {"prompt": "abc"}
    )
    return {**prompt, "max_tokens": tokens, **more}


async def started(start_engine: StartEngine, **options: Any) -> SimulatedEngine:
    return await start_engine(engine="vllm", **options)


async def open_request(engine: SimulatedEngine, path: str, fields: dict[str, Any], **headers: str) -> Any:
    """Send a request and leave its answer unread; returns its reader and writer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    writer.write(request_bytes(path, fields, close=True, **headers))
    return reader, writer


async def abort(engine: SimulatedEngine, *ids: str) -> None:
    answer = await ask(engine.port, "/inference/v1/abort_requests", {"request_ids": list(ids)})
    assert (answer.status, answer.body) == (200, b"")


def frozen(running: int, tokens: int = 0) -> Callable[[SimulatedEngine], bool]:
    """Return a predicate: so many sequences run and tokens exist; time then stands still."""

    def is_reached(engine: SimulatedEngine) -> bool:
        produced = sum(s.totals.generated_tokens for s in engine.core.schedulers)
        if engine.running != running or produced < tokens:
            return False
        engine.freeze()
        return True

    return is_reached


def finishes(answer: Answer) -> list[Any]:
    """Return how the choices of a unary answer ended."""
    return [choice["finish_reason"] for choice in answer.json()["choices"]]

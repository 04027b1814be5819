"""What is asked of an engine's /tokenize, and what is made of its answer."""

import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from backends.json_body import JsonBody
from backends.tokenize import engine_token_ids, token_ids_in, tokenize_body
from backends.types import EngineKind, Worker
from backends.upstream.h1 import H1Client
from tests.conftest import TIME_SCALE
from tests.fakes.raw_server import RawServer, answer, answers, raw_server
from tests.fakes.running import PATIENCE_S, until
from tests.simulator.wire import CAPTURES, VLLM_CAPTURES

SGLANG, VLLM = EngineKind
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]


def _body(fields: dict[str, Any]) -> JsonBody:
    return JsonBody.parse(json.dumps(fields).encode())


def _worker(server: RawServer, key: str | None = None) -> Worker:
    return Worker("w", "http://w", server.origin, api_key=key)


def _ids(*prompts: list[int]) -> tuple[bytes, ...]:
    return tuple(np.asarray(ids, dtype="<u4").tobytes() for ids in prompts)


@pytest.fixture
async def client() -> AsyncIterator[H1Client]:
    """A client that must hold nothing at the end."""
    one = H1Client(connect_timeout_s=PATIENCE_S)
    yield one
    await one.aclose()
    await until(lambda: one.active_connections == 0, "no connection left")


@pytest.mark.parametrize(
    ("engine", "path", "body", "expected"),
    [
        pytest.param(SGLANG, "/generate", {"text": "a", "rid": "x"}, {"prompt": "a"}, id="text"),
        pytest.param(SGLANG, "/generate", {"text": ["a", "b"]}, {"prompt": ["a", "b"]}, id="batch"),
        pytest.param(
            VLLM, "/v1/completions", {"model": "m", "prompt": "a", "add_special_tokens": False, "n": 2},
            {"model": "m", "prompt": "a", "add_special_tokens": False}, id="completions",
        ),
        pytest.param(
            SGLANG, CHAT, {"model": "m", "messages": HELLO, "tools": [], "reasoning_effort": "low", "stream": True},
            {"model": "m", "messages": HELLO, "tools": [], "reasoning_effort": "low"}, id="chat of SGLang",
        ),
        pytest.param(
            VLLM, CHAT,
            {"messages": HELLO, "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}, "tools": None},
            {"messages": HELLO, "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}}, id="chat of vLLM",
        ),
        pytest.param(VLLM, CHAT, {"messages": HELLO, "reasoning_effort": "low"}, None, id="vLLM has no place for it"),
        pytest.param(VLLM, CHAT, {"messages": HELLO, "documents": []}, None, id="documents"),
        pytest.param(SGLANG, CHAT, {"messages": IMAGE}, None, id="image"),
        pytest.param(SGLANG, CHAT, {"messages": HELLO, "input_ids": [1]}, None, id="ids beside messages"),
        pytest.param(SGLANG, CHAT, {"messages": "a"}, None, id="no messages"),
        pytest.param(VLLM, "/v1/completions", {"prompt": ["a", "b"]}, None, id="vLLM takes one at a time"),
        pytest.param(SGLANG, "/v1/completions", {"prompt": [1, 2]}, None, id="ids"),
        pytest.param(SGLANG, "/v1/completions", {"prompt": []}, None, id="empty batch"),
        pytest.param(SGLANG, "/v1/completions", {"prompt": "a", "suffix": "b"}, None, id="suffix"),
        pytest.param(SGLANG, "/generate", {"text": "a", "input_ids": [1]}, None, id="ids beside text"),
        pytest.param(SGLANG, "/generate", {"text": None}, None, id="null"),
        pytest.param(SGLANG, "/v1/messages", {"messages": HELLO}, None, id="other route"),
    ],
)  # fmt: skip
def test_what_is_asked(engine: EngineKind, path: str, body: dict[str, Any], expected: dict[str, Any] | None) -> None:
    asked = tokenize_body(engine, path, _body(body))
    assert (asked and json.loads(asked)) == expected


def _recorded(raw: bytes) -> bytes:
    return raw[raw.rindex(b"\r\n\r\n") + 4 :].partition(b"\n### END")[0]


def test_recorded_answers() -> None:
    sglang = _recorded((CAPTURES / "http" / "tokenize.http").read_bytes())
    assert token_ids_in(sglang) == _ids([352, 350, 14, 320, 340, 325])
    for name in ("tokenize-prompt", "tokenize-chat"):
        vllm = _recorded((VLLM_CAPTURES / "misc" / f"{name}.resp").read_bytes())
        assert token_ids_in(vllm) == _ids(json.loads(vllm)["tokens"])


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param(b'{"tokens":[[1,2],[3]]}', _ids([1, 2], [3]), id="batch"),
        pytest.param(b'{"tokens":[[],[3]]}', _ids([], [3]), id="batch with nothing in it"),
        pytest.param(b'{"tokens":[]}', _ids([]), id="nothing"),
        pytest.param(b'{"tokens":[1,[2]]}', None, id="mixed"),
        pytest.param(b'{"tokens":[-1]}', None, id="negative"),
        pytest.param(b'{"tokens":[4294967296]}', None, id="too large"),
        pytest.param(b'{"tokens":["a"]}', None, id="texts"),
        pytest.param(b'{"count":1}', None, id="something else"),
        pytest.param(b"[", None, id="no JSON"),
    ],
)
def test_other_answers(raw: bytes, expected: tuple[bytes, ...] | None) -> None:
    assert token_ids_in(raw) == expected


async def test_the_call(client: H1Client) -> None:
    async with raw_server(answers(answer(b'{"tokens":[1,2],"count":2,"max_model_len":9}'))) as server:
        body = _body({"prompt": "é", "model": "m"})
        found = await engine_token_ids(client, _worker(server, "key"), SGLANG, "/v1/completions", body, PATIENCE_S)
        assert found == _ids([1, 2])
        [request] = server.connections[0].requests
        assert request.line == b"POST /tokenize HTTP/1.1"
        assert dict(request.headers)[b"authorization"] == b"Bearer key"
        assert json.loads(request.body) == {"prompt": "é", "model": "m"}


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(answer(b'{"tokens":[1]}', status=b"404 Not Found"), id="no such route"),
        pytest.param(answer(b'{"error":{}}', status=b"400 Bad Request"), id="refused"),
        pytest.param(answer(b'{"tokens":1}'), id="something else"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{", id="broken off"),
        pytest.param(b"nonsense\r\n\r\n", id="no HTTP"),
        pytest.param(b"", id="silence"),
    ],
)
async def test_no_ids(client: H1Client, reply: bytes) -> None:
    async with raw_server(answers(*[reply] if reply else [])) as server:
        limit_s = 0.5 * TIME_SCALE
        found = await engine_token_ids(
            client, _worker(server), VLLM, "/v1/completions", _body({"prompt": "a"}), limit_s
        )
        assert found is None
        assert len(server.connections) == 1


async def test_what_cannot_be_asked_is_not_sent(client: H1Client) -> None:
    async with raw_server(answers()) as server:
        body = _body({"messages": HELLO, "documents": []})
        assert await engine_token_ids(client, _worker(server), VLLM, CHAT, body, PATIENCE_S) is None
        assert server.connections == []

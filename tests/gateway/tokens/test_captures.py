"""The ids made here are the ids that the recorded engines made."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.json_body import JsonBody, JsonBodyError
from backends.types import EngineKind
from gateway.routes import ROUTES
from gateway.tokens.service import PromptTokenizers
from tests.gateway.tokens.tiny import TOKENIZERS, ids_of

CAPTURES = TOKENIZERS.parent / "captures"
_IDS = re.compile(rb'"prompt_token_ids":(\[[0-9,]+\])')
_COUNT = re.compile(rb'"prompt_tokens":(\d+)')
_LOGPROBS = re.compile(rb'"input_token_logprobs":(\[\[null,.*?\]\])')


def _exchanges() -> Iterator[tuple[EngineKind, Path, bytes, bytes]]:
    for path in sorted((CAPTURES / "vllm").rglob("*.req")):
        answer = path.with_suffix(".resp")
        if answer.exists():
            yield EngineKind.VLLM, path, path.read_bytes(), answer.read_bytes()
    for path in sorted((CAPTURES / "sglang").rglob("*.http")):
        request, _, answer_bytes = path.read_bytes().partition(b"### RESPONSE")
        yield EngineKind.SGLANG, path, request.partition(b"\n")[2], answer_bytes


def _texts() -> Iterator[Any]:
    """Recorded requests with one prompt that is text, and that the engine took."""
    for engine, path, request, answer in _exchanges():
        head, _, raw = request.replace(b"\r\n", b"\n").partition(b"\n\n")
        words = head.split()
        route = words[1].decode() if len(words) > 1 else ""
        # A refused request and an engine's own warm-up count tokens in their own way.
        if route not in ROUTES or not _COUNT.search(answer) or b'"status_code":400' in answer:
            continue
        try:
            body = JsonBody.parse(raw.strip())
        except JsonBodyError:
            continue
        if any(body.text(name) for name in ("input_ids", "suffix", "image_data")):
            continue
        text = body.text("messages") or body.text("prompt") or body.text("text")
        if text.startswith((b'"', b"[{")) and route != "/v1/messages":
            yield pytest.param(engine, route, body, answer, id=str(path.relative_to(CAPTURES)))


TEXTS = list(_texts())


@pytest.mark.parametrize(("engine", "route", "body", "answer"), TEXTS)
async def test_ids_are_the_engines(
    tokenizers: PromptTokenizers, engine: EngineKind, route: str, body: JsonBody, answer: bytes
) -> None:
    found = await ids_of(tokenizers, engine, route, body)
    assert found is not None
    count = _COUNT.search(answer)
    assert count is not None
    assert len(found[0]) == int(count[1])
    if told := _IDS.search(answer):
        assert found == [json.loads(told[1])]
    if told := _LOGPROBS.search(answer):
        assert found == [[entry[1] for entry in json.loads(told[1])]]


def test_the_recordings_say_something() -> None:
    with_ids = [param for param in TEXTS if _IDS.search(param.values[3]) or _LOGPROBS.search(param.values[3])]
    assert {param.values[0] for param in with_ids} == set(EngineKind)
    assert len(TEXTS) > 80
    assert len(with_ids) > 5


@pytest.mark.parametrize("name", ["tokenize-chat", "tokenize-chat-nogen", "tokenize-prompt"])
async def test_ids_are_those_of_vllms_tokenize(tokenizers: PromptTokenizers, name: str) -> None:
    request = (CAPTURES / "vllm" / "misc" / f"{name}.req").read_bytes()
    answer = (CAPTURES / "vllm" / "misc" / f"{name}.resp").read_bytes()
    body = JsonBody.parse(request[request.index(b"{") :].strip())
    route = "/v1/chat/completions" if body.text("messages") else "/v1/completions"
    expected = json.loads(answer[answer.index(b"{") :])["tokens"]
    assert await ids_of(tokenizers, EngineKind.VLLM, route, body) == [expected]


async def test_ids_are_those_of_sglangs_tokenize(tokenizers: PromptTokenizers) -> None:
    capture = (CAPTURES / "sglang" / "http" / "tokenize.http").read_bytes()
    expected = json.loads(capture[capture.rindex(b'{"tokens"') :].partition(b"\n")[0])["tokens"]
    body = {"text": ["Hello world, how are you", "Hello"]}
    found = await ids_of(tokenizers, EngineKind.SGLANG, "/generate", body)
    assert found == [expected, expected[:1]]

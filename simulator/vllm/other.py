"""Tokenizing and embedding."""

from __future__ import annotations

import time
from typing import Any

import orjson

from simulator.exchange import Exchange
from simulator.text import decode, encode, logprob
from simulator.vllm.engine import VllmCore, fresh_id
from simulator.vllm.errors import RequestError, invalid, refused_value
from simulator.vllm.fields import load_body, missing
from simulator.vllm.generate import given_id
from simulator.vllm.request import chat_prompt, check_messages, check_model

_DIMENSIONS = 8


def _read(core: VllmCore, exchange: Exchange) -> tuple[dict[str, Any], str]:
    raw = load_body(exchange.request.body, exchange.request.header(b"content-type"))
    return raw, check_model(raw.get("model"), core.options)


def handle_tokenize(core: VllmCore, exchange: Exchange) -> None:
    """Answer ``/tokenize``, for a prompt or for messages."""
    try:
        raw, _ = _read(core, exchange)
        if "prompt" in raw:
            if not isinstance(raw["prompt"], str):
                raise invalid("string_type", "body.prompt", "Input should be a valid string", raw["prompt"])
            tokens = encode(raw["prompt"])
        else:
            add = raw.get("add_generation_prompt", True) is not False
            tokens = chat_prompt(check_messages(raw), add_generation_prompt=add)
    except RequestError as exc:
        exchange.respond(exc.status, exc.body)
        return
    body = {
        "count": len(tokens),
        "max_model_len": core.context_tokens,
        "tokens": tokens,
        "token_strs": [decode((token,)) for token in tokens] if raw.get("return_token_strs") else None,
    }
    exchange.respond(200, orjson.dumps(body))


def handle_detokenize(core: VllmCore, exchange: Exchange) -> None:
    """Answer ``/detokenize``; ids outside the vocabulary stand for nothing."""
    try:
        raw, _ = _read(core, exchange)
        if "tokens" not in raw:
            raise missing(raw, "tokens")
        tokens = raw["tokens"]
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise invalid("list_type", "body.tokens", "Input should be a valid list", tokens)
    except RequestError as exc:
        exchange.respond(exc.status, exc.body)
        return
    known = [token for token in tokens if 0 <= token < core.options.vocab_size]
    exchange.respond(200, orjson.dumps({"prompt": decode(known)}))


def _inputs(raw: dict[str, Any]) -> list[list[int]]:
    value = raw.get("input")
    if value is None:
        raise missing(raw, "input")
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(item, str | list) for item in value):
        raise invalid("list_type", "body.input", "Input should be a valid list", value)
    if not value:
        raise refused_value("Either input or messages must be provided and non-empty.", "input")
    return [encode(item) if isinstance(item, str) else item for item in value]


def handle_embeddings(core: VllmCore, exchange: Exchange) -> None:
    """Answer ``/v1/embeddings`` and ``/pooling``."""
    is_pooling = exchange.request.path == "/pooling"
    try:
        raw, model = _read(core, exchange)
        prompts = _inputs(raw)
    except RequestError as exc:
        exchange.respond(exc.status, exc.body)
        return
    kind, key = ("pooling", "data") if is_pooling else ("embedding", "embedding")
    total = sum(map(len, prompts))
    body = {
        "id": f"{'pool' if is_pooling else 'embd'}-{given_id(exchange, raw)}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [{"index": index, "object": kind, key: _vector(prompt)} for index, prompt in enumerate(prompts)],
        "usage": {
            "prompt_tokens": total,
            "total_tokens": total,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        },
    }
    exchange.entry.model = model
    exchange.respond(200, orjson.dumps(body))


def _vector(prompt: list[int]) -> list[float]:
    return [logprob(sum(prompt) + index, len(prompt)) for index in range(_DIMENSIONS)]


def echo_id(exchange: Exchange) -> bytes:
    """Return the header line that names the request: the client's own id, byte for byte, or a new one."""
    for name, value in exchange.request.headers:
        if name == b"x-request-id":
            return b"x-request-id: %b\r\n" % value
    return b"x-request-id: %b\r\n" % (fresh_id() + fresh_id()).encode()

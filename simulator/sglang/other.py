"""Smaller routes: tokenizing, embeddings, score, rerank, encode, classify."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import orjson

from simulator.core import Core
from simulator.exchange import Exchange
from simulator.sglang import errors
from simulator.sglang.openai import read_body, refuse, refuse_body
from simulator.text import decode, encode, logprob

_NO_EMBEDDING = (
    "This model does not appear to be an embedding model by default. "
    "Please add `--is-embedding` when launching the server or try another model."
)
_DIMENSIONS = 8


def _prompts(value: Any) -> list[Seq[int]]:
    """Return the prompts of an embedding-like body: text, texts, ids or lists of ids."""
    if isinstance(value, str):
        return [encode(value)]
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return [value]
    if isinstance(value, list):
        return [encode(item) if isinstance(item, str) else item for item in value]
    return []


def _vector(prompt: Seq[int]) -> list[float]:
    return [logprob(sum(prompt) + index, len(prompt)) for index in range(_DIMENSIONS)]


def _usage(prompt_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def handle_tokenize(core: Core, exchange: Exchange) -> None:
    """Answer ``/tokenize``."""
    raw = read_body(exchange)
    if raw is None:
        return
    prompt = raw.get("prompt")
    limit = core.options.context_length
    if isinstance(prompt, str):
        tokens = encode(prompt)
        exchange.respond(200, orjson.dumps({"tokens": tokens, "count": len(tokens), "max_model_len": limit}))
    elif isinstance(prompt, list) and all(isinstance(item, str) for item in prompt):
        rows = [encode(item) for item in prompt]
        body = {"tokens": rows, "count": [len(row) for row in rows], "max_model_len": limit}
        exchange.respond(200, orjson.dumps(body))
    else:
        refuse(exchange, "prompt must be a string or a list of strings")


def handle_detokenize(core: Core, exchange: Exchange) -> None:
    """Answer ``/detokenize``."""
    raw = read_body(exchange)
    if raw is None:
        return
    tokens = raw.get("tokens")
    if isinstance(tokens, list) and all(type(item) is int for item in tokens):
        exchange.respond(200, orjson.dumps({"text": decode(tokens)}))
    elif isinstance(tokens, list) and all(isinstance(item, list) for item in tokens):
        exchange.respond(200, orjson.dumps({"text": [decode(row) for row in tokens]}))
    else:
        refuse(exchange, "tokens must be a list of integers or a list of such lists")


def handle_embeddings(core: Core, exchange: Exchange) -> None:
    """Answer ``/v1/embeddings``; a generation model refuses."""
    raw = read_body(exchange)
    if raw is None:
        return
    prompts = _prompts(raw.get("input"))
    if not core.options.is_embedding:
        refuse(exchange, _NO_EMBEDDING)
        return
    if not prompts:
        refuse(exchange, "Input cannot be empty")
        return
    data = [{"embedding": _vector(p), "index": i, "object": "embedding"} for i, p in enumerate(prompts)]
    total = sum(map(len, prompts))
    body = {
        "data": data,
        "model": raw.get("model", core.options.model),
        "object": "list",
        "usage": {"completion_tokens": 0, "prompt_tokens": total, "total_tokens": total},
    }
    exchange.respond(200, orjson.dumps(body))


def handle_encode(core: Core, exchange: Exchange) -> None:
    """Answer ``/encode`` and ``/classify``; a generation model refuses."""
    raw = read_body(exchange)
    if raw is None:
        return
    if not core.options.is_embedding:
        exchange.respond(400, errors.value_error(_NO_EMBEDDING))
        return
    text = raw.get("text") if raw.get("text") is not None else raw.get("input_ids")
    answers = [
        {"embedding": _vector(p), "meta_info": {"id": str(i), "prompt_tokens": len(p), "cached_tokens": 0}}
        for i, p in enumerate(_prompts(text))
    ]
    if not answers:
        exchange.respond(400, errors.value_error("Either text, input_ids or input_embeds should be provided."))
        return
    exchange.respond(200, orjson.dumps(answers if isinstance(text, list) else answers[0]))


def handle_rerank(core: Core, exchange: Exchange) -> None:
    """Answer ``/v1/rerank``; a generation model refuses."""
    raw = read_body(exchange)
    if raw is None:
        return
    if not core.options.is_embedding:
        refuse(exchange, _NO_EMBEDDING)
        return
    documents = raw.get("documents")
    if not isinstance(documents, list) or not isinstance(raw.get("query"), str):
        refuse(exchange, "query and documents are needed")
        return
    scored = [
        {"score": logprob(sum(encode(str(d))), len(str(d))), "document": d, "index": i} for i, d in enumerate(documents)
    ]
    exchange.respond(200, orjson.dumps(sorted(scored, key=lambda row: -float(row["score"]))))


def handle_score(core: Core, exchange: Exchange) -> None:
    """Answer ``/v1/score``."""
    raw = read_body(exchange)
    if raw is None:
        return
    labels, items, query = raw.get("label_token_ids"), raw.get("items"), raw.get("query")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        location = ("body", "label_token_ids")
        refuse_body(
            exchange, errors.BodyError(errors.field_error("list_type", location, "Input should be a list", labels))
        )
        return
    items = [items] if isinstance(items, str) else items
    if not items or query is None:
        refuse(exchange, "Both query and items must be provided for text or token scoring.")
        return
    head = encode(query) if isinstance(query, str) else query
    prompts = [[*head, *(encode(item) if isinstance(item, str) else item)] for item in items]
    scores = [[2.0 ** logprob(label, sum(prompt)) for label in labels] for prompt in prompts]
    body = {
        "scores": scores,
        "pooled_hidden_states": None,
        "token_logprobs": None,
        "model": raw.get("model", core.options.model),
        "usage": _usage(sum(map(len, prompts))),
        "object": "scoring",
    }
    exchange.respond(200, orjson.dumps(body))

"""The route ``/v1/responses``; nothing is kept, as on a vLLM server without a response store."""

from __future__ import annotations

import uuid
from typing import Any

import orjson

from simulator.exchange import Exchange
from simulator.faulting import FaultRunner
from simulator.sglang.responses import ResponseShape, ResponsesRenderer
from simulator.vllm import errors
from simulator.vllm.engine import VllmCore
from simulator.vllm.fields import load_body, missing
from simulator.vllm.generate import note_request, rank_of, start_stream, start_unary
from simulator.vllm.request import chat_prompt, check_messages, plain_request


def handle_responses(core: VllmCore, faults: FaultRunner, exchange: Exchange) -> None:
    """Answer ``POST /v1/responses``."""
    header = exchange.request.header(b"x-request-id")
    response_id = f"resp_{header or uuid.uuid4().hex}"
    try:
        raw = load_body(exchange.request.body, exchange.request.header(b"content-type"))
        prompt, limit = chat_prompt(_messages(raw)), raw.get("max_output_tokens")
        fields = {key: value for key, value in raw.items() if key != "tools"}
        parsed = plain_request(fields, prompt, limit, response_id, core.options, core.context_tokens)
        rank = rank_of(exchange, core.options)
    except errors.RequestError as exc:
        exchange.respond(exc.status, exc.body)
        return
    note_request(exchange, parsed)
    shape = ResponseShape(raw, parsed.model, response_id)
    if parsed.stream:
        renderer = ResponsesRenderer(shape, lambda response_id, body: None)
        start_stream(core, faults, exchange, parsed, rank, renderer, last=None)
    else:
        start_unary(core, faults, exchange, parsed, rank, lambda s: orjson.dumps(shape.finished(s[0])))


def _messages(raw: dict[str, Any]) -> list[dict[str, Any]]:
    value = raw.get("input")
    if value is None:
        raise missing(raw, "input")
    messages = check_messages({"messages": [{"role": "user", "content": value}] if isinstance(value, str) else value})
    if raw.get("instructions"):
        return [{"role": "system", "content": raw["instructions"]}, *messages]
    return messages


def handle_response_by_id(exchange: Exchange) -> None:
    """Answer ``/v1/responses/{id}`` and its ``/cancel``: there is no such response."""
    methods = ("POST",) if exchange.request.path.endswith("/cancel") else ("GET",)
    if exchange.request.method not in methods:
        exchange.respond(405, b'{"detail":"Method Not Allowed"}', extra=f"allow: {methods[0]}\r\n")
        return
    response_id = exchange.request.path[len("/v1/responses/") :].removesuffix("/cancel")
    message = f"Response with id '{response_id}' not found."
    exchange.respond(404, errors.body(message, "invalid_request_error", "response_id", 404))

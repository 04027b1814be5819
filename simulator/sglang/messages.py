"""The Anthropic route ``/v1/messages``."""

from __future__ import annotations

import uuid
from collections.abc import Sequence as Seq
from typing import Any

import orjson

from simulator.chat import text_of
from simulator.core import Core
from simulator.exchange import Exchange
from simulator.faulting import FaultRunner
from simulator.sequence import FinishKind, Sequence
from simulator.sglang import errors
from simulator.sglang.generate_request import load_object
from simulator.sglang.openai import note_request, rank_header, start_stream, start_unary
from simulator.sglang.openai_request import OpenAIRequest, chat_prompt, check_common, plain_request
from simulator.text import encode

_STOP_REASONS = {FinishKind.LENGTH: "max_tokens", FinishKind.STOP: "end_turn", FinishKind.ABORT: "end_turn"}


def _error(exchange: Exchange, message: str, status: int = 400) -> None:
    error = {"type": "invalid_request_error", "message": message}
    exchange.respond(status, orjson.dumps({"type": "error", "error": error}))


def _prompt(raw: dict[str, Any]) -> list[int]:
    system = text_of(raw.get("system"))
    return [*(encode(f"<|system|>{system}\n") if system else ()), *chat_prompt(raw.get("messages"))]


def _read(core: Core, exchange: Exchange, *, needs_limit: bool) -> tuple[dict[str, Any], list[int]] | None:
    try:
        raw = load_object(exchange.request.body, exchange.request.header(b"content-type"))
        check_common(raw)
        if needs_limit and not isinstance(raw.get("max_tokens"), int):
            raise errors.BodyError("max_tokens: Field required")
        return raw, _prompt(raw)
    except errors.RequestError as exc:
        _error(exchange, exc.message)
        return None


def handle_count_tokens(core: Core, exchange: Exchange) -> None:
    """Answer ``/v1/messages/count_tokens``."""
    read = _read(core, exchange, needs_limit=False)
    if read is not None:
        exchange.respond(200, orjson.dumps({"input_tokens": len(read[1])}))


def handle_messages(core: Core, faults: FaultRunner, exchange: Exchange) -> None:
    """Answer ``/v1/messages``."""
    read = _read(core, exchange, needs_limit=True)
    if read is None:
        return
    raw, prompt = read
    fields = {key: value for key, value in raw.items() if key != "stop_sequences"}
    if raw.get("stop_sequences"):
        fields["stop"] = raw["stop_sequences"]
    try:
        request = plain_request(fields, prompt, raw["max_tokens"], rank_header(exchange), core.options)
    except errors.InvalidRequest as exc:
        _error(exchange, exc.message)
        return
    note_request(exchange, request)
    message_id = f"msg_{uuid.uuid4().hex}"
    if request.generate.stream:
        renderer = _MessagesRenderer(request, message_id)
        start_stream(core, faults, exchange, request, renderer, lambda sequences: None, last=None)
        return

    def body(sequences: Seq[Sequence]) -> bytes:
        sequence = sequences[0]
        return orjson.dumps(
            {
                "id": message_id,
                "type": "message",
                "role": "assistant",
                "content": [{"type": "text", "text": sequence.text}],
                "model": request.model,
                "stop_reason": _stop_reason(sequence),
                "usage": {"input_tokens": len(sequence.prompt), "output_tokens": len(sequence.output)},
            }
        )

    start_unary(core, faults, exchange, request, body)


def _stop_reason(sequence: Sequence) -> str | None:
    finish = sequence.finish
    if finish is None:
        return None
    return "stop_sequence" if isinstance(finish.matched, str) else _STOP_REASONS[finish.kind]


def named_event(name: str, body: dict[str, Any]) -> bytes:
    """Return a server-sent event with a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(body))


class _MessagesRenderer:
    """Events of a messages stream; it has no ``[DONE]``."""

    def __init__(self, request: OpenAIRequest, message_id: str) -> None:
        self._request = request
        self._id = message_id
        self._characters = 0
        self._is_begun = False
        self._last: Sequence | None = None

    def events(self, index: int, sequence: Sequence) -> Seq[bytes]:
        """Return the start of message and block once, then text deltas."""
        finish = sequence.finish
        if finish is not None and finish.status_code is not None:
            error = {"type": "overloaded_error", "message": finish.message}
            return (named_event("error", {"type": "error", "error": error}),)
        out = []
        if not self._is_begun:
            self._is_begun = True
            message = {
                "id": self._id,
                "type": "message",
                "role": "assistant",
                "content": [],
                "model": self._request.model,
                "usage": {"input_tokens": len(sequence.prompt), "output_tokens": 0},
            }
            block = {"type": "text", "text": ""}
            out.append(named_event("message_start", {"type": "message_start", "message": message}))
            start = {"type": "content_block_start", "index": 0, "content_block": block}
            out.append(named_event("content_block_start", start))
        text = sequence.text[self._characters :]
        self._characters = len(sequence.text)
        if text:
            delta = {"type": "text_delta", "text": text}
            body = {"type": "content_block_delta", "index": 0, "delta": delta}
            out.append(named_event("content_block_delta", body))
        self._last = sequence
        return out

    def ending(self) -> Seq[bytes]:
        """Return the ends of block and message."""
        sequence = self._last
        if sequence is None:
            return ()
        delta = {
            "type": "message_delta",
            "delta": {"stop_reason": _stop_reason(sequence)},
            "usage": {"output_tokens": len(sequence.output)},
        }
        return (
            named_event("content_block_stop", {"type": "content_block_stop", "index": 0}),
            named_event("message_delta", delta),
            named_event("message_stop", {"type": "message_stop"}),
        )

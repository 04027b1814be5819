"""The Anthropic route ``/v1/messages``: a chat completion in other words."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import orjson

from simulator.chat import text_of
from simulator.exchange import Exchange
from simulator.faulting import FaultRunner
from simulator.sequence import FinishKind, Sequence
from simulator.vllm import errors
from simulator.vllm.engine import VllmCore
from simulator.vllm.fields import load_body, missing
from simulator.vllm.generate import given_id, note_request, rank_of, start_stream, start_unary
from simulator.vllm.request import VllmRequest, chat_prompt, check_messages, plain_request

_STOP_REASONS = {FinishKind.LENGTH: "max_tokens", FinishKind.STOP: "end_turn", FinishKind.ABORT: None}


def named_event(name: str, body: dict[str, Any]) -> bytes:
    """Return a server-sent event with a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(body))


def _refuse(exchange: Exchange, exc: errors.RequestError) -> None:
    kind = "not_found_error" if exc.status == 404 else "invalid_request_error"
    error = {"type": kind, "message": exc.message}
    exchange.respond(exc.status, orjson.dumps({"type": "error", "error": error}))


def _read(exchange: Exchange) -> tuple[dict[str, Any], list[int]]:
    raw = load_body(exchange.request.body, exchange.request.header(b"content-type"))
    messages = check_messages(raw)
    system = text_of(raw.get("system"))
    return raw, chat_prompt([{"role": "system", "content": system}, *messages] if system else messages)


def handle_count_tokens(core: VllmCore, exchange: Exchange) -> None:
    """Answer ``/v1/messages/count_tokens``."""
    try:
        _, prompt = _read(exchange)
    except errors.RequestError as exc:
        _refuse(exchange, exc)
        return
    exchange.respond(200, orjson.dumps({"input_tokens": len(prompt)}))


def handle_messages(core: VllmCore, faults: FaultRunner, exchange: Exchange) -> None:
    """Answer ``/v1/messages``."""
    try:
        raw, prompt = _read(exchange)
        if not isinstance(raw.get("max_tokens"), int):
            raise missing(raw, "max_tokens")
        fields = {key: value for key, value in raw.items() if key not in ("stop_sequences", "tools", "stop")}
        if raw.get("stop_sequences"):
            fields["stop"] = raw["stop_sequences"]
        name = f"chatcmpl-{given_id(exchange, raw)}"
        parsed = plain_request(fields, prompt, raw["max_tokens"], name, core.options, core.context_tokens)
        rank = rank_of(exchange, core.options)
    except errors.RequestError as exc:
        _refuse(exchange, exc)
        return
    note_request(exchange, parsed)
    if parsed.stream:
        start_stream(core, faults, exchange, parsed, rank, _MessagesRenderer(parsed), last=None)
    else:
        start_unary(core, faults, exchange, parsed, rank, lambda sequences: _body(parsed, sequences[0]))


def _body(parsed: VllmRequest, sequence: Sequence) -> bytes:
    content = [{"type": "text", "text": sequence.text}] if sequence.text else []
    return orjson.dumps(
        {
            "id": parsed.answer_id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": parsed.model,
            "stop_reason": _stop_reason(sequence),
            "usage": _usage(sequence),
        }
    )


def _usage(sequence: Sequence) -> dict[str, int]:
    return {"input_tokens": len(sequence.prompt), "output_tokens": len(sequence.output)}


def _stop_reason(sequence: Sequence) -> str | None:
    return None if sequence.finish is None else _STOP_REASONS[sequence.finish.kind]


class _MessagesRenderer:
    """Events of a messages stream; it has no ``[DONE]``."""

    def __init__(self, request: VllmRequest) -> None:
        self._request = request
        self._characters = 0
        self._is_begun = False
        self._has_block = False
        self._is_failed = False
        self._last: Sequence | None = None

    def events(self, index: int, sequence: Sequence) -> Seq[bytes]:
        """Return the start of the message once, then text deltas; the block starts with the first text."""
        finish = sequence.finish
        if finish is not None and finish.status_code is not None:
            self._is_failed = True
            error = {"type": "internal_error", "message": finish.message}
            return (named_event("error", {"type": "error", "error": error}),)
        out = []
        if not self._is_begun:
            self._is_begun = True
            message: dict[str, Any] = {
                "id": self._request.answer_id,
                "type": "message",
                "role": "assistant",
                "content": [],
                "model": self._request.model,
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {"input_tokens": len(sequence.prompt), "output_tokens": 0},
            }
            out.append(named_event("message_start", {"type": "message_start", "message": message}))
        held_back = 0 if finish is not None else self._request.sampling.held_back
        text = sequence.text[self._characters : max(self._characters, len(sequence.text) - held_back)]
        self._characters += len(text)
        if text:
            if not self._has_block:
                self._has_block = True
                block = {"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 0}
                out.append(named_event("content_block_start", block))
            delta = {"type": "text_delta", "text": text}
            body = {"type": "content_block_delta", "delta": delta, "index": 0}
            out.append(named_event("content_block_delta", body))
        self._last = sequence
        return out

    def ending(self) -> Seq[bytes]:
        """Return the ends of block and message."""
        sequence = self._last
        if sequence is None or self._is_failed:
            return ()
        out = []
        if self._has_block:
            out.append(named_event("content_block_stop", {"type": "content_block_stop", "index": 0}))
        delta = {"type": "message_delta", "delta": {"stop_reason": _stop_reason(sequence)}, "usage": _usage(sequence)}
        out.append(named_event("message_delta", delta))
        out.append(named_event("message_stop", {"type": "message_stop"}))
        return out

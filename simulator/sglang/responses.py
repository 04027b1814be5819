"""The route ``/v1/responses``; finished answers are kept for a while, as one process does."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import orjson

from simulator.core import Core
from simulator.exchange import Exchange
from simulator.faulting import FaultRunner
from simulator.sequence import FinishKind, Sequence
from simulator.sglang import errors
from simulator.sglang.messages import named_event
from simulator.sglang.openai import (
    note_request,
    rank_header,
    read_body,
    refuse,
    refuse_body,
    start_stream,
    start_unary,
)
from simulator.sglang.openai_request import chat_prompt, check_common, plain_request

_KEPT = 1000


class ResponseStore:
    """The newest finished responses by id."""

    def __init__(self) -> None:
        self._bodies: OrderedDict[str, bytes] = OrderedDict()

    def keep(self, response_id: str, body: bytes) -> None:
        """Keep ``body``, forgetting the oldest beyond the limit."""
        self._bodies[response_id] = body
        if len(self._bodies) > _KEPT:
            self._bodies.popitem(last=False)

    def handle_get(self, exchange: Exchange) -> None:
        """Answer ``/v1/responses/{id}`` and its ``/cancel``."""
        response_id = exchange.request.path[len("/v1/responses/") :].removesuffix("/cancel")
        body = self._bodies.get(response_id)
        if body is None:
            error = {
                "message": f"Response with id '{response_id}' not found.",
                "type": "invalid_request_error",
                "param": "response_id",
                "code": 404,
            }
            exchange.respond(404, orjson.dumps({"error": error}))
            return
        exchange.respond(200, body)

    def handle_create(self, core: Core, faults: FaultRunner, exchange: Exchange) -> None:
        """Answer ``POST /v1/responses``."""
        raw = read_body(exchange)
        if raw is None:
            return
        try:
            check_common(raw)
            prompt = _prompt(raw)
            if isinstance(raw.get("request_id"), str):
                raw = {**raw, "rid": raw["request_id"]}  # the answer's id, and the id that an abort finds
            request = plain_request(raw, prompt, raw.get("max_output_tokens"), rank_header(exchange), core.options)
        except errors.BodyError as exc:
            refuse_body(exchange, exc)
            return
        except errors.InvalidRequest as exc:
            refuse(exchange, exc.message)
            return
        note_request(exchange, request)
        shape = ResponseShape(raw, request.model, raw.get("request_id") or f"resp_{uuid.uuid4().hex}")
        if request.generate.stream:
            renderer = ResponsesRenderer(shape, self.keep)
            extra = "cache-control: no-cache\r\n"
            start_stream(core, faults, exchange, request, renderer, lambda _: None, extra_head=extra, last=None)
            return

        def body(sequences: Seq[Sequence]) -> bytes:
            finished = orjson.dumps(shape.finished(sequences[0]))
            self.keep(shape.response_id, finished)
            return finished

        start_unary(core, faults, exchange, request, body)


def _prompt(raw: dict[str, Any]) -> list[int]:
    value = raw.get("input")
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if raw.get("instructions") and isinstance(messages, list):
        messages = [{"role": "system", "content": raw["instructions"]}, *messages]
    return chat_prompt(messages)


class ResponseShape:
    """The response object in its states."""

    def __init__(self, raw: dict[str, Any], model: str, response_id: str) -> None:
        self.response_id = response_id
        self.item_id = f"msg_{uuid.uuid4().hex}"
        self._raw = raw
        self._model = model
        self._created = int(time.time())

    def in_progress(self) -> dict[str, Any]:
        """Return the object before any output."""
        return self._object([], "in_progress", None, None)

    def finished(self, sequence: Sequence) -> dict[str, Any]:
        """Return the object with the whole answer."""
        produced, prompt = len(sequence.output), len(sequence.prompt)
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": sequence.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": produced,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + produced,
        }
        finish = sequence.finish
        is_cut = finish is not None and finish.kind is FinishKind.LENGTH
        status = "incomplete" if is_cut else "completed"
        output = [self.item(sequence.text, "completed")] if sequence.text else []
        return self._object(output, status, usage, {"reason": "max_output_tokens"} if is_cut else None)

    def item(self, text: str | None, status: str) -> dict[str, Any]:
        """Return the output message."""
        content = [] if text is None else [self.part(text)]
        return {"id": self.item_id, "content": content, "role": "assistant", "status": status, "type": "message"}

    @staticmethod
    def part(text: str) -> dict[str, Any]:
        """Return a text part."""
        return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}

    def _object(self, output: list[Any], status: str, usage: Any, incomplete: Any) -> dict[str, Any]:
        raw = self._raw
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created,
            "model": self._model,
            "output": output,
            "status": status,
            "usage": usage,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "error": None,
            "incomplete_details": incomplete,
            "instructions": raw.get("instructions"),
            "max_output_tokens": raw.get("max_output_tokens"),
            "previous_response_id": raw.get("previous_response_id"),
            "reasoning": {"effort": None, "summary": None},
            "store": True,
            "temperature": raw.get("temperature"),
            "text": None,
            "top_p": raw.get("top_p"),
            "truncation": "disabled",
            "user": raw.get("user"),
            "metadata": raw.get("metadata") or {},
        }


class ResponsesRenderer:
    """Events of a responses stream; it has no ``[DONE]``."""

    def __init__(self, shape: ResponseShape, keep: Callable[[str, bytes], None]) -> None:
        self._shape = shape
        self._keep = keep
        self._number = 0
        self._characters = 0
        self._is_begun = False
        self._has_item = False
        self._last: Sequence | None = None

    def events(self, index: int, sequence: Sequence) -> Seq[bytes]:
        """Return the opening events once, then text deltas."""
        finish = sequence.finish
        if finish is not None and finish.status_code is not None:
            self._last = None  # nothing follows an error
            error = {"type": "error", "code": str(finish.status_code), "message": finish.message, "param": None}
            return (self._event("error", **error),)
        out = []
        if not self._is_begun:
            self._is_begun = True
            out.append(self._event("response.created", response=self._shape.in_progress()))
            out.append(self._event("response.in_progress", response=self._shape.in_progress()))
        text = sequence.text[self._characters :]
        if text:
            self._characters = len(sequence.text)
            if not self._has_item:
                self._has_item = True
                item = self._shape.item(None, "in_progress")
                out.append(self._event("response.output_item.added", output_index=0, item=item))
                out.append(self._event("response.content_part.added", **self._place(), part=self._shape.part("")))
            out.append(self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[]))
        self._last = sequence
        return out

    def ending(self) -> Seq[bytes]:
        """Return the ends of part, item and response."""
        sequence = self._last
        if sequence is None:
            return ()
        out = []
        if self._has_item:
            place, text = self._place(), sequence.text
            out.append(self._event("response.output_text.done", **place, text=text, logprobs=[]))
            out.append(self._event("response.content_part.done", **place, part=self._shape.part(text)))
            item = self._shape.item(text, "completed")
            out.append(self._event("response.output_item.done", output_index=0, item=item))
        finished = self._shape.finished(sequence)
        self._keep(self._shape.response_id, orjson.dumps(finished))
        out.append(self._event(f"response.{finished['status']}", response=finished))
        return out

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._shape.item_id, "output_index": 0, "content_index": 0}

    def _event(self, name: str, **fields: Any) -> bytes:
        body = {"type": name, **fields, "sequence_number": self._number}
        self._number += 1
        return named_event(name, body)

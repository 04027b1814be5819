"""The chat and completions routes."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from simulator.core import Core, DuplicateRequest
from simulator.exchange import Exchange
from simulator.faulting import EventWriter, FaultRunner
from simulator.generation import Renderer, StreamGeneration, UnaryGeneration
from simulator.sequence import Sequence
from simulator.sglang import errors
from simulator.sglang.generate import answer_context, make_sequences, start_after_warm_up
from simulator.sglang.generate_request import load_object
from simulator.sglang.openai_answer import ChatRenderer, CompletionRenderer, unary_body
from simulator.sglang.openai_request import OpenAIRequest, parse_chat, parse_completion


def read_body(exchange: Exchange) -> dict[str, Any] | None:
    """Return the body's object; answers 400 and returns ``None`` if there is none."""
    request = exchange.request
    try:
        content_type = request.header(b"content-type")
        if content_type is None or content_type.split(";")[0].strip().lower() != "application/json":
            message = "Unsupported Media Type: Only 'application/json' is allowed"
            raise errors.BodyError(errors.field_error("value_error", ("header", "content-type"), message, None))
        return load_object(request.body, content_type)
    except errors.BodyError as exc:
        refuse_body(exchange, exc)
        return None


def refuse_body(exchange: Exchange, exc: errors.BodyError) -> None:
    """Answer the error of a body that could not be read."""
    request = exchange.request
    exchange.respond(400, errors.body_error(exc.message, f"{request.method} {request.path}", "openai_route"))


def refuse(exchange: Exchange, message: str) -> None:
    """Answer the flat error of a refused value."""
    exchange.respond(400, errors.object_error(message, "BadRequestError", 400))


def rank_header(exchange: Exchange) -> str | None:
    """Return the header that names a rank; the native route does not read it."""
    return exchange.request.header(b"x-data-parallel-rank")


def note_request(exchange: Exchange, request: OpenAIRequest) -> None:
    """Put into the log what the body said."""
    entry = exchange.entry
    entry.model = request.model
    entry.stream = request.generate.stream
    entry.rids = [rid for spec in request.generate.prompts for rid in spec.rids]


def handle_chat(core: Core, faults: FaultRunner, exchange: Exchange) -> None:
    """Answer ``/v1/chat/completions``."""
    _handle(core, faults, exchange, is_chat=True)


def handle_completions(core: Core, faults: FaultRunner, exchange: Exchange) -> None:
    """Answer ``/v1/completions``."""
    _handle(core, faults, exchange, is_chat=False)


def _handle(core: Core, faults: FaultRunner, exchange: Exchange, *, is_chat: bool) -> None:
    raw = read_body(exchange)
    if raw is None:
        return
    parse = parse_chat if is_chat else parse_completion
    try:
        request = parse(raw, rank_header(exchange), core.options)
    except errors.BodyError as exc:
        refuse_body(exchange, exc)
        return
    except errors.InvalidRequest as exc:
        refuse(exchange, exc.message)
        return
    note_request(exchange, request)
    created = int(time.time())
    if request.generate.stream:
        kind = ChatRenderer if is_chat else CompletionRenderer
        renderer = kind(request, answer_context(core), created)

        def started(sequences: Seq[Sequence]) -> None:
            renderer.sequences = sequences

        start_stream(core, faults, exchange, request, renderer, started)
        return

    def body(sequences: Seq[Sequence]) -> bytes:
        return unary_body(request, sequences, answer_context(core), created, core.timers.now(), is_chat=is_chat)

    start_unary(core, faults, exchange, request, body)


def start_unary(
    core: Core,
    faults: FaultRunner,
    exchange: Exchange,
    request: OpenAIRequest,
    body: Callable[[Seq[Sequence]], bytes],
) -> None:
    """Generate, then answer with ``body`` or with the scheduler's error."""

    def done(sequences: Seq[Sequence]) -> None:
        exchange.entry.dp_rank = sequences[0].rank
        for sequence in sequences:
            finish = sequence.finish
            if finish is not None and finish.status_code is not None:
                code = finish.status_code
                exchange.respond(code, errors.object_error(finish.message, str(code), code))
                return
        faults.answer_unary(exchange, 200, body(sequences), "application/json")

    def go() -> None:
        sequences = make_sequences(core, request.generate.prompts, generation, is_streamed=False)
        try:
            generation.start(sequences, request.generate.dp_rank)
        except DuplicateRequest as exc:
            refuse(exchange, str(exc))
            return
        exchange.entry.dp_rank = sequences[0].rank

    generation = UnaryGeneration(core, exchange, done)
    start_after_warm_up(core, exchange, request.generate, go)


def start_stream(
    core: Core,
    faults: FaultRunner,
    exchange: Exchange,
    request: OpenAIRequest,
    renderer: Renderer,
    started: Callable[[Seq[Sequence]], None],
    *,
    extra_head: str = "",
    last: bytes | None = b"data: [DONE]\n\n",
) -> None:
    """Generate and stream; the head waits for the first news, so that refusals keep their status."""

    def on_first(sequence: Sequence) -> bool:
        exchange.entry.dp_rank = sequence.rank
        exchange.start_stream(extra_head)
        return True

    def go() -> None:
        sequences = make_sequences(core, request.generate.prompts, generation, is_streamed=True)
        started(sequences)
        try:
            generation.start(sequences, request.generate.dp_rank)
        except DuplicateRequest as exc:
            refuse(exchange, str(exc))
            return
        exchange.entry.dp_rank = sequences[0].rank

    generation = StreamGeneration(core, exchange, EventWriter(exchange, faults), renderer)
    generation.on_first = on_first
    generation.last = last
    start_after_warm_up(core, exchange, request.generate, go)

"""The native ``/generate`` route."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import orjson

from simulator.core import Core, DuplicateRequest
from simulator.exchange import Exchange
from simulator.faulting import EventWriter, FaultRunner
from simulator.generation import StreamGeneration, UnaryGeneration, WarmUp
from simulator.sequence import Finish, FinishKind, Sequence, Times
from simulator.sglang import errors
from simulator.sglang.generate_answer import Context, Sent, answer
from simulator.sglang.generate_request import (
    GenerateRequest,
    PromptSpec,
    Returns,
    check_types,
    fresh_rid,
    load_object,
    parse_generate,
    wants_stream,
)
from simulator.text import TokenSource

_DONE = b"data: [DONE]\n\n"
# Prefill ends with one token, whatever it is, and says a length of 0.
_PREFILLED = Finish(FinishKind.LENGTH, length=0)


def answer_context(core: Core) -> Context:
    """Return what answers need to know about the engine."""
    options = core.options
    is_decode = options.role == "decode"
    return Context(core.weight_version, options.dp_size > 1, options.vocab_size, core.epoch_offset_s, is_decode)


def make_sequences(core: Core, prompts: Seq[PromptSpec], owner: Any, *, is_streamed: bool) -> list[Sequence]:
    """Return the sequences of a request, all samples of a prompt next to each other."""
    now = core.timers.now()
    is_prefill = core.options.role == "prefill"
    sequences = []
    for spec in prompts:
        sampling, returns = spec.sampling, spec.returns
        grammar = sampling.grammar_error
        first_finish = None if grammar is None else _bad_grammar(grammar)
        if is_prefill and spec.max_new_tokens and first_finish is None:
            first_finish = _PREFILLED
        for sample, rid in enumerate(spec.rids):
            sequences.append(
                Sequence(
                    rid=rid,
                    prompt=spec.prompt if grammar is None else spec.prompt[:1],
                    max_new_tokens=min(1, spec.max_new_tokens) if is_prefill else spec.max_new_tokens,
                    source=TokenSource(core.options.seed, spec.prompt, sampling.seed, sample),
                    owner=owner,
                    namespace=spec.namespace,
                    session_id=spec.session_id,
                    stop=sampling.stop,
                    match_limit=returns.logprob_start if returns.logprob_start >= 0 else None,
                    is_streamed=is_streamed,
                    keeps_output_when_retracted=is_streamed,
                    first_finish=first_finish,
                    transfer=spec.room,
                    times=Times(received=now),
                )
            )
    return sequences


def start_after_warm_up(core: Core, exchange: Exchange, request: GenerateRequest, go: Callable[[], None]) -> None:
    """Call ``go``, for several samples per prompt only after each prompt has been prefilled once."""
    if all(len(spec.rids) == 1 for spec in request.prompts):
        go()
        return

    def failed(finish: Finish) -> None:
        status = finish.status_code or 500
        exchange.respond(status, errors.object_error(finish.message, str(status), status))

    warm_up = WarmUp(core, exchange, go, failed)
    source = TokenSource(0, (), None, 0)
    sequences = [
        Sequence(fresh_rid(), spec.prompt, 0, source, warm_up, spec.namespace, spec.session_id, transfer=spec.room)
        for spec in request.prompts
    ]
    warm_up.start(sequences, request.dp_rank)


def handle_generate(core: Core, faults: FaultRunner, exchange: Exchange) -> None:
    """Answer a ``/generate`` request."""
    request = exchange.request
    route = f"{request.method} {request.path}"
    is_stream = False
    try:
        raw = load_object(request.body, request.header(b"content-type"))
        check_types(raw)
        is_stream = wants_stream(raw)
        parsed = parse_generate(raw, core.options)
    except errors.BodyError as exc:
        exchange.respond(400, errors.body_error(exc.message, route))
        return
    except errors.SchemaError as exc:
        exchange.respond(400, errors.schema_error(exc.message))
        return
    except errors.InvalidRequest as exc:
        _refuse(exchange, exc.message, is_stream=is_stream)
        return
    entry = exchange.entry
    entry.stream = is_stream
    entry.rids = [rid for spec in parsed.prompts for rid in spec.rids]
    if is_stream:
        start_after_warm_up(core, exchange, parsed, lambda: _start_stream(core, faults, exchange, parsed))
    else:
        start_after_warm_up(core, exchange, parsed, lambda: _start_unary(core, faults, exchange, parsed))


def _start_unary(core: Core, faults: FaultRunner, exchange: Exchange, request: GenerateRequest) -> None:
    generation = UnaryGeneration(core, exchange, lambda done: _answer_unary(core, faults, exchange, request, done))
    sequences = make_sequences(core, request.prompts, generation, is_streamed=False)
    try:
        generation.start(sequences, request.dp_rank)
    except DuplicateRequest as exc:
        _refuse(exchange, str(exc), is_stream=False)
        return
    exchange.entry.dp_rank = sequences[0].rank


def _answer_unary(
    core: Core, faults: FaultRunner, exchange: Exchange, request: GenerateRequest, sequences: Seq[Sequence]
) -> None:
    exchange.entry.dp_rank = sequences[0].rank
    for sequence in sequences:
        finish = sequence.finish
        if finish is not None and finish.status_code is not None and finish.status_code > 400:
            body = errors.object_error(finish.message, str(finish.status_code), finish.status_code)
            exchange.respond(finish.status_code, body)
            return
    context, now = answer_context(core), core.timers.now()
    returns = _returns_of(request)
    answers = [
        answer(sequence, returns[index], context, Sent(), is_delta=False, now=now)
        for index, sequence in enumerate(sequences)
    ]
    body = orjson.dumps(answers if request.is_list else answers[0], option=orjson.OPT_SERIALIZE_NUMPY)
    faults.answer_unary(exchange, 200, body, "application/json")


class _NativeRenderer:
    """Events of a native stream."""

    def __init__(self, core: Core, request: GenerateRequest) -> None:
        self._core = core
        self._context = answer_context(core)
        self._returns = _returns_of(request)
        self._sent = [Sent() for _ in self._returns]
        self._has_index = request.is_list
        self._is_delta = core.options.incremental_streaming_output

    def events(self, index: int, sequence: Sequence) -> Seq[bytes]:
        """Return one event with the state, or the news, of ``sequence``."""
        sent = self._sent[index]
        now = self._core.timers.now()
        shown = answer(sequence, self._returns[index], self._context, sent, is_delta=self._is_delta, now=now)
        if self._has_index:
            shown["index"] = index
        return (b"data: %b\n\n" % orjson.dumps(shown, option=orjson.OPT_SERIALIZE_NUMPY),)

    def ending(self) -> Seq[bytes]:
        """Return nothing: every sequence has had its last event."""
        return ()


def _start_stream(core: Core, faults: FaultRunner, exchange: Exchange, request: GenerateRequest) -> None:
    generation = StreamGeneration(core, exchange, EventWriter(exchange, faults), _NativeRenderer(core, request))
    sequences = make_sequences(core, request.prompts, generation, is_streamed=True)
    try:
        generation.start(sequences, request.dp_rank)
    except DuplicateRequest as exc:
        _refuse(exchange, str(exc), is_stream=True)
        return
    exchange.entry.dp_rank = sequences[0].rank
    exchange.start_stream()


def _refuse(exchange: Exchange, message: str, *, is_stream: bool) -> None:
    if not is_stream:
        exchange.respond(400, errors.value_error(message))
        return
    exchange.start_stream()
    exchange.send_event(errors.stream_error(message))
    exchange.send_event(_DONE)
    exchange.finish_stream()


def _returns_of(request: GenerateRequest) -> list[Returns]:
    return [spec.returns for spec in request.prompts for _ in spec.rids]


def _bad_grammar(message: str) -> Finish:
    return Finish(FinishKind.ABORT, message=message, status_code=400, err_type="BadRequestError")

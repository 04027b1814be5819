"""The generation routes: completions, chat, and token in, token out."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from simulator.exchange import Exchange
from simulator.faulting import EventWriter, FaultRunner
from simulator.generation import Renderer, StreamGeneration, UnaryGeneration
from simulator.options import EngineOptions
from simulator.sequence import Sequence, Times
from simulator.text import TokenSource
from simulator.vllm import answer, errors, request, stream
from simulator.vllm.answer import Context
from simulator.vllm.engine import VllmCore, fresh_id
from simulator.vllm.fields import load_body
from simulator.vllm.keepalive import KeepAlive
from simulator.vllm.request import VllmRequest

Parse = Callable[[dict[str, Any], str, EngineOptions, int], VllmRequest]
Body = Callable[[VllmRequest, Seq[Sequence], Context], bytes]


def context_of(core: VllmCore) -> Context:
    """Return what answers need to know about the engine."""
    options = core.options
    ranks = f"dp{options.dp_size}-" if options.dp_size > 1 else ""
    fingerprint = f"vllm-{options.version}-{ranks}5170a7ed"
    return Context(fingerprint, options.vocab_size, core.weight_version, int(time.time()))


def given_id(exchange: Exchange, raw: dict[str, Any]) -> str:
    """Return the id of a request without its prefix: the header's, else the body's, else a new one."""
    name = exchange.request.header(b"x-request-id")
    if name is None:
        inside = raw.get("request_id")
        name = inside if isinstance(inside, str) else None
    return name or fresh_id()


def rank_of(exchange: Exchange, options: EngineOptions) -> int | None:
    """Return the rank that the header asks for; what is no number is ignored.

    Raises:
        RequestError: There is no such rank.
    """
    try:
        rank = int(exchange.request.header(b"x-data-parallel-rank") or "")
    except ValueError:
        return None
    if not 0 <= rank < options.dp_size:
        raise errors.RequestError(f"data_parallel_rank {rank} is out of range [0, {options.dp_size}).")
    return rank


def make_sequences(core: VllmCore, parsed: VllmRequest, owner: Any, *, is_streamed: bool) -> list[Sequence]:
    """Return the sequences of a request, all samples of a prompt next to each other."""
    now, sampling = core.timers.now(), parsed.sampling
    sequences: list[Sequence] = []
    for name, prompt, limit in zip(parsed.names, parsed.prompts, parsed.limits, strict=True):
        internal = f"{name}-{fresh_id()[:8]}"
        sequences += [
            Sequence(
                rid=internal if sampling.n == 1 else f"{sample}_{internal}",
                name=name,
                prompt=prompt,
                max_new_tokens=limit,
                source=TokenSource(core.options.seed, prompt, sampling.seed, sample),
                owner=owner,
                namespace=parsed.namespace,
                session_id=parsed.session_id,
                transfer=parsed.transfer,
                stop=sampling.stop,
                match_limit=None if sampling.prompt_logprobs is None else 0,
                is_streamed=is_streamed,
                times=Times(received=now),
            )
            for sample in range(sampling.n)
        ]
    return sequences


def start_unary(
    core: VllmCore,
    faults: FaultRunner,
    exchange: Exchange,
    parsed: VllmRequest,
    rank: int | None,
    body: Callable[[Seq[Sequence]], bytes],
) -> None:
    """Generate, then answer with ``body`` or with the engine's error."""

    def done(sequences: Seq[Sequence]) -> None:
        exchange.entry.dp_rank = sequences[0].rank
        if not is_refused(exchange, sequences):
            faults.answer_unary(exchange, 200, body(sequences), "application/json")

    generation = UnaryGeneration(core, exchange, done)
    sequences = make_sequences(core, parsed, generation, is_streamed=False)
    generation.start(sequences, rank)
    exchange.entry.dp_rank = sequences[0].rank


def start_stream(
    core: VllmCore,
    faults: FaultRunner,
    exchange: Exchange,
    parsed: VllmRequest,
    rank: int | None,
    renderer: Renderer,
    *,
    last: bytes | None = b"data: [DONE]\n\n",
) -> Seq[Sequence]:
    """Generate and stream; the head goes out at once, before any output. Returns the sequences."""
    writer = EventWriter(exchange, faults)
    generation = StreamGeneration(core, exchange, writer, renderer)
    generation.last = last
    sequences = make_sequences(core, parsed, generation, is_streamed=True)
    generation.start(sequences, rank)
    exchange.entry.dp_rank = sequences[0].rank
    if not is_refused(exchange, sequences):
        exchange.start_stream()
        if core.options.sse_keepalive_interval_s:
            KeepAlive(core, exchange, writer)
    return sequences


def is_refused(exchange: Exchange, sequences: Seq[Sequence]) -> bool:
    """Answer with the error of a sequence that the engine ended, if there is one."""
    for sequence in sequences:
        finish = sequence.finish
        if finish is not None and finish.status_code is not None:
            exchange.respond(finish.status_code, errors.failure_body(finish.message, finish.status_code))
            return True
    return False


def note_request(exchange: Exchange, parsed: VllmRequest) -> None:
    """Put into the log what the body said."""
    entry = exchange.entry
    entry.model = parsed.model
    entry.stream = parsed.stream
    entry.rids = list(parsed.names)


def _handle(
    core: VllmCore,
    faults: FaultRunner,
    exchange: Exchange,
    parse: Parse,
    body: Body,
    make_renderer: Callable[[VllmRequest, Context], stream.VllmRenderer],
) -> None:
    raw: dict[str, Any] = {}
    try:
        raw = load_body(exchange.request.body, exchange.request.header(b"content-type"))
        parsed = parse(raw, given_id(exchange, raw), core.options, core.context_tokens)
        rank = rank_of(exchange, core.options)
    except errors.RequestError as exc:
        core.release_remote(raw.get("kv_transfer_params"))
        exchange.respond(exc.status, exc.body)
        return
    note_request(exchange, parsed)
    context = context_of(core)
    if parsed.stream:
        renderer = make_renderer(parsed, context)
        renderer.sequences = start_stream(core, faults, exchange, parsed, rank, renderer)
    else:
        start_unary(core, faults, exchange, parsed, rank, lambda sequences: body(parsed, sequences, context))


def handle_completions(core: VllmCore, faults: FaultRunner, exchange: Exchange) -> None:
    """Answer ``/v1/completions``."""
    _handle(core, faults, exchange, request.parse_completion, answer.completion_body, stream.CompletionRenderer)


def handle_chat(core: VllmCore, faults: FaultRunner, exchange: Exchange) -> None:
    """Answer ``/v1/chat/completions``."""
    _handle(core, faults, exchange, request.parse_chat, answer.chat_body, stream.ChatRenderer)


def handle_generate(core: VllmCore, faults: FaultRunner, exchange: Exchange) -> None:
    """Answer ``/inference/v1/generate``."""
    _handle(core, faults, exchange, request.parse_generate, answer.generate_body, stream.GenerateRenderer)

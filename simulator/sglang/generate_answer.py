"""Shape of native answers: one dictionary per sequence, keys in the real server's order.

Pure: the clock's offset comes in with ``Context``.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from simulator.sequence import Finish, FinishKind, Sequence
from simulator.sglang.generate_request import Returns
from simulator.text import decode, flat_top_logprobs, logprob, top_logprobs


@dataclass(frozen=True, slots=True)
class Context:
    """What is the same for all answers of one engine.

    ``epoch_offset_s`` plus a monotonic time gives Unix time.
    """

    weight_version: str
    has_ranks: bool
    vocab_size: int
    epoch_offset_s: float
    is_decode: bool = False
    """The answers of a pair's decode half lack what its prefill half knows."""


@dataclass(slots=True)
class Sent:
    """What of a streamed sequence has gone out, for deltas."""

    tokens: int = 0
    characters: int = 0
    is_started: bool = False
    inputs: dict[str, Any] | None = field(default=None)


def finish_reason(finish: Finish | None, produced: int) -> dict[str, Any] | None:
    """Return SGLang's ``finish_reason`` object."""
    if finish is None:
        return None
    if finish.kind is FinishKind.LENGTH:
        return {"type": "length", "length": produced if finish.length is None else finish.length}
    if finish.kind is FinishKind.STOP:
        return {"type": "stop", "matched": finish.matched}
    if finish.is_short:
        if finish.status_code is None:
            return {"type": "abort", "message": finish.message}
        return {"type": "abort", "status_code": finish.status_code, "message": finish.message}
    return {
        "type": "abort",
        "message": finish.message,
        "status_code": finish.status_code,
        "err_type": finish.err_type,
    }


def answer(sequence: Sequence, returns: Returns, context: Context, sent: Sent, *, is_delta: bool, now: float) -> Any:
    """Return the answer or the event of ``sequence`` as it stands, and note in ``sent`` what it holds.

    Args:
        sequence: Streamed or finished sequence.
        returns: What the caller asked for.
        context: The engine.
        sent: What went out before; changed.
        is_delta: Text, ids and output log-probabilities since ``sent`` instead of all of them.
        now: Monotonic seconds.
    """
    finish = sequence.finish
    produced = len(sequence.output)
    start = sent.tokens if is_delta else 0
    text = sequence.text[sent.characters :] if is_delta else sequence.text
    ids = sequence.output[start:] if start else sequence.output
    if finish is not None and finish.is_short:
        if is_delta and sent.tokens:
            # A queued request that had output repeats its last id and its whole text.
            ids, text, start = sequence.output[-1:], sequence.text, produced - 1
        meta = _short_meta(sequence, returns, context, sent, start, now)
    else:
        meta = _meta(sequence, returns, context, sent, start, now)
    sent.tokens = produced
    sent.characters = len(sequence.text)
    sent.is_started = True
    shown: dict[str, Any] = {"text": text, "output_ids": ids, "meta_info": meta}
    if returns.prompt_token_ids:
        shown["prompt_token_ids"] = sequence.prompt
    return shown


def _meta(s: Sequence, returns: Returns, context: Context, sent: Sent, start: int, now: float) -> dict[str, Any]:
    times, offset = s.times, context.epoch_offset_s
    produced = len(s.output)
    meta: dict[str, Any] = {
        "id": s.rid,
        "finish_reason": finish_reason(s.finish, produced),
        "prompt_tokens": len(s.prompt),
        "weight_version": context.weight_version,
        "num_retractions": s.retractions,
    }
    if times.started:
        if not context.is_decode:
            meta |= {"storage_prefetch_wait": 0.0, "storage_staging_wait": 0.0}
        meta["forward_entry_time"] = offset + times.started
        if not context.is_decode:
            meta["prefill_finished_time"] = offset + (times.prefilled or times.first_token)
    meta["queue_time"] = times.started - times.queued if times.started > times.queued else 0.0
    if returns.logprob:
        _add_logprobs(meta, s, returns, context, sent, start)
    meta["reasoning_tokens"] = 0
    meta["completion_tokens"] = produced
    meta["cached_tokens"] = s.cached_tokens
    if s.finish is not None:
        meta["weight_versions"] = [{"version": context.weight_version, "start": 0, "end": produced}]
    meta["cached_tokens_details"] = {"device": s.cached_tokens, "host": 0} if s.cached_tokens else None
    meta["dp_rank"] = s.rank if context.has_ranks else None
    if s.finish is None:
        if not sent.is_started:
            times.first_sent = now
            meta["response_sent_to_client_ts"] = offset + now
        return meta
    latency = times.finished - times.received
    meta["e2e_latency"] = latency
    meta["request_received_ts"] = offset + times.received
    meta["first_token_latency"] = (times.first_token or times.finished) - times.received
    meta["api_server_dispatch_finish_ts"] = offset + times.dispatched
    if sent.is_started:
        meta["response_sent_to_client_ts"] = offset + times.first_sent
    meta["request_finished_ts"] = offset + times.finished
    if produced > 1:
        meta["decode_throughput"] = (produced - 1) / max(times.finished - times.first_token, 1e-6)
    if not sent.is_started:
        meta["response_sent_to_client_ts"] = offset + now
    return meta


def _short_meta(s: Sequence, returns: Returns, context: Context, sent: Sent, start: int, now: float) -> dict[str, Any]:
    produced = len(s.output)
    meta: dict[str, Any] = {
        "id": s.rid,
        "finish_reason": finish_reason(s.finish, produced),
        "weight_version": context.weight_version,
        "e2e_latency": s.times.finished - s.times.received,
        "weight_versions": [{"version": context.weight_version, "start": 0, "end": produced}],
    }
    if returns.logprob:
        text = returns.text_in_logprobs
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = _chosen(s.output[start:], len(s.prompt) + start, with_text=text)
        meta["output_token_logprobs_length"] = produced
    meta["completion_tokens"] = produced
    if not sent.is_started:
        meta["response_sent_to_client_ts"] = context.epoch_offset_s + now
    return meta


def _add_logprobs(
    meta: dict[str, Any], s: Sequence, returns: Returns, context: Context, sent: Sent, start: int
) -> None:
    text = returns.text_in_logprobs
    if sent.inputs is None:
        sent.inputs = _input_logprobs(s, returns, context)
    inputs = sent.inputs
    new = s.output[start:] if start else s.output
    first = len(s.prompt) + start
    meta["input_token_logprobs"] = inputs["token"]
    meta["output_token_logprobs"] = _chosen(new, first, with_text=text)
    meta["output_token_logprobs_length"] = len(s.output)
    count = returns.top_logprobs
    if count:
        meta.update(inputs["top"])
        if returns.flat_output and s.finish is not None:
            meta.update(_flat("output", new, first, returns, context, null_prefix=0))
        else:
            meta["output_top_logprobs"] = [
                _tops(token, first + i, count, context, with_text=text) for i, token in enumerate(new)
            ]
    if returns.token_ids_logprob:
        meta["input_token_ids_logprobs"] = inputs["ids"]
        meta["output_token_ids_logprobs"] = [_asked(returns, first + i) for i in range(len(new))]


def _input_logprobs(s: Sequence, returns: Returns, context: Context) -> dict[str, Any]:
    start = returns.logprob_start
    tokens: Seq[int] = s.prompt[start:] if start >= 0 else ()
    text = returns.text_in_logprobs
    rows = _chosen(tokens, max(0, start), with_text=text)
    if rows:
        # The first prompt token was predicted by nothing.
        rows[0] = (None, *rows[0][1:])
    first = max(0, start) + 1
    top: dict[str, Any] = {}
    count = returns.top_logprobs
    if returns.flat_input and tokens:
        top = _flat("input", tokens[1:], first, returns, context, null_prefix=1)
    elif count:
        nested: list[Any] = [_tops(t, first + i, count, context, with_text=text) for i, t in enumerate(tokens[1:])]
        top = {"input_top_logprobs": [None, *nested] if tokens else []}
    asked: list[Any] = [_asked(returns, first + i) for i in range(len(tokens) - 1)]
    return {"token": rows, "top": top, "ids": [None, *asked] if tokens else []}


def _chosen(tokens: Seq[int], first: int, *, with_text: bool) -> list[tuple[float | None, int, str | None]]:
    if not with_text:
        return [(logprob(token, first + i), token, None) for i, token in enumerate(tokens)]
    return [(logprob(token, first + i), token, decode((token,))) for i, token in enumerate(tokens)]


def _tops(token: int, position: int, count: int, context: Context, *, with_text: bool) -> list[Any]:
    rows = top_logprobs(token, position, count, context.vocab_size)
    return [(value, other, decode((other,)) if with_text else None) for value, other in rows]


def _asked(returns: Returns, position: int) -> list[Any]:
    return [(logprob(token, position), token, None) for token in returns.token_ids_logprob]


def _flat(
    side: str, tokens: Seq[int], first: int, returns: Returns, context: Context, *, null_prefix: int
) -> dict[str, Any]:
    values, ids = flat_top_logprobs(tokens, first, returns.top_logprobs, context.vocab_size)
    name = f"{side}_top_logprobs"
    flat: dict[str, Any]
    if returns.flat_base64:
        flat = {
            f"{name}_val_flat_b64": base64.b64encode(values.tobytes()).decode(),
            f"{name}_idx_flat_b64": base64.b64encode(ids.tobytes()).decode(),
            f"{name}_val_flat_b64_dtype": "float32",
            f"{name}_idx_flat_b64_dtype": "int32",
        }
    else:
        # Doubles, since the real server prints the float32 values with all digits of a double.
        flat = {f"{name}_val_flat": values.ravel().astype("float64"), f"{name}_idx_flat": ids.ravel()}
    flat[f"{name}_shape"] = [len(tokens), returns.top_logprobs]
    flat[f"{name}_null_prefix"] = null_prefix
    return flat

"""Shape of unary answers, and the parts that streams share with them. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import orjson

from simulator.sequence import FinishKind, Sequence
from simulator.text import decode, logprob, token_bytes, top_logprobs
from simulator.vllm.request import VllmRequest


@dataclass(frozen=True, slots=True)
class Context:
    """What answers need to know about the engine."""

    fingerprint: str
    vocab_size: int
    weight_version: str
    created: int


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Return the three counts that every usage begins with."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }


def total_usage(request: VllmRequest, sequences: Seq[Sequence]) -> dict[str, Any]:
    """Return the counts of the whole request; a prompt counts once for all its samples."""
    return usage(sum(map(len, request.prompts)), sum(len(s.output) for s in sequences))


def finish_reason(sequence: Sequence) -> str | None:
    """Return why the sequence ended, ``None`` while it has not."""
    return None if sequence.finish is None else sequence.finish.kind.value


def stop_reason(sequence: Sequence) -> int | str | None:
    """Return the stop string or token that ended the sequence."""
    finish = sequence.finish
    return finish.matched if finish is not None and finish.kind is FinishKind.STOP else None


def weight_versions(sequence: Sequence, context: Context) -> list[dict[str, Any]]:
    """Return which weights made which tokens; nothing where there are none."""
    if not sequence.output:
        return []
    return [{"version": context.weight_version, "start": 0, "end": len(sequence.output)}]


def _unary_usage(request: VllmRequest, sequences: Seq[Sequence], created_cache_tokens: int | None) -> dict[str, Any]:
    # The cached tokens of a batch are those of its last prompt, as in the real server.
    cached = sequences[-request.sampling.n].cached_tokens
    return {
        **total_usage(request, sequences),
        "prompt_tokens_details": {
            "cached_tokens": cached,
            "created_cache_tokens": created_cache_tokens,
            "multimodal_tokens": None,
        },
        "completion_tokens_details": None,
    }


def _shown(request: VllmRequest, token: int) -> str:
    return f"token_id:{token}" if request.as_token_ids else decode((token,))


# -- log-probabilities -----------------------------------------------------------------------------


def _tops(
    request: VllmRequest, token: int, position: int, count: int, context: Context
) -> list[tuple[float, int, int]]:
    """Return what is told beside an output token: log-probability, id and rank of each, its own first."""
    ids = request.sampling.logprob_ids
    if ids is None:
        tops = top_logprobs(token, position, count, context.vocab_size)
        return [(value, other, rank) for rank, (value, other) in enumerate(tops, 1)]
    # As the real server has it, the rank of one that was asked for is its place in the list.
    ranks = {token: 1, **{other: rank for rank, other in enumerate(ids, 1)}}
    return [(logprob(other, position), other, rank) for other, rank in ranks.items()]


def chat_logprobs(request: VllmRequest, s: Sequence, start: int, context: Context) -> dict[str, Any] | None:
    """Return the log-probabilities of the output tokens from ``start`` on, in chat's form."""
    count = request.sampling.logprobs
    if count is None:
        return None
    content = []
    for offset, token in enumerate(s.output[start:]):
        position = len(s.prompt) + start + offset
        tops = _tops(request, token, position, count, context)
        entry = _chat_entry(request, token, logprob(token, position))
        entry["top_logprobs"] = [_chat_entry(request, other, value) for value, other, _ in tops]
        content.append(entry)
    return {"content": content}


def _chat_entry(request: VllmRequest, token: int, value: float) -> dict[str, Any]:
    shown = _shown(request, token)
    raw = shown.encode() if request.as_token_ids else token_bytes(token)
    return {"token": shown, "logprob": value, "bytes": list(raw)}


def completion_logprobs(
    request: VllmRequest, s: Sequence, start: int, context: Context, *, offset: int = 0, with_prompt: bool = False
) -> tuple[dict[str, Any] | None, int]:
    """Return the log-probabilities from output token ``start`` on, and the text offset behind them.

    Args:
        request: The request.
        s: Its sequence.
        start: First output token.
        context: The engine.
        offset: Text offset of the first token.
        with_prompt: Put the prompt's tokens in front.
    """
    count = request.sampling.logprobs
    if count is None:
        return None, offset
    tokens, first = s.output[start:], len(s.prompt) + start
    if with_prompt:
        tokens, first = [*s.prompt, *tokens], 0
    offsets: list[int] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    texts = [_shown(request, token) for token in tokens]
    for index, token in enumerate(tokens):
        offsets.append(offset)
        offset += len(texts[index])
        if with_prompt and not index:
            values.append(None)
            tops.append(None)
            continue
        values.append(logprob(token, first + index))
        if with_prompt and index < len(s.prompt):
            likeliest = top_logprobs(token, index, max(count, 1), context.vocab_size)
        else:
            told = _tops(request, token, first + index, max(count, 1), context)
            likeliest = [(value, other) for value, other, _ in told]
        tops.append({_shown(request, other): value for value, other in likeliest})
    return {"text_offset": offsets, "token_logprobs": values, "tokens": texts, "top_logprobs": tops}, offset


def generate_logprobs(request: VllmRequest, s: Sequence, start: int, context: Context) -> dict[str, Any] | None:
    """Return the log-probabilities of the output tokens from ``start`` on, in the token route's form."""
    count = request.sampling.logprobs
    if count is None:
        return None
    content = []
    for offset, token in enumerate(s.output[start:]):
        position = len(s.prompt) + start + offset
        tops = _tops(request, token, position, max(count, 1), context)[: max(count, 1)]
        shown = [{"token_id": other, "logprob": value, "rank": rank} for value, other, rank in tops]
        content.append({**shown[0], "top_logprobs": shown})
    return {"content": content}


def prompt_logprobs(request: VllmRequest, prompt: Seq[int], context: Context) -> list[dict[str, Any] | None] | None:
    """Return the log-probabilities of a prompt, keyed by token id; its first token has none."""
    count = request.sampling.prompt_logprobs
    if count is None:
        return None
    found: list[dict[str, Any] | None] = [None]
    for position, token in enumerate(prompt[1:], 1):
        tops = top_logprobs(token, position, max(count, 1), context.vocab_size)
        found.append(
            {
                str(other): {"logprob": value, "rank": rank, "decoded_token": decode((other,))}
                for rank, (value, other) in enumerate(tops, 1)
            }
        )
    return found


# -- unary bodies ----------------------------------------------------------------------------------


def completion_body(request: VllmRequest, sequences: Seq[Sequence], context: Context) -> bytes:
    """Return the body of a finished ``/v1/completions``."""
    choices = []
    for index, sequence in enumerate(sequences):
        prompt_index = index // request.sampling.n
        echoed = request.prompt_texts[prompt_index] if request.echo else ""
        logprobs, _ = completion_logprobs(request, sequence, 0, context, with_prompt=request.echo)
        choices.append(
            {
                "index": index,
                "text": echoed + sequence.text,
                "logprobs": logprobs,
                "finish_reason": finish_reason(sequence),
                "stop_reason": stop_reason(sequence),
                "token_ids": sequence.output if request.return_token_ids else None,
                "prompt_logprobs": prompt_logprobs(request, sequence.prompt, context),
                "prompt_token_ids": sequence.prompt if request.return_token_ids else None,
                "routed_experts": None,
            }
        )
    return orjson.dumps(
        {
            "id": request.answer_id,
            "object": "text_completion",
            "created": context.created,
            "model": request.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": context.fingerprint,
            "usage": _unary_usage(request, sequences, None),
            "kv_transfer_params": sequences[-1].transfer_result,
            "ec_transfer_params": None,
            "metrics": None,
        }
    )


def chat_body(request: VllmRequest, sequences: Seq[Sequence], context: Context) -> bytes:
    """Return the body of a finished ``/v1/chat/completions``."""
    choices = [
        {
            "index": index,
            "message": {
                "role": "assistant",
                "content": sequence.text,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            },
            "logprobs": chat_logprobs(request, sequence, 0, context),
            "finish_reason": finish_reason(sequence),
            "stop_reason": stop_reason(sequence),
            "token_ids": sequence.output if request.return_token_ids else None,
            "routed_experts": None,
        }
        for index, sequence in enumerate(sequences)
    ]
    prompt = request.prompts[0]
    return orjson.dumps(
        {
            "id": request.answer_id,
            "object": "chat.completion",
            "created": context.created,
            "model": request.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": context.fingerprint,
            "usage": _unary_usage(request, sequences, 0),
            "prompt_logprobs": prompt_logprobs(request, prompt, context),
            "prompt_token_ids": prompt if request.return_token_ids else None,
            "prompt_text": None,
            "kv_transfer_params": sequences[-1].transfer_result,
            "ec_transfer_params": None,
            "metrics": None,
        }
    )


def generate_choice(
    request: VllmRequest, index: int, sequence: Sequence, start: int, text: str, context: Context
) -> dict[str, Any]:
    """Return a choice of the token route with the tokens from ``start`` on; its text only in text mode."""
    ended = sequence.finish is not None
    choice: dict[str, Any] = {
        "index": index,
        "finish_reason": finish_reason(sequence),
        "stop_reason": stop_reason(sequence),
        "token_ids": sequence.output[start:],
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": weight_versions(sequence, context) if ended else None,
    }
    if request.output_mode == "text":
        choice["text"] = text
    choice["logprobs"] = generate_logprobs(request, sequence, start, context)
    return choice


def generate_body(request: VllmRequest, sequences: Seq[Sequence], context: Context) -> bytes:
    """Return the body of a finished ``/inference/v1/generate``."""
    prompt = request.prompts[0]
    return orjson.dumps(
        {
            "request_id": request.answer_id,
            "model": request.model,
            "created": context.created,
            "usage": _unary_usage(request, sequences, None),
            "prompt_logprobs": prompt_logprobs(request, prompt, context),
            "prompt_token_id_logprobs": None,
            "prompt_token_ids": prompt if request.return_token_ids else None,
            "mm_placeholders": None,
            "metrics": None,
            "kv_transfer_params": sequences[-1].transfer_result,
            "ec_transfer_params": None,
            "output_mode": request.output_mode,
            "choices": [generate_choice(request, i, s, 0, s.text, context) for i, s in enumerate(sequences)],
        }
    )

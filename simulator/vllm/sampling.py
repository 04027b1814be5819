"""Checking the sampling parameters, which all generation routes share. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simulator.sequence import NO_STOP, StopRule
from simulator.vllm.errors import RequestError, invalid, refused_value

MAX_LOGPROBS = 20
MAX_LOGPROB_IDS = 128


@dataclass(frozen=True, slots=True)
class Sampling:
    """What the simulated model does with sampling parameters; the others are checked and ignored."""

    max_tokens: int | None
    """``None``: as many as the context has room for."""
    n: int
    seed: int | None
    stop: StopRule
    held_back: int
    """Characters that a stream keeps until the end, since a stop string may begin with them."""
    logprobs: int | None
    prompt_logprobs: int | None
    logprob_ids: tuple[int, ...] | None = None
    """Tokens whose log-probabilities are told in place of the likeliest ones'."""


def parse_sampling(fields: Mapping[str, Any], raw: Mapping[str, Any], *, logprobs: int | None) -> Sampling:
    """Check parameters.

    Args:
        fields: What passed the schema check.
        raw: The object that they came from, for the lists in it.
        logprobs: Log-probabilities per output token; ``None`` means none are wanted.

    Raises:
        RequestError: A value is refused.
    """
    _check_ranges(fields)
    prompt_logprobs = fields.get("prompt_logprobs")
    for name, kind, count in (("logprobs", "sample", logprobs), ("prompt_logprobs", "prompt", prompt_logprobs)):
        if count is not None and count > MAX_LOGPROBS:
            message = f"Requested {kind} logprobs of {count}, which is greater than max allowed: {MAX_LOGPROBS}"
            raise refused_value(message, name, count)
        if count is not None and count < -1:
            raise refused_value(f"{name} must be non-negative or -1, got {count}.", name, count)
    _check_grammar(fields.get("structured_outputs"))
    stop = _stop_rule(fields, raw)
    keeps = not stop.strings or stop.keep_text
    return Sampling(
        max_tokens=fields.get("max_tokens"),
        n=fields.get("n", 1),
        seed=fields.get("seed"),
        stop=stop,
        held_back=0 if keeps else max(map(len, stop.strings)) - 1,
        logprobs=MAX_LOGPROBS if logprobs == -1 else logprobs,
        prompt_logprobs=MAX_LOGPROBS if prompt_logprobs == -1 else prompt_logprobs,
    )


def parse_logprob_ids(raw: Mapping[str, Any], vocab_size: int) -> tuple[int, ...] | None:
    """Return ``logprob_token_ids``, ``None`` if there are none; what goes with them differs by route.

    Raises:
        RequestError: They are no list of tokens, or too many.
    """
    name = "logprob_token_ids"
    ids = raw.get(name)
    if ids is None:
        return None
    if not (isinstance(ids, list) and all(type(item) is int for item in ids)):
        raise invalid("list_type", f"body.{name}", "Input should be a valid list", ids)
    if len(ids) > MAX_LOGPROB_IDS:
        message = f"Requested {name} of length {len(ids)}, which is greater than max allowed: {MAX_LOGPROB_IDS}"
        raise refused_value(message, name, len(ids))
    outside = [item for item in ids if not 0 <= item < vocab_size]
    if outside:
        message = f"token_id(s) {outside} in {name} contain out-of-vocab token ids. Vocabulary size: {vocab_size}"
        raise refused_value(message, name, outside)
    return tuple(ids)


def _check_ranges(fields: Mapping[str, Any]) -> None:
    temperature = fields.get("temperature", 1.0)
    if not math.isfinite(temperature) or temperature < 0:
        raise refused_value(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
    n = fields.get("n", 1)
    if n < 1:
        raise RequestError(f"n must be at least 1, got {n}.")
    if n > 1 and temperature == 0:
        raise RequestError(f"n must be 1 when using greedy sampling, got {n}.")
    top_p = fields.get("top_p", 1.0)
    if not 0 < top_p <= 1:
        raise refused_value(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    top_k = fields.get("top_k", 0)
    if top_k < -1:
        raise refused_value(f"top_k must be 0 (disable), or at least 1, got {top_k}.", "top_k", top_k)
    limit = fields.get("max_tokens")
    if limit is not None and limit < 1:
        raise refused_value(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
    least = fields.get("min_tokens", 0)
    if least < 0 or (limit is not None and least > limit):
        raise RequestError(f"min_tokens must be between 0 and max_tokens={limit}, got {least}.")
    for name in ("frequency_penalty", "presence_penalty"):
        value = fields.get(name, 0.0)
        if not -2 <= value <= 2:
            raise refused_value(f"{name} must be in [-2, 2], got {value}.", name, value)


def _stop_rule(fields: Mapping[str, Any], raw: Mapping[str, Any]) -> StopRule:
    stop, ids = raw.get("stop"), raw.get("stop_token_ids")
    if isinstance(stop, str):
        stop = [stop]
    if stop is not None and not (isinstance(stop, list) and all(isinstance(item, str) for item in stop)):
        raise invalid("list_type", "body.stop", "Input should be a valid list", stop)
    if ids is not None and not (isinstance(ids, list) and all(type(item) is int for item in ids)):
        raise invalid("list_type", "body.stop_token_ids", "Input should be a valid list", ids)
    if not stop and not ids:
        return NO_STOP
    if stop and not all(stop):
        raise RequestError("stop cannot contain an empty string.")
    keep = bool(fields.get("include_stop_str_in_output"))
    return StopRule(tuple(stop or ()), frozenset(ids or ()), fields.get("min_tokens", 0), keep)


def _check_grammar(structured: Any) -> None:
    schema = (structured or {}).get("json")
    if not isinstance(schema, str):
        return
    try:
        json.loads(schema)
    except ValueError as exc:
        raise RequestError("Invalid JSON grammar specification.") from exc

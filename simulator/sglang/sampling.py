"""Reading and checking ``sampling_params``. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simulator.sequence import NO_STOP, StopRule
from simulator.sglang.errors import InvalidRequest, SchemaError

_INTEGER, _FLOAT, _BOOLEAN, _ANY = "i64", "f64", "a boolean", ""
# The order is that of the real server's error message.
_FIELDS: dict[str, str] = {
    "max_new_tokens": _INTEGER,
    "stop": _ANY,
    "stop_token_ids": _ANY,
    "stop_regex": _ANY,
    "temperature": _FLOAT,
    "top_p": _FLOAT,
    "top_k": _INTEGER,
    "min_p": _FLOAT,
    "frequency_penalty": _FLOAT,
    "presence_penalty": _FLOAT,
    "repetition_penalty": _FLOAT,
    "min_new_tokens": _INTEGER,
    "n": _INTEGER,
    "json_schema": _ANY,
    "regex": _ANY,
    "ebnf": _ANY,
    "structural_tag": _ANY,
    "ignore_eos": _BOOLEAN,
    "skip_special_tokens": _BOOLEAN,
    "spaces_between_special_tokens": _BOOLEAN,
    "no_stop_trim": _BOOLEAN,
    "stream_interval": _INTEGER,
    "logit_bias": _ANY,
    "sampling_seed": _INTEGER,
    "custom_params": _ANY,
    "beam_width": _INTEGER,
    "watermark": _ANY,
    "choice": _ANY,
}
_CONSTRAINTS = ("json_schema", "regex", "ebnf", "structural_tag")


@dataclass(frozen=True, slots=True)
class Sampling:
    """What the simulated model does with sampling parameters; the others are checked and ignored."""

    max_new_tokens: int | None = 128
    """``None``: as many as the context has room for."""
    stop: StopRule = NO_STOP
    n: int = 1
    seed: int | None = None
    grammar_error: str | None = None


DEFAULT_SAMPLING = Sampling()


def parse_sampling(raw: Mapping[str, Any]) -> Sampling:
    """Read one ``sampling_params`` object.

    Raises:
        SchemaError: Unknown key or wrong type.
        InvalidRequest: A value out of range.
    """
    if not raw:
        return DEFAULT_SAMPLING
    for key, value in raw.items():
        if key not in _FIELDS:
            raise SchemaError(f"unknown field `{key}`, expected one of {', '.join(f'`{name}`' for name in _FIELDS)}")
        if value is not None:
            _check_type(_FIELDS[key], value)
    _check_ranges(raw)
    limit = raw.get("max_new_tokens", 128)
    return Sampling(
        max_new_tokens=128 if limit is None else int(limit),
        stop=_stop_rule(raw),
        n=max(1, raw.get("n") or 1),
        seed=raw.get("sampling_seed"),
        grammar_error=_grammar_error(raw.get("json_schema")),
    )


def _check_type(expected: str, value: Any) -> None:
    if not expected:
        return
    is_boolean = isinstance(value, bool)
    if expected == _BOOLEAN:
        fits = is_boolean
    elif expected == _INTEGER:
        fits = isinstance(value, int) and not is_boolean
    else:
        fits = isinstance(value, int | float) and not is_boolean
    if not fits:
        raise wrong_type(value, expected)


def wrong_type(value: Any, expected: str) -> SchemaError:
    """Return the schema gate's complaint about ``value``."""
    if isinstance(value, str):
        shown = f"string {json.dumps(value)}"
    elif isinstance(value, bool):
        shown = f"boolean `{str(value).lower()}`"
    elif isinstance(value, int):
        shown = f"integer `{value}`"
    elif isinstance(value, float):
        shown = f"floating point `{value}`"
    else:
        shown = "map" if isinstance(value, dict) else "sequence"
    return SchemaError(f"invalid type: {shown}, expected {expected}")


def _check_ranges(raw: Mapping[str, Any]) -> None:
    temperature = raw.get("temperature")
    if temperature is not None and not (math.isfinite(temperature) and temperature >= 0):
        raise InvalidRequest(f"temperature must be a non-negative finite number, got {temperature}.")
    top_p = raw.get("top_p")
    if top_p is not None and not 0 < top_p <= 1:
        raise InvalidRequest(f"top_p must be in (0, 1], got {top_p}.")
    top_k = raw.get("top_k")
    if top_k is not None and top_k != -1 and top_k < 1:
        raise InvalidRequest(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
    limit = raw.get("max_new_tokens")
    if limit is not None and limit < 0:
        raise InvalidRequest(f"max_new_tokens must be at least 0, got {limit}.")
    least = raw.get("min_new_tokens") or 0
    if least < 0 or (limit is not None and least > limit):
        raise InvalidRequest(f"min_new_tokens must be in [0, max_new_tokens], got {least}.")
    for name in ("frequency_penalty", "presence_penalty"):
        value = raw.get(name)
        if value is not None and not -2 <= value <= 2:
            raise InvalidRequest(f"{name} must be in [-2, 2], got {value}.")
    if sum(raw.get(name) is not None for name in _CONSTRAINTS) > 1:
        raise InvalidRequest("Only one of json_schema, regex, ebnf, or structural_tag can be set.")


def _stop_rule(raw: Mapping[str, Any]) -> StopRule:
    stop = raw.get("stop")
    ids = raw.get("stop_token_ids")
    if not stop and not ids:
        return NO_STOP
    if isinstance(stop, str):
        stop = [stop]
    strings = tuple(item for item in stop or () if isinstance(item, str) and item)
    return StopRule(strings, frozenset(ids or ()), raw.get("min_new_tokens") or 0, bool(raw.get("no_stop_trim")))


def _grammar_error(schema: Any) -> str | None:
    if not isinstance(schema, str):
        return None
    try:
        json.loads(schema)
    except ValueError as exc:
        return f"Failed to compile json grammar: {exc}"
    return None

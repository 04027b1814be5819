"""The schema check of request bodies: wrong types are refused, unknown fields are not looked at.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from simulator.vllm.errors import RequestError, invalid

_INTEGER, _NUMBER, _BOOLEAN, _TEXT, _OBJECT = "int", "float", "bool", "string", "dict"
_BASE: dict[str, str] = {
    "model": _TEXT,
    "request_id": _TEXT,
    "session_id": _TEXT,
    "cache_salt": _TEXT,
    "stream": _BOOLEAN,
    "stream_options": _OBJECT,
    "return_token_ids": _BOOLEAN,
    "kv_transfer_params": _OBJECT,
    "ec_transfer_params": _OBJECT,
    "priority": _INTEGER,
}
SAMPLING: dict[str, str] = {
    "n": _INTEGER,
    "max_tokens": _INTEGER,
    "min_tokens": _INTEGER,
    "seed": _INTEGER,
    "temperature": _NUMBER,
    "top_p": _NUMBER,
    "top_k": _INTEGER,
    "min_p": _NUMBER,
    "frequency_penalty": _NUMBER,
    "presence_penalty": _NUMBER,
    "repetition_penalty": _NUMBER,
    "ignore_eos": _BOOLEAN,
    "include_stop_str_in_output": _BOOLEAN,
    "structured_outputs": _OBJECT,
    "prompt_logprobs": _INTEGER,
}
COMPLETION = {**_BASE, **SAMPLING, "echo": _BOOLEAN, "logprobs": _INTEGER, "return_tokens_as_token_ids": _BOOLEAN}
CHAT = {
    **_BASE,
    **SAMPLING,
    "max_completion_tokens": _INTEGER,
    "logprobs": _BOOLEAN,
    "top_logprobs": _INTEGER,
    "return_tokens_as_token_ids": _BOOLEAN,
    "add_generation_prompt": _BOOLEAN,
}
GENERATE = dict(_BASE)
GENERATE_SAMPLING = {**SAMPLING, "logprobs": _INTEGER}

_MESSAGES = {
    _INTEGER: "Input should be a valid integer",
    _NUMBER: "Input should be a valid number",
    _BOOLEAN: "Input should be a valid boolean",
    _TEXT: "Input should be a valid string",
    _OBJECT: "Input should be a valid dictionary",
}
_PARSING = {
    _INTEGER: "unable to parse string as an integer",
    _NUMBER: "unable to parse string as a number",
    _BOOLEAN: "unable to interpret input",
}


def load_body(body: bytes, content_type: str | None) -> dict[str, Any]:
    """Read the object of a body.

    Raises:
        RequestError: There is none, or it is said to be something else.
    """
    if content_type is None or content_type.split(";")[0].strip().lower() != "application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise RequestError(message, None, "Bad Request")
    if not body:
        raise invalid("missing", "body", "Field required", None)
    try:
        raw = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        context = {"error": "Expecting value"}
        raise invalid("json_invalid", f"body.{exc.pos}", "JSON decode error", {}, context) from exc
    if not isinstance(raw, dict):
        raise invalid("model_attributes_type", "body", "Input should be a valid dictionary", raw)
    return raw


def check_fields(raw: Mapping[str, Any], fields: Mapping[str, str], location: str = "body") -> dict[str, Any]:
    """Return the known fields that are not null, with numbers and booleans read from strings.

    Raises:
        RequestError: A field has a wrong type.
    """
    return {
        name: _coerced(value, kind, f"{location}.{name}")
        for name, kind in fields.items()
        if (value := raw.get(name)) is not None
    }


def _coerced(value: Any, kind: str, location: str) -> Any:
    if kind in (_TEXT, _OBJECT):
        if isinstance(value, str if kind == _TEXT else dict):
            return value
        raise invalid(f"{kind}_type", location, _MESSAGES[kind], value)
    if kind == _BOOLEAN:
        found = {"true": True, "false": False, "1": True, "0": False}.get(str(value).lower())
        if found is not None and isinstance(value, bool | int | str):
            return found
    elif isinstance(value, str):
        try:
            return int(value) if kind == _INTEGER else float(value)
        except ValueError:
            pass
    elif isinstance(value, int | float) and (kind == _NUMBER or value == int(value)):
        return float(value) if kind == _NUMBER else int(value)
    if isinstance(value, str):
        raise invalid(f"{kind}_parsing", location, f"{_MESSAGES[kind]}, {_PARSING[kind]}", value)
    raise invalid(f"{kind}_type", location, _MESSAGES[kind], value)


def missing(raw: Mapping[str, Any], name: str) -> RequestError:
    """Return the error of a required field."""
    return invalid("missing", f"body.{name}", "Field required", raw)

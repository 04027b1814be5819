"""SGLang's error bodies: four shapes on the native route, others on the OpenAI ones.

Pure.
"""

from __future__ import annotations

import json
from typing import Any

import orjson


class RequestError(Exception):
    """A request that is refused; ``message`` is what the client reads."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class BodyError(RequestError):
    """The body does not parse or has a wrong type: a plain 400 even for streams."""


class SchemaError(RequestError):
    """The second gate, for sampling parameters and booleans: a 400 whose ``error`` is a string."""


class InvalidRequest(RequestError):
    """A value that is refused: 400 for a unary call, an event inside a 200 for a native stream."""


def body_error(message: str, route: str, function: str = "generate_request") -> bytes:
    """Return the body of a typed-parse error, with the source location that SGLang leaks."""
    where = f'  File "sglang/srt/entrypoints/http_server.py", line 928, in {function}\n    {route}'
    text = f"1 validation error:\n  {message}\n\n{where} [{message}]"
    return object_error(text, "Bad Request", 400)


def object_error(message: str, kind: str, code: int) -> bytes:
    """Return the flat OpenAI error body."""
    return orjson.dumps({"object": "error", "message": message, "type": kind, "param": None, "code": code})


def schema_error(message: str) -> bytes:
    """Return the body of the schema gate."""
    return orjson.dumps({"error": message})


def value_error(message: str) -> bytes:
    """Return the native body of a refused value."""
    return orjson.dumps({"error": {"message": message}})


def stream_error(message: str, code: int = 400, kind: str = "invalid_request_error") -> bytes:
    """Return the event that carries a refused value inside a native stream."""
    error = {"message": message, "type": kind, "code": code, "retryable": False}
    return b"data: " + orjson.dumps({"error": error}) + b"\n\n"


def openai_stream_error(message: str, kind: str, code: int) -> bytes:
    """Return the event of an error inside an OpenAI stream; Python's own spacing, as captured."""
    error = {"object": "error", "message": message, "type": kind, "param": None, "code": code}
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"


def field_error(kind: str, location: tuple[object, ...], message: str, value: Any) -> str:
    """Return one validation error in the spelling that SGLang passes on."""
    return f"{{'type': {kind!r}, 'loc': {location!r}, 'msg': {message!r}, 'input': {value!r}}}"

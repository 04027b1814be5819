"""vLLM's error bodies: one nested shape, with two spellings of JSON.

Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from typing import Any

import orjson

ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class RequestError(Exception):
    """A request that is refused."""

    def __init__(self, message: str, param: str | None = None, kind: str = "BadRequestError", status: int = 400):
        super().__init__(message)
        self.message = message
        self.param = param
        self.kind = kind
        self.status = status

    @property
    def body(self) -> bytes:
        """The answer's body."""
        return body(self.message, self.kind, self.param, self.status)


def refused_value(message: str, param: str, value: Any = None) -> RequestError:
    """Return the error of a checked value; ``value`` is shown unless it is ``None``."""
    shown = "" if value is None else f", value={value}"
    return RequestError(f"{message} (parameter={param}{shown})", param)


def unknown_model(model: str, served: Seq[str]) -> RequestError:
    """Return the error of a model that is not served."""
    message = f"The model `{model}` does not exist. Valid aliases: {', '.join(served)}."
    return RequestError(message, "model", "NotFoundError", 404)


def invalid(kind: str, location: str, message: str, value: Any, context: dict[str, Any] | None = None) -> RequestError:
    """Return the error of the schema check, with its one finding."""
    shown: dict[str, Any] = {"type": kind, "loc": location, "msg": message, "input": _shown(value)}
    if context is not None:
        shown["ctx"] = context
    return RequestError(f"1 validation error:\n  {shown}", location, "Bad Request")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"<dict of {len(value)} items>"
    if isinstance(value, list):
        return f"<list of {len(value)} items>"
    return str(value)


def _error(message: str, kind: str, param: str | None, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body(message: str, kind: str, param: str | None, code: int) -> bytes:
    """Return an error body."""
    return orjson.dumps(_error(message, kind, param, code))


def kind_of(status: int) -> str:
    """Return the error type that goes with a status of the engine's own making."""
    return "ServiceUnavailableError" if status == 503 else "InternalServerError"


def failure_body(message: str, status: int) -> bytes:
    """Return the body of a request that failed inside the engine."""
    return body(message, kind_of(status), None, status)


def failure_event(message: str, status: int) -> bytes:
    """Return the event of a stream that failed; Python's own spacing, as captured."""
    return b"data: %b\n\n" % json.dumps(_error(message, kind_of(status), None, status)).encode()

"""Envelopes of small made-up requests, and the refusals of others."""

import json
from typing import Any

import pytest

from backends.upstream.base import Headers
from gateway.envelope import Envelope, parse_envelope, read_headers
from gateway.errors import InvalidRequest
from gateway.routes import ROUTES

CAP = 64 * 1024 * 1024
NATIVE, CHAT, COMPLETIONS, EMBEDDINGS = "/generate", "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


def parsed(
    body: dict[str, Any] | bytes, headers: Headers | None = None, *, path: str = NATIVE, cap: int = CAP
) -> Envelope:
    """The envelope of a request."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    given_headers = headers or []
    return parse_envelope(
        ROUTES[path], raw, given_headers, read_headers(given_headers), fallback_id="made", max_response_bytes=cap
    )


def refused(
    body: dict[str, Any] | bytes, headers: Headers | None = None, *, path: str = NATIVE, cap: int = CAP
) -> InvalidRequest:
    """The refusal of a request."""
    with pytest.raises(InvalidRequest) as caught:
        parsed(body, headers, path=path, cap=cap)
    assert caught.value.report.status == 400
    assert caught.value.report.type == "invalid_request"
    return caught.value

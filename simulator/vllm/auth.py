"""Which routes need the key. Pure."""

from __future__ import annotations

import hmac

from simulator.options import EngineOptions

_GUARDED = ("/v1", "/v2", "/inference", "/cohere")


def is_allowed(options: EngineOptions, method: str, path: str, authorization: str | None) -> bool:
    """Return whether the request carries the key that its route needs; most routes need none."""
    if options.api_key is None or method == "OPTIONS" or not path.startswith(_GUARDED):
        return True
    scheme, _, given = (authorization or "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(
        given.encode("utf-8", "replace"), options.api_key.encode()
    )

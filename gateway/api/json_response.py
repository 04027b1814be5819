"""JSON answers of the routes that FastAPI serves."""

import orjson
from fastapi import Response


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """``content`` as JSON; dataclasses and the like must be taken apart before."""
    return Response(orjson.dumps(content), status, headers, media_type="application/json")

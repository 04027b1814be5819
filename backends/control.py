"""Control calls that all engine kinds share."""

import asyncio
from collections.abc import Sequence

from backends.errors import CallEnded, IdentifyFailed, UpstreamError
from backends.types import Worker
from backends.upstream.base import Headers, UpstreamClient, UpstreamRequest
from backends.upstream.fetch import fetch


def bearer(key: str | None) -> Headers:
    """The credential as headers."""
    return [] if key is None else [(b"authorization", b"Bearer " + key.encode())]


async def get_body(client: UpstreamClient, worker: Worker, paths: Sequence[str], timeout_s: float) -> bytes:
    """Body of the first path that exists; later ones are the names that other releases use.

    Raises:
        IdentifyFailed: None of them answers with 200; the message is for operators.
    """
    status, path = 0, ""
    for path in paths:
        request = UpstreamRequest("GET", path, bearer(worker.api_key), [])
        try:
            async with asyncio.timeout(timeout_s):
                status, body = await fetch(client, worker.origin, request)
        except (UpstreamError, CallEnded) as exc:
            raise IdentifyFailed(f"{path}: {exc}") from exc
        except TimeoutError as exc:
            raise IdentifyFailed(f"{path}: no answer within {timeout_s:g} s") from exc
        if status == 200:
            return body
        if status in (401, 403):
            raise IdentifyFailed(f"{path}: {status}, the engine refuses this gateway's api key (api_key_env)")
        if status != 404:
            break
    hint = ": not a serving engine (a follower node answers like this)" if status == 404 else ""
    raise IdentifyFailed(f"{path}: status {status}{hint}")


async def get_optional_body(client: UpstreamClient, worker: Worker, path: str, timeout_s: float) -> bytes:
    """Body of a path that not every release has; empty where it is not there, or not to be had.

    Raises:
        IdentifyFailed: No answer; the message is for operators.
    """
    try:
        async with asyncio.timeout(timeout_s):
            status, body = await fetch(client, worker.origin, UpstreamRequest("GET", path, bearer(worker.api_key), []))
    except (UpstreamError, CallEnded) as exc:
        raise IdentifyFailed(f"{path}: {exc}") from exc
    except TimeoutError as exc:
        raise IdentifyFailed(f"{path}: no answer within {timeout_s:g} s") from exc
    return body if status == 200 else b""


async def get_status(client: UpstreamClient, worker: Worker, path: str) -> int:
    """Status of a GET; the caller sets the time limit.

    Raises:
        UpstreamError: No answer.
    """
    status, _ = await fetch(client, worker.origin, UpstreamRequest("GET", path, bearer(worker.api_key), []))
    return status

"""One call of an engine's control route, and what the gateway knows once it has succeeded."""

import asyncio
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Final

import orjson

from backends.control import bearer
from backends.errors import UpstreamError
from backends.upstream.base import AnswerHead, Headers, UpstreamClient, UpstreamRequest
from backends.upstream.fetch import MAX_CONTROL_BODY_BYTES, fetch_answer
from gateway.errors import GatewayError, InvalidRequest, report_of
from gateway.lifespan import read_weights
from gateway.services import Services
from routers.fleet import Member

# Headers of the client's call that go on to the engine.
CALL_HEADERS: Final = frozenset({b"content-type", b"accept"})
# Routes of engines after which their caches are empty, or hold what nobody can use any more.
EMPTIES_CACHE: Final = frozenset(
    {
        "flush_cache",
        "reset_prefix_cache",
        "update_weights_from_disk",
        "update_weights_from_tensor",
        "update_weights_from_distributed",
        "update_weights_from_ipc",
        "end_weight_update",
        "update_weights",
        "finish_weight_update",
        "load_lora_adapter",
        "unload_lora_adapter",
        "release_memory_occupation",
        "sleep",
    }
)
# Those of them after whose success nothing can be left, and the engine says so in its events.
_EMPTIED: Final = frozenset({"flush_cache", "reset_prefix_cache"})
# Routes after which the weights may be of another version.
_CHANGES_WEIGHTS: Final = frozenset(
    {
        "update_weights_from_disk",
        "update_weights_from_tensor",
        "update_weights_from_distributed",
        "update_weights_from_ipc",
        "end_weight_update",
        "finish_weight_update",
        "update_weight_version",
    }
)
# Longest wait for the version of a worker's weights after that, in seconds; its next probe asks again.
VERSION_TIMEOUT_S = 5.0
_PAUSES: Final = frozenset({"pause_generation", "pause"})
_CONTINUES: Final = frozenset({"continue_generation", "resume"})


async def call_worker(
    client: UpstreamClient,
    member: Member,
    request: UpstreamRequest,
    *,
    timeout_s: float,
    max_bytes: int = MAX_CONTROL_BODY_BYTES,
) -> tuple[AnswerHead, bytes]:
    """Send ``request`` with the worker's own key, once; a second key is tried where the first was refused with 401.

    Args:
        client: Must not send anything twice by itself: most of these routes are not idempotent.
        member: The worker.
        request: Without credentials.
        timeout_s: Time for the whole answer.
        max_bytes: Bound of its body.

    Raises:
        GatewayError: There is no answer; the report says why.
    """
    worker = member.worker
    # SGLang takes the admin key on its admin routes only, and the other one on the others; a 401 has done nothing.
    keys = list(dict.fromkeys((worker.admin_api_key or worker.api_key, worker.api_key)))
    try:
        async with asyncio.timeout(timeout_s):
            for key in keys:
                headers: Headers = [*request.headers, *bearer(key)]
                sent = UpstreamRequest(request.method, request.path, headers, request.body)
                head, body = await fetch_answer(client, worker.origin, sent, max_bytes=max_bytes)
                if head.status != 401:
                    break
    except UpstreamError as exc:
        raise GatewayError(replace(report_of(exc), retry_after_s=None)) from exc
    except TimeoutError as exc:
        raise InvalidRequest(f"no answer within {timeout_s:g} s", status=504, type="unavailable") from exc
    return head, body


def held_meanwhile(member: Member, path: str) -> AbstractContextManager[None]:
    """``member`` gets no requests within the block if ``path``, a control route without query, pauses it.

    What comes to an engine after its pause is kept until it is continued, and lost there if it is aborted.
    """
    return member.pausing() if path.rpartition("/")[2] in _PAUSES else nullcontext()


def has_succeeded(status: int, body: bytes) -> bool:
    """Whether an engine has done what it was told: a 2xx, and its body does not deny it as vLLM's flushes do."""
    if not 200 <= status < 300:
        return False
    try:
        read = orjson.loads(body)
    except orjson.JSONDecodeError:
        return True
    return not (isinstance(read, dict) and read.get("success") is False)


async def took_effect(services: Services, member: Member, path: str) -> None:
    """Draw the conclusions of a control route that ``member`` has answered with success.

    Whoever is told of that success next finds the version of the new weights known.

    Args:
        services: Hold what is known of caches.
        member: The worker; nothing happens if it has been removed meanwhile.
        path: The route as the engine calls it, without query.
    """
    if services.fleet.get(member.worker.id) is not member:
        return
    name = path.rpartition("/")[2]
    if name in EMPTIES_CACHE:
        services.kv.clear(member.worker.id)
        if name not in _EMPTIED:
            services.prefixes.parity.lost_track(member.worker.id)
        services.prefixes.forget(member.worker.id)
    if name in _PAUSES or name in _CONTINUES:
        member.paused_by_us(name in _PAUSES)
    if name in _CHANGES_WEIGHTS and member.facts is not None:
        await read_weights(services.backends[member.facts.engine], member, VERSION_TIMEOUT_S)

"""The fleet and the gateway's inner counters, for administrators."""

import math
import re
from collections.abc import Callable

from fastapi import APIRouter, Depends, Response

from backends.cancel_policy import abort_capability
from backends.types import EngineFacts, Role
from gateway.api.head import with_head
from gateway.api.json_response import json_response
from gateway.api.refusals import admin_guard
from gateway.auth import Keys
from gateway.errors import InvalidRequest
from gateway.services import Services
from routers.fleet import Fleet, Member, WorkerState

# SGLang's own router writes a data-parallel rank behind the name of a worker.
_RANK_SUFFIX = re.compile(r"@\d{1,5}$")


def named_member(fleet: Fleet, name: str) -> Member:
    """The worker of an id, with or without a rank behind it.

    Raises:
        InvalidRequest: There is none.
    """
    member = fleet.get(_RANK_SUFFIX.sub("", name))
    if member is None:
        raise InvalidRequest(f"there is no worker {name!r}", param="worker_id", status=404, type="not_found")
    return member


def describe_member(services: Services, member: Member) -> dict[str, object]:
    """One worker as ``GET /workers`` shows it."""
    facts = member.facts
    return {
        "id": member.worker.id,
        "url": member.worker.url,
        "worker_type": str(member.role),
        "engine": str(facts.engine) if facts else None,
        "engine_version": facts.version_text if facts else None,
        "role": str(member.role),
        "model_id": member.model_id,
        "is_healthy": member.is_up,
        "is_ready": member.state is WorkerState.READY,
        "is_draining": member.is_draining,
        "load": member.in_flight,
        "in_flight": member.in_flight,
        "dp_size": facts.dp_size if facts else None,
        "kv": _kv(services, member),
        "state": str(member.state),
        "detail": member.detail or member.role_conflict or services.fleet.reason(member),
        "breaker": str(member.breaker.state),
        "page_size": facts.page_size if facts else None,
        "context_tokens": facts.context_tokens if facts else None,
        "incremental_output": facts.incremental_output if facts else None,
        "max_running_requests": facts.max_running_requests if facts else None,
        "max_in_flight": _max_in_flight(member),
        "weight_version": facts.weight_version if facts else None,
        "cancellation": _cancellation(facts) if facts else None,
        "ranks": [
            {
                "dp_rank": rank,
                "in_flight": load.in_flight,
                "blocks": load.blocks,
                "prefill_tokens": load.prefill_tokens,
                "kv": _kv_of_rank(services, member.worker.id, rank),
            }
            for rank, load in enumerate(member.loads)
        ],
    }


# The state of a worker is that of its worst rank.
_KV_STATES = ("misconfigured", "gap", "replaying", "cold", "live")


def _kv_of_rank(services: Services, worker_id: str, dp_rank: int) -> dict[str, object]:
    epoch, last_seq = services.kv.position(worker_id, dp_rank)
    state, relay = services.kv.state(worker_id, dp_rank), services.kv.relay_of(worker_id, dp_rank)
    return {
        "state": state,
        "source": None if epoch is None else "direct" if relay is None else "relay",
        "relay": relay,
        "blocks": services.kv.blocks(worker_id, dp_rank),
        "epoch": epoch,
        "last_seq": last_seq,
    }


def _kv(services: Services, member: Member) -> dict[str, object]:
    """KV events of all ranks in one: the worst state, all blocks, and the position of the first rank."""
    ranks = [_kv_of_rank(services, member.worker.id, rank) for rank in range(member.dp_size)]
    states = {rank["state"] for rank in ranks}
    first: dict[str, object] = ranks[0] if ranks else {"epoch": None, "last_seq": None}
    return {
        "state": next((state for state in _KV_STATES if state in states), "off"),
        "blocks": sum(services.kv.blocks(member.worker.id, rank) for rank in range(member.dp_size)),
        "epoch": first["epoch"],
        "last_seq": first["last_seq"],
        "problem": services.kv.problem(member.worker.id),
    }


def _max_in_flight(member: Member) -> int | None:
    """Requests that all its ranks together get at once."""
    limit = member.max_in_flight_per_rank * member.dp_size
    return int(limit) if math.isfinite(limit) else None


def _cancellation(facts: EngineFacts) -> dict[str, object]:
    """What the engine's release does with aborts and disconnects."""
    found = abort_capability(facts.engine, facts.version)
    return {
        "abort": {
            "v": found.v,
            "early": str(found.early),
            "group": found.group,
            "disconnect_aborts": found.disconnect_aborts,
            "unary_disconnect_aborts": found.unary_disconnect_aborts,
        },
        "cancel_window": str(found.cancel_window),
        "must_consume_handoff": found.must_consume_handoff,
    }


def inner_state(services: Services, drain_tasks: int) -> dict[str, int]:
    """Counters that are all zero when nothing is going on."""
    loads = [load for member in services.fleet for load in member.loads]
    return {
        "in_flight_requests": len(services.live),
        "live_legs": len(services.legs),
        "booked_requests": sum(load.in_flight for load in loads),
        "booked_blocks": sum(load.blocks for load in loads),
        "booked_prefill_tokens": sum(load.prefill_tokens for load in loads),
        "live_rooms": len(services.live_rooms),
        "abort_tasks": len(services.aborter),
        "prefill_background_tasks": len(services.tails),
        "drain_tasks": drain_tasks,
        "queued_requests": len(services.waiting),
        "held_requests": services.coalescer.held,
        "awaited_prefills": len(services.coalescer),
        "upstream_connections_active": services.client.active_connections,
        "open_tasks": services.client.connecting + services.tails.readers,
    }


def workers_router(services: Services, keys: Keys, drain_tasks: Callable[[], int]) -> APIRouter:
    """Routes about workers.

    Args:
        services: Holds the fleet.
        keys: Credentials.
        drain_tasks: Number of drains under way.
    """
    router = APIRouter(dependencies=[Depends(admin_guard(keys))])

    @router.get("/workers")
    async def workers(model: str | None = None) -> Response:
        members = [member for member in services.fleet if not model or model in member.names]
        counts = {f"{role}_count": sum(member.role is role for member in members) for role in Role}
        listed = [describe_member(services, member) for member in members]
        return json_response({"workers": listed, "total": len(members), "stats": counts})

    @router.get("/workers/{worker_id}")
    async def worker(worker_id: str) -> Response:
        return json_response(describe_member(services, named_member(services.fleet, worker_id)))

    @router.get("/list_workers")
    async def list_workers() -> Response:
        return json_response({"urls": [member.worker.url for member in services.fleet]})

    @router.get("/internal/state")
    async def state() -> Response:
        return json_response(inner_state(services, drain_tasks()))

    return with_head(router)

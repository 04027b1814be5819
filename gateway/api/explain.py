"""Why a request would go where it would go; nothing is sent to an engine."""

import copy

from fastapi import APIRouter, Depends, Request, Response

from gateway.api.json_response import json_response
from gateway.api.refusals import admin_guard
from gateway.auth import Keys
from gateway.eligibility import eligible
from gateway.envelope import Envelope, parse_envelope, read_headers
from gateway.errors import GatewayError, InvalidRequest, report_of
from gateway.routes import ROUTES, Route
from gateway.services import Services
from routers.errors import RoutingError
from routers.explain import Explained
from routers.fleet import WorkerState
from routers.types import Candidate, Placement, RouteRequest

# What tells a request's route, where the query does not name it.
_ROUTE_OF_FIELD = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/embeddings"}


def explain_router(services: Services, keys: Keys) -> APIRouter:
    """The route that explains placements.

    Args:
        services: Fleet, policy and what is known of prompts.
        keys: Credentials.
    """
    router = APIRouter(dependencies=[Depends(admin_guard(keys))])

    @router.post("/route/explain")
    async def explain(request: Request, path: str | None = None) -> Response:
        raw = await request.body()
        headers = request.headers.raw
        by_name = read_headers(headers)
        route = _route(raw, path)
        envelope = parse_envelope(
            route,
            raw,
            headers,
            by_name,
            fallback_id=services.new_id(),
            max_response_bytes=services.limits.max_response_bytes,
        )
        return json_response(await _explained(services, route, envelope))

    return router


def _route(raw: bytes, path: str | None) -> Route:
    if path is not None:
        if path not in ROUTES:
            raise InvalidRequest(f"{path!r} is none of the forwarded routes", param="path")
        return ROUTES[path]
    found = [route for name, route in _ROUTE_OF_FIELD.items() if b'"%b"' % name.encode() in raw]
    return ROUTES[found[0] if found else "/generate"]


async def _explained(services: Services, route: Route, envelope: Envelope) -> dict[str, object]:
    answer: dict[str, object] = {"chosen": None, "candidates": [], "policy": services.policy.name, "blocks_hashed": 0}
    try:
        model = services.fleet.model_of(envelope.model)
        candidates = eligible(services.fleet, services.clock, route, envelope, model, set())
    except (RoutingError, GatewayError) as exc:
        listed = [_left_out(services, member.worker.id) for member in services.fleet]
        return {**answer, "candidates": listed, "reason": report_of(exc).message}
    request = RouteRequest(envelope.prompt_tokens, envelope.stickiness_key)
    prefixes = services.prefixes
    if prefixes.are_wanted:
        prompt = prefixes.known(route, envelope, model)
        if prompt is None:
            prompt = await prefixes.look_up(route, envelope, model, candidates, asks_engines=False)
        if prompt is not None:
            request = prefixes.request(prompt, envelope.stickiness_key, candidates)
    # A copy, so that explaining draws no random numbers and takes no turn of the real policy.
    placement = copy.deepcopy(services.policy).select(request, candidates)
    explained = services.policy.explain(request, candidates)
    chosen = next(one for one in explained if (one.worker_id, one.dp_rank) == placement.candidate.key)
    eligible_ids = {candidate.key.worker_id for candidate in candidates}
    others = [_left_out(services, m.worker.id) for m in services.fleet if m.worker.id not in eligible_ids]
    hashed = max((len(prompt.sequence_hashes) for prompt in request.prompts.values()), default=0)
    return {
        **answer,
        "chosen": _shown(chosen),
        "candidates": [*map(_shown, explained), *others],
        "blocks_hashed": hashed,
        "reason": _reason(placement, chosen, candidates, request),
    }


def _shown(one: Explained) -> dict[str, object]:
    shown: dict[str, object] = {
        "worker_id": one.worker_id,
        "dp_rank": one.dp_rank,
        "overlap_blocks": one.overlap_blocks,
        "prompt_blocks": one.prompt_blocks,
        "active_blocks": one.active_blocks,
        "active_prefill_tokens": one.active_prefill_tokens,
        "in_flight": one.in_flight,
        "cost": one.cost,
        "excluded": one.excluded,
    }
    if one.parts is not None:
        shown["cost_parts"] = one.parts._asdict()
    return shown


def _left_out(services: Services, worker_id: str) -> dict[str, object]:
    member = services.fleet.get(worker_id)
    assert member is not None
    is_ready = member.state is WorkerState.READY
    return {
        "worker_id": worker_id,
        "dp_rank": None,
        "overlap_blocks": None,
        "prompt_blocks": None,
        "active_blocks": sum(load.blocks for load in member.loads),
        "active_prefill_tokens": sum(load.prefill_tokens for load in member.loads),
        "in_flight": member.in_flight,
        "cost": None,
        "excluded": "serves another model or route" if is_ready else member.detail or str(member.state),
    }


def _reason(placement: Placement, chosen: Explained, candidates: tuple[Candidate, ...], request: RouteRequest) -> str:
    if len(candidates) == 1:
        return "the only rank that can take it"
    if chosen.cost is None:
        known = "" if request.prompts else "; nothing is known of the prompt's blocks"
        return f"the policy's choice by load{known}"
    cached = f"{placement.overlap_blocks or 0} of {chosen.prompt_blocks} blocks are cached there"
    return f"the lowest cost, {chosen.cost:g} blocks; {cached}"

"""Why a request would go where it would go; nothing is sent to an engine."""

import copy
from collections.abc import Mapping, Sequence

from fastapi import APIRouter, Depends, Request, Response

from backends.types import EngineKind, Role
from gateway.api.json_response import json_response
from gateway.api.refusals import admin_guard
from gateway.auth import Keys
from gateway.eligibility import eligible, eligible_pools, pins_of
from gateway.envelope import Envelope, parse_envelope, read_headers
from gateway.errors import GatewayError, InvalidRequest, report_of
from gateway.native_prompts import ready_for_vllm
from gateway.pair_placement import needs_one_worker
from gateway.routes import ROUTES, Route
from gateway.services import Services
from routers.errors import RoutingError
from routers.explain import Explained
from routers.fleet import Member, WorkerState
from routers.pair import Alone, NoPair, Paired, Pools
from routers.types import Placement, RouteRequest

_ORDER = (Role.PREFILL, Role.DECODE, Role.REGULAR)
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
    fleet, choice = services.fleet, None
    try:
        model = fleet.model_of(envelope.model)
    except RoutingError as exc:
        return {**answer, "candidates": _left_out(services, envelope, None, set()), "reason": report_of(exc).message}
    if fleet.has_vllm and route.path == "/generate":
        envelope = await ready_for_vllm(services, envelope, model, asks_engines=False)
    try:
        is_alone, pools = _eligible(services, route, envelope, model)
    except (RoutingError, GatewayError) as exc:
        return {**answer, "candidates": _left_out(services, envelope, model, set()), "reason": report_of(exc).message}
    request = await _request(services, route, envelope, model, pools)
    # A copy, so that explaining draws no random numbers and takes no turn of the real policy.
    pairs = copy.deepcopy(services.pairs)
    if not fleet.has_pairs(model):
        pairs.alone = copy.deepcopy(services.policy)
    try:
        pins, now = pins_of(envelope), services.clock()
        choice = pairs.select(request, pools, now, pins=pins, needs_one_worker=is_alone)
        reason = _reason(choice, pairs.explain(request, pools, choice), pools, request)
    except NoPair as exc:
        reason = report_of(exc).message
    explained = pairs.explain(request, pools, choice)
    listed = [_shown(one, services) for role in _ORDER for one in explained[role]]
    taken = {one.worker_id for of_role in explained.values() for one in of_role}
    return {
        **answer,
        "chosen": _chosen(choice, listed),
        "candidates": [*listed, *_left_out(services, envelope, model, taken)],
        "blocks_hashed": max((len(prompt.sequence_hashes) for prompt in request.prompts.values()), default=0),
        "reason": reason,
    }


def _eligible(services: Services, route: Route, envelope: Envelope, model: str) -> tuple[bool, Pools]:
    """Whether the request needs one worker, and who may take it."""
    fleet, clock = services.fleet, services.clock
    if not fleet.has_pairs(model):
        return True, Pools(regular=eligible(fleet, clock, route, envelope, model, set()))
    is_alone = needs_one_worker(services, route, envelope, model)
    return is_alone, eligible_pools(fleet, clock, route, envelope, model, set(), needs_one_worker=is_alone)


async def _request(services: Services, route: Route, envelope: Envelope, model: str, pools: Pools) -> RouteRequest:
    """What the policies are told."""
    prefixes = services.prefixes
    if prefixes.are_wanted:
        candidates = [*pools.prefill, *pools.regular, *pools.decode]
        prompt = prefixes.known(route, envelope, model)
        if prompt is None:
            prompt = await prefixes.look_up(route, envelope, model, candidates, asks_engines=False)
        if prompt is not None:
            return prefixes.request(prompt, envelope.stickiness_key, candidates)
    return RouteRequest(envelope.prompt_tokens, envelope.stickiness_key)


def _shown(one: Explained, services: Services) -> dict[str, object]:
    member = services.fleet.get(one.worker_id)
    shown: dict[str, object] = {
        "worker_id": one.worker_id,
        "dp_rank": one.dp_rank,
        "role": str(member.role) if member is not None else None,
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


def _chosen(choice: Alone | Paired | None, listed: Sequence[dict[str, object]]) -> dict[str, object] | None:
    """The rank that answers, and the one that prefills for it where there are two."""

    def entry(placement: Placement) -> dict[str, object]:
        return next(one for one in listed if (one["worker_id"], one["dp_rank"]) == placement.candidate.key)

    if choice is None:
        return None
    if isinstance(choice, Alone):
        return entry(choice.placement)
    return {**entry(choice.decode), "prefill": entry(choice.prefill)}


def _left_out(services: Services, envelope: Envelope, model: str | None, taken: set[str]) -> list[dict[str, object]]:
    """The workers of which no rank may take the request.

    Args:
        services: Holds the fleet.
        envelope: The request.
        model: Its model, ``None`` if it has none that is served.
        taken: The other workers.
    """
    return [
        {
            "worker_id": member.worker.id,
            "dp_rank": None,
            "role": str(member.role),
            "overlap_blocks": None,
            "prompt_blocks": None,
            "active_blocks": sum(load.blocks for load in member.loads),
            "active_prefill_tokens": sum(load.prefill_tokens for load in member.loads),
            "in_flight": member.in_flight,
            "cost": None,
            "excluded": _why_left_out(services, envelope, member, model),
        }
        for member in services.fleet
        if member.worker.id not in taken
    ]


def _why_left_out(services: Services, envelope: Envelope, member: Member, model: str | None) -> str:
    fleet = services.fleet
    reason = fleet.reason(member)
    if reason != WorkerState.READY:
        return member.detail or reason
    if model is None or model not in member.names:
        return "serves another model"
    if (version := envelope.min_weight_version) is not None and not fleet.has_weights(member.worker.id, version):
        return f"has no weights of version {version} or later"
    if not fleet.is_let_through(member.worker.id, services.clock()):
        return "has failed its last requests, and is left alone for a moment"
    if member.loads and all(load.is_full for load in member.loads):
        return "has as many requests as it is given at once"
    return "cannot serve this request"


def _reason(
    choice: Alone | Paired, explained: Mapping[Role, Sequence[Explained]], pools: Pools, request: RouteRequest
) -> str:
    if isinstance(choice, Paired):
        prefill = _reason_of(choice.prefill, explained[Role.PREFILL], request)
        decode = _reason_of(choice.decode, explained[Role.DECODE], request, shows_cache=False)
        return f"prefill: {prefill}; decode: {decode}"
    alone = {one.key for one in pools.decode if one.group is not None and one.group.engine is EngineKind.VLLM}
    of_decode = [one for one in explained[Role.DECODE] if (one.worker_id, one.dp_rank) in alone]
    reason = _reason_of(choice.placement, [*explained[Role.REGULAR], *of_decode], request)
    return f"by one worker alone: {reason}" if pools.prefill else reason


def _reason_of(
    placement: Placement, candidates: Sequence[Explained], request: RouteRequest, *, shows_cache: bool = True
) -> str:
    if len(candidates) == 1:
        return "the only rank that can take it"
    chosen = next(one for one in candidates if (one.worker_id, one.dp_rank) == placement.candidate.key)
    if chosen.cost is None:
        known = "" if request.prompts else "; nothing is known of the prompt's blocks"
        return f"the policy's choice by load{known}"
    cheaper = [one for one in candidates if one.cost is not None and one.cost < chosen.cost]
    lowest = "the lowest cost" if all(one.excluded for one in cheaper) else "not the lowest cost"
    cached = f"; {placement.overlap_blocks or 0} of {chosen.prompt_blocks} blocks are cached there"
    return f"{lowest}, {chosen.cost:g} blocks{cached if shows_cache else ''}{_of_the_guard(chosen, cheaper)}"


def _of_the_guard(chosen: Explained, cheaper: Sequence[Explained]) -> str:
    """Tell which rank would have been chosen if it were not crowded, or why the chosen one was not passed over."""
    if chosen.is_kept:
        return f"; it is crowded, with {chosen.in_flight} requests, but no other rank has half of that"
    passed_over = [one for one in cheaper if one.excluded]
    if not passed_over:
        return ""
    one = min(passed_over, key=lambda one: one.cost or 0.0)
    return (
        f"; {one.worker_id} rank {one.dp_rank} would cost {one.cost:g} and has {one.overlap_blocks}, "
        f"but is passed over: {one.excluded}, with {one.in_flight} requests"
    )

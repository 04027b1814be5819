"""From an envelope to a leg: choose a rank, book it, send the request. One step, without an await in between."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from backends.base import NO_CHANGES
from backends.cancel_policy import LegKind, abort_capability, cancel_policy
from backends.leg import Leg
from backends.types import EngineFacts, EngineKind
from gateway.envelope import Envelope
from gateway.errors import NATIVE_ON_VLLM, GatewayError
from gateway.fold import Fold, fold_changes, new_fold, stays_unary
from gateway.ids import IdMap, id_map
from gateway.routes import FOLDED_PATHS, Dialect, Route
from gateway.services import Services
from routers.errors import NoReadyWorker
from routers.fleet import Fleet, Member
from routers.types import Candidate, RouteRequest


@dataclass(slots=True)
class Placed:
    """A request on its way to a rank.

    Not changed after it is made; not frozen, since making a frozen one takes several times as long.

    Attributes:
        leg: The upstream request; the exchange ends it.
        member: The worker in the fleet.
        facts: What its engine said when the request was placed.
        dp_rank: Rank that was chosen, ``None`` when the worker has only one.
        overlap_blocks: Prompt blocks cached there, ``None`` if the policy did not look.
        ids: Rewrites the answer's ids.
        is_stream: The engine was asked to stream.
        new_fold: Makes what turns a stream into the unary answer, given its bound; ``None`` where that cannot be.
        sent_ids: Ids given to the engine.
    """

    leg: Leg
    member: Member
    facts: EngineFacts
    dp_rank: int | None
    overlap_blocks: int | None
    ids: IdMap
    is_stream: bool
    new_fold: Callable[[int], Fold] | None
    sent_ids: tuple[str, ...]


def place(services: Services, route: Route, envelope: Envelope, model: str, failed: set[str]) -> Placed:
    """Choose, book and send.

    Args:
        services: Fleet, policy and client.
        route: The route.
        envelope: The request.
        model: Pool to choose from.
        failed: Workers that this request must not be sent to again.

    Raises:
        RoutingError: Nothing can take it.
        GatewayError: Nothing that is there ever could.
    """
    candidates = eligible(services, route, envelope, model, failed)
    choice = services.policy.select(RouteRequest(envelope.prompt_tokens, envelope.stickiness_key), candidates)
    key = choice.candidate.key
    member = services.fleet.get(key.worker_id)
    assert member is not None
    assert member.facts is not None
    facts = member.facts
    backend = services.backends[facts.engine]
    engine_ids = backend.engine_ids(
        route.path, services.new_id(), batch_size=envelope.batch_size, samples=envelope.samples
    )
    dp_rank = key.dp_rank if facts.dp_size > 1 else None
    folds = services.limits.folds_unary and _can_fold(route, envelope, facts)
    booking = choice.candidate.load.book(
        requests=envelope.sequences,
        blocks=-(-envelope.prompt_tokens // facts.page_size),
        prefill_tokens=envelope.prompt_tokens,
    )
    try:
        request = backend.generation_request(
            member.worker,
            route.path,
            envelope.body,
            engine_ids,
            dp_rank=dp_rank,
            is_stream=envelope.is_stream or folds,
            headers=envelope.headers,
            changes=fold_changes(route.dialect, facts.engine) if folds else NO_CHANGES,
        )
        call = services.client.send(member.worker.origin, request)
    except BaseException:
        booking.release()
        raise
    is_stream = envelope.is_stream or folds
    reveals_ids = engine_ids.has_children and is_stream
    is_trial = member.worker.id in services.fleet.tripped
    leg = Leg(
        worker=member.worker,
        backend=backend,
        engine_ids=engine_ids.abortable,
        policy=cancel_policy(
            facts.engine,
            abort_capability(facts.engine, facts.version),
            kind=LegKind.AGGREGATED,
            is_stream=is_stream,
            has_ids=reveals_ids or bool(engine_ids.abortable),
        ),
        call=call,
        booking=booking,
        keeper=services.aborter,
        reveals_ids=reveals_ids,
        on_end=services.legs.ended,
        on_first_token=functools.partial(services.fleet.answering, member) if is_trial else None,
    )
    services.legs.add(leg)
    if is_trial:
        services.fleet.sent(member, services.clock())
    ids = id_map(
        engine_ids,
        envelope.public_id,
        envelope.item_ids,
        has_one_id=route.dialect is not Dialect.NATIVE and not envelope.is_stream,
    )
    return Placed(
        leg=leg,
        member=member,
        facts=facts,
        dp_rank=dp_rank,
        overlap_blocks=choice.overlap_blocks,
        ids=ids,
        is_stream=is_stream,
        new_fold=functools.partial(_fold, route, envelope, facts) if route.path in FOLDED_PATHS else None,
        sent_ids=engine_ids.sent,
    )


def eligible(
    services: Services, route: Route, envelope: Envelope, model: str, failed: set[str]
) -> tuple[Candidate, ...]:
    """Ranks that this request may go to now.

    Raises:
        RoutingError: There are none.
        GatewayError: There are, and none of their engines can ever serve the route.
    """
    fleet = services.fleet
    candidates = fleet.candidates(model)
    if route.path == "/generate" and fleet.has_vllm:
        candidates = _speaking_native(fleet, candidates, model, envelope.worker_id)
    if envelope.dp_rank is not None or envelope.worker_id is not None:
        candidates = fleet.pinned(candidates, model, envelope.dp_rank, envelope.worker_id)
    if failed:
        candidates = tuple(c for c in candidates if c.key.worker_id not in failed)
        if not candidates:
            raise NoReadyWorker("no other worker is ready")
    if fleet.tripped:
        candidates = fleet.not_tripped(candidates, services.clock())
    return candidates


def _speaking_native(
    fleet: Fleet, candidates: tuple[Candidate, ...], model: str, worker_id: str | None
) -> tuple[Candidate, ...]:
    """Those of ``candidates`` that serve SGLang's own route.

    Raises:
        NoReadyWorker: There are none now.
        GatewayError: No worker of the model, or not the one that is asked for, ever will.
    """
    native = tuple(c for c in candidates if fleet.engine_of(c.key.worker_id) is not EngineKind.VLLM)
    asked = [m for m in fleet if model in m.names and worker_id in (None, m.worker.id)]
    if asked and all(fleet.engine_of(m.worker.id) is EngineKind.VLLM for m in asked):
        raise GatewayError(NATIVE_ON_VLLM)
    if not native:
        raise NoReadyWorker(f"no SGLang worker for the model {model!r} is ready")
    return native


def _can_fold(route: Route, envelope: Envelope, facts: EngineFacts) -> bool:
    if envelope.is_stream or route.path not in FOLDED_PATHS:
        return False
    return not stays_unary(route.dialect, facts.engine, envelope.body.fields)


def _fold(route: Route, envelope: Envelope, facts: EngineFacts, limit_bytes: int) -> Fold:
    is_list = route.dialect is Dialect.NATIVE and (envelope.batch_size is not None or envelope.samples > 1)
    return new_fold(
        route.dialect,
        facts.engine,
        limit_bytes=limit_bytes,
        count=envelope.sequences,
        is_list=is_list,
        is_incremental=facts.incremental_output,
    )

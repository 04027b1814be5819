"""From an envelope to a leg: choose a rank, book it, send the request. One step, without an await in between."""

from dataclasses import dataclass

from backends.leg import Leg
from backends.types import EngineFacts
from gateway.envelope import Envelope
from gateway.ids import IdMap, id_map
from gateway.routes import Dialect, Route
from gateway.services import Services
from routers.errors import NoReadyWorker
from routers.fleet import Member
from routers.types import RouteRequest


@dataclass(frozen=True, slots=True)
class Placed:
    """A request on its way to a rank.

    Attributes:
        leg: The upstream request; the exchange ends it.
        member: The worker in the fleet.
        facts: What its engine said when the request was placed.
        dp_rank: Rank that was chosen, ``None`` when the worker has only one.
        overlap_blocks: Prompt blocks cached there, ``None`` if the policy did not look.
        ids: Rewrites the answer's ids.
        is_stream: The engine was asked to stream.
        sent_ids: Ids given to the engine.
    """

    leg: Leg
    member: Member
    facts: EngineFacts
    dp_rank: int | None
    overlap_blocks: int | None
    ids: IdMap
    is_stream: bool
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
    """
    fleet = services.fleet
    candidates = fleet.candidates(model)
    if envelope.dp_rank is not None or envelope.worker_id is not None:
        candidates = fleet.pinned(candidates, model, envelope.dp_rank, envelope.worker_id)
    if failed:
        candidates = tuple(c for c in candidates if c.key.worker_id not in failed)
        if not candidates:
            raise NoReadyWorker("no other worker is ready")
    choice = services.policy.select(RouteRequest(envelope.prompt_tokens, envelope.stickiness_key), candidates)
    key = choice.candidate.key
    member = fleet.get(key.worker_id)
    assert member is not None
    assert member.facts is not None
    facts = member.facts
    backend = services.backends[facts.engine]
    engine_ids = backend.engine_ids(
        route.path, services.new_id(), batch_size=envelope.batch_size, samples=envelope.samples
    )
    blocks = -(-envelope.prompt_tokens // facts.page_size)
    booking = choice.candidate.load.book(
        requests=envelope.sequences, blocks=blocks, prefill_tokens=envelope.prompt_tokens
    )
    dp_rank = key.dp_rank if facts.dp_size > 1 else None
    try:
        request = backend.generation_request(
            member.worker,
            route.path,
            envelope.body,
            engine_ids,
            dp_rank=dp_rank,
            is_stream=envelope.is_stream,
            headers=envelope.headers,
        )
        call = services.client.send(member.worker.origin, request)
    except BaseException:
        booking.release()
        raise
    leg = Leg(
        worker=member.worker,
        backend=backend,
        engine_ids=engine_ids.abortable,
        call=call,
        booking=booking,
        on_end=services.legs.ended,
    )
    services.legs.add(leg)
    ids = id_map(
        engine_ids,
        envelope.public_id,
        envelope.item_ids,
        has_one_id=route.dialect is not Dialect.NATIVE and not envelope.is_stream,
    )
    return Placed(leg, member, facts, dp_rank, choice.overlap_blocks, ids, envelope.is_stream, engine_ids.sent)

"""Which ranks a request may go to: by model, route, pins, breakers and room."""

from collections.abc import Callable

from backends.types import EngineKind
from gateway.envelope import Envelope
from gateway.errors import NATIVE_ON_VLLM, GatewayError
from gateway.routes import Route
from routers.errors import NoReadyWorker
from routers.fleet import Fleet, Member
from routers.types import Candidate


def eligible(
    fleet: Fleet, clock: Callable[[], float], route: Route, envelope: Envelope, model: str, failed: set[str]
) -> tuple[Candidate, ...]:
    """Ranks that a request may go to now.

    Args:
        fleet: The workers.
        clock: Monotonic seconds.
        route: The route.
        envelope: The request.
        model: Pool to choose from.
        failed: Workers that this request must not be sent to again.

    Raises:
        NoRoom: There are, and each has as many requests as it is given at once.
        RoutingError: There are none.
        GatewayError: There are, and none of their engines can ever serve the route.
    """
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
        candidates = fleet.not_tripped(candidates, clock())
    if fleet.full:
        candidates = fleet.with_room(candidates)
    return candidates


def may_come_back(fleet: Fleet, route: Route, envelope: Envelope, model: str, failed: set[str]) -> bool:
    """Whether a request that nothing can take now could go to a worker that is paused."""

    def can_take(member: Member) -> bool:
        return (
            member.worker.id not in failed
            and envelope.worker_id in (None, member.worker.id)
            and (envelope.dp_rank or 0) < member.dp_size
            and (route.path != "/generate" or fleet.engine_of(member.worker.id) is not EngineKind.VLLM)
        )

    return fleet.is_paused_for(model, can_take)


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

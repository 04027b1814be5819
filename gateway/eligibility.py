"""Which ranks a request may go to: by model, route, pins, weights, breakers and room; and whether waiting helps."""

from collections.abc import Callable, Hashable

from backends.types import EngineKind
from gateway.envelope import Envelope
from gateway.flat_logprobs import wants_flat
from gateway.native_request import native_obstacle, speaks_native
from gateway.routes import Dialect, Route
from routers.errors import NoReadyWorker, NoRoom, RoutingError
from routers.fleet import Fleet
from routers.pair import NoPair, Pins, Pools, can_serve, obstacle, pinned
from routers.types import Candidate

# They generate nothing, so that workers of any role serve them.
_ANY_ROLE = frozenset({"/tokenize", "/detokenize"})


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
    if envelope.dp_rank is not None or envelope.worker_id is not None:
        candidates = fleet.pinned(candidates, model, envelope.dp_rank, envelope.worker_id)
    if fleet.has_vllm and (is_able := _able(fleet, route, envelope)) is not None:
        _refuse_unable(fleet, route, envelope, model)
        able = tuple(filter(is_able, candidates))
        if not able and route.path == "/generate":
            raise NoReadyWorker(f"no worker of the model {model!r} that can serve the request is ready")
        candidates = able or candidates
    if envelope.min_weight_version is not None:
        candidates = tuple(filter(_has_weights(fleet, envelope.min_weight_version), candidates))
        if not candidates:
            raise NoReadyWorker(f"no worker that is ready {_with_weights(envelope.min_weight_version)}")
    if failed:
        candidates = tuple(c for c in candidates if c.key.worker_id not in failed)
        if not candidates:
            raise NoReadyWorker("no other worker is ready")
    if fleet.tripped:
        candidates = fleet.not_tripped(candidates, clock())
    if fleet.full:
        candidates = fleet.with_room(candidates)
    return candidates


def eligible_pools(
    fleet: Fleet,
    clock: Callable[[], float],
    route: Route,
    envelope: Envelope,
    model: str,
    failed: set[str],
    *,
    needs_one_worker: bool = False,
) -> Pools:
    """Ranks that a request may go to now, where prefill and decode workers serve its model.

    Something in the pools can serve the request, which ``PairRouter`` refuses only if pairs have lost handoffs.

    Args:
        fleet: The workers.
        clock: Monotonic seconds.
        route: The route.
        envelope: The request.
        model: Pools to choose from.
        failed: Workers that this request must not be sent to again.
        needs_one_worker: No pair can serve it.

    Raises:
        NoRoom: It could be served if not so many ranks had as many requests as they are given at once.
        RoutingError: It cannot; of a missing role, ``NoPair``.
        GatewayError: None of the engines that are there can ever serve the route.
    """
    pins = pins_of(envelope)

    def checked(pools: Pools, why: str = "") -> Pools:
        missing = obstacle(pools, pins, needs_one_worker=needs_one_worker)
        if missing is not None:
            raise NoPair(f"{missing}{why}", missing.missing)
        return pools

    pools = _of_route(route, fleet.pools(model))
    if not (pools.prefill or pools.decode or pools.regular):
        raise fleet.none_ready(model)
    if fleet.has_vllm:
        _refuse_unable(fleet, route, envelope, model)
        pools = _able_pools(fleet, route, envelope, pools)
    fleet.check_pins(model, pins.dp_rank, pins.worker_id)
    pools = checked(pinned(pools, pins))
    if envelope.min_weight_version is not None:
        newer = _kept(pools, _has_weights(fleet, envelope.min_weight_version))
        pools = checked(newer, f" that {_with_weights(envelope.min_weight_version)}")
    if failed:
        pools = checked(_kept(pools, lambda one: one.key.worker_id not in failed), " but what has failed this request")
    if fleet.tripped:
        now = clock()
        why = " but what has failed its last requests and is left alone for a moment"
        pools = checked(_kept(pools, lambda one: fleet.is_let_through(one.key.worker_id, now)), why)
    if fleet.full:
        pools = _kept(pools, lambda one: not one.load.is_full)
        if not can_serve(pools, pins, needs_one_worker=needs_one_worker):
            raise NoRoom("the workers that may take the request have as many as they are given at once")
    return pools


def check_eligible(
    fleet: Fleet,
    clock: Callable[[], float],
    route: Route,
    envelope: Envelope,
    model: str,
    failed: set[str],
    *,
    needs_one_worker: bool = False,
) -> None:
    """See that something can take the request now; raises as ``eligible`` and ``eligible_pools`` do."""
    if fleet.has_pairs(model):
        eligible_pools(fleet, clock, route, envelope, model, failed, needs_one_worker=needs_one_worker)
    else:
        eligible(fleet, clock, route, envelope, model, failed)


def may_come_back(
    fleet: Fleet, route: Route, envelope: Envelope, model: str, failed: set[str], *, needs_one_worker: bool = False
) -> bool:
    """Whether a request that nothing can take now could be taken if paused workers were not paused."""
    ready, paused = _of_route(route, fleet.pools(model)), _of_route(route, fleet.paused(model))
    pins = pins_of(envelope)
    # What has tripped is no better off when others come back.
    ready = _kept(ready, lambda one: one.key.worker_id not in fleet.tripped)
    pools = _kept(
        Pools(
            prefill=[*ready.prefill, *paused.prefill],
            decode=[*ready.decode, *paused.decode],
            regular=[*ready.regular, *paused.regular],
        ),
        lambda one: one.key.worker_id not in failed,
    )
    if fleet.has_vllm:
        pools = _able_pools(fleet, route, envelope, pools)
    if envelope.min_weight_version is not None:
        pools = _kept(pools, _has_weights(fleet, envelope.min_weight_version))
    try:
        return can_serve(pinned(pools, pins), pins, needs_one_worker=needs_one_worker)
    except RoutingError:
        return False


def pins_of(envelope: Envelope) -> Pins:
    """What the request fixes."""
    return Pins(worker_id=envelope.worker_id, dp_rank=envelope.dp_rank)


def _of_route(route: Route, pools: Pools) -> Pools:
    if route.path not in _ANY_ROLE:
        return pools
    return Pools(regular=[*pools.regular, *pools.prefill, *pools.decode])


def _kept(pools: Pools, is_kept: Callable[[Candidate], bool]) -> Pools:
    prefill, decode, regular = (tuple(filter(is_kept, pool)) for pool in (pools.prefill, pools.decode, pools.regular))
    return Pools(prefill=prefill, decode=decode, regular=regular)


def _has_weights(fleet: Fleet, at_least: int) -> Callable[[Candidate], bool]:
    return lambda one: fleet.has_weights(one.key.worker_id, at_least)


def _with_weights(at_least: int) -> str:
    return f"has weights of version {at_least} or later"


def kind_of(route: Route, envelope: Envelope) -> Hashable:
    """The same for all requests that the same kinds of workers can serve."""
    if route.path == "/generate":
        return None if envelope.native is None else envelope.native.pool
    return route.dialect is Dialect.COMPLETIONS and wants_flat(route.dialect, envelope.body)


def _able(fleet: Fleet, route: Route, envelope: Envelope) -> Callable[[Candidate], bool] | None:
    """Which workers of a fleet with vLLM among it can serve a request, where not all can; ``None`` for all."""
    if route.path == "/generate":
        return lambda one: speaks_native(fleet.get(one.key.worker_id), envelope.native)
    if route.dialect is Dialect.COMPLETIONS and wants_flat(route.dialect, envelope.body):
        return _is_vllm
    return None


def _is_vllm(one: Candidate) -> bool:
    return one.group is not None and one.group.engine is EngineKind.VLLM


def _able_pools(fleet: Fleet, route: Route, envelope: Envelope, pools: Pools) -> Pools:
    """The pools without what cannot serve the request; on SGLang's own route, vLLM workers do so alone."""
    is_able = _able(fleet, route, envelope)
    if is_able is None:
        return pools
    kept = _kept(pools, is_able)
    if route.path != "/generate":
        return kept if kept.prefill or kept.decode or kept.regular else pools
    prefill = [one for one in kept.prefill if not _is_vllm(one)]
    return Pools(prefill=prefill, decode=kept.decode, regular=kept.regular)


def _refuse_unable(fleet: Fleet, route: Route, envelope: Envelope, model: str) -> None:
    """See that some worker of the model, or the one that is asked for, may serve SGLang's own route.

    Raises:
        GatewayError: None ever will.
    """
    if route.path != "/generate":
        return
    asked = [m for m in fleet if model in m.names and envelope.worker_id in (None, m.worker.id)]
    if (reason := native_obstacle(asked, envelope.native)) is not None:
        raise reason

"""From an envelope to a pair of ranks: choose one worker or two, book, and send what may be sent. One step."""

from backends.sglang import pd as sglang
from backends.types import EngineKind
from backends.vllm import pd as vllm
from gateway.decode_reader import DecodeWants
from gateway.eligibility import eligible_pools, pins_of
from gateway.envelope import Envelope
from gateway.errors import InvalidRequest
from gateway.expand import pair_choice_changes, pair_obstacle
from gateway.flat_logprobs import flat_changes, wants_flat
from gateway.fold_choice import can_fold, fold_maker
from gateway.pair_attempt import PairAttempt, Turns
from gateway.pair_legs import PairLegs, PairRequest, seat_of
from gateway.pair_plan import PairPlan
from gateway.pair_run import PairRun
from gateway.prompt_logprobs import asks_prompt_logprobs
from gateway.prompts import Prompt
from gateway.routes import Route
from gateway.services import Services
from routers.pair import Paired, Pins, Pools, pinned
from routers.types import Candidate, Placement, RouteRequest

# They generate nothing, so every worker of a model serves them.
_ANY_ROLE = frozenset({"/tokenize", "/detokenize"})


def needs_one_worker(services: Services, route: Route, envelope: Envelope, model: str) -> bool:
    """Whether a request is such that no pair of the model's can serve it."""
    if route.path == "/generate":  # vLLM workers serve it alone
        return all(engine is EngineKind.VLLM for engine in services.fleet.engines_serving(model))
    if EngineKind.VLLM in services.fleet.engines_serving(model):
        return bool(vllm.needs_one_worker(route.path, envelope.body, is_batch=envelope.batch_size is not None))
    return route.path not in sglang.PAIRED_PATHS


def choose(
    services: Services, route: Route, envelope: Envelope, model: str, failed: set[str], prompt: Prompt | None
) -> Placement | Paired:
    """Choose one rank, or two.

    Args:
        services: Fleet and policies.
        route: The route.
        envelope: The request.
        model: Pools to choose from.
        failed: Workers that this request must not be sent to again.
        prompt: Its prompt, if the policy looks at prompts and it is known.

    Raises:
        RoutingError: Nothing can take it.
        GatewayError: Nothing that is there ever could.
    """
    is_alone = needs_one_worker(services, route, envelope, model)
    pools = eligible_pools(services.fleet, services.clock, route, envelope, model, failed, needs_one_worker=is_alone)
    if route.path in _ANY_ROLE:
        pools = Pools(regular=[*pools.regular, *pools.decode, *pools.prefill])
    if prompt is None:
        request = RouteRequest(envelope.prompt_tokens, envelope.stickiness_key)
    else:
        everybody = [*pools.prefill, *pools.regular, *pools.decode]
        request = services.prefixes.request(prompt, envelope.stickiness_key, everybody)
    choice = services.pairs.select(
        request, pools, services.aborter.now(), pins=pins_of(envelope), needs_one_worker=is_alone
    )
    return choice if isinstance(choice, Paired) else choice.placement


def place_pair(
    services: Services,
    route: Route,
    envelope: Envelope,
    model: str,
    failed: set[str],
    paired: Paired,
    prompt: Prompt | None,
) -> PairAttempt:
    """Book both ranks and begin.

    Args:
        services: What all exchanges share.
        route: The route.
        envelope: The request.
        model: Its pools.
        failed: Workers that this request must not be sent to again.
        paired: The two ranks.
        prompt: Its prompt, if it is known.

    Raises:
        InvalidRequest: It cannot be served by a pair, whichever.
    """
    facts = seat_of(services, paired.decode).facts
    engine = facts.engine
    count = envelope.samples
    if count > 1 and (obstacle := pair_obstacle(route, engine, envelope)):
        raise InvalidRequest(f"prefill and decode workers cannot serve this request: {obstacle}", param="n")
    may_fold = can_fold(route, envelope, engine)
    is_folded = not envelope.is_stream and (engine is EngineKind.VLLM or (services.limits.folds_unary and may_fold))
    flat: dict[str, bytes] = {}
    if wants_flat(route.dialect, envelope.body):
        flat = flat_changes(route.dialect, engine, envelope.body, is_stream=envelope.is_stream)
    keeps_logprobs = asks_prompt_logprobs(route.dialect, engine, envelope.body)
    request = PairRequest(
        services=services,
        route=route,
        envelope=envelope,
        is_stream=envelope.is_stream or is_folded,
        is_folded=is_folded,
        count=count,
    )

    def find_decode(legs: PairLegs) -> Placement:
        away = {*failed, legs.decode.member.worker.id}
        wanted = RouteRequest(envelope.prompt_tokens, envelope.stickiness_key)
        pools = pinned(services.fleet.pools(model), Pins(dp_rank=envelope.dp_rank))
        decode = [one for one in pools.decode if one.key.worker_id not in away and _is_open(services, one)]
        if (version := envelope.min_weight_version) is not None:
            decode = [one for one in decode if services.fleet.has_weights(one.key.worker_id, version)]
        return services.pairs.another_decode(wanted, decode, paired.prefill.candidate, services.aborter.now())

    plan = PairPlan(
        wants=DecodeWants(
            dialect=route.dialect,
            limit_bytes=services.limits.max_response_bytes,
            sequences=envelope.batch_size or 1,
            is_stream=envelope.is_stream,
            new_fold=fold_maker(route, envelope, facts, samples=1),
        ),
        keeps_logprobs=keeps_logprobs,
        find_decode=find_decode,
        public_id=envelope.public_id,
    )
    turns = Turns()
    runs: list[PairRun] = []
    try:
        for choice in range(count):
            changes = flat
            if count > 1:
                changes = flat | pair_choice_changes(route, engine, envelope.body, choice)
            runs.append(PairRun(services, PairLegs(request, paired, choice, changes), plan, turns.note))
    except BaseException:
        for run in runs:
            run.legs.close()
        raise
    for run in runs:
        run.start()
    return PairAttempt(
        request=request,
        runs=tuple(runs),
        turns=turns,
        choice=paired.prefill,
        sent=services.prefixes.sent(prompt, paired.prefill) if prompt is not None else None,
        sample_ids=_sample_ids(envelope, count),
    )


def _is_open(services: Services, candidate: Candidate) -> bool:
    worker_id = candidate.key.worker_id
    return not candidate.load.is_full and services.fleet.is_let_through(worker_id, services.clock())


def _sample_ids(envelope: Envelope, count: int) -> tuple[str, ...]:
    if count == 1 or envelope.batch_size is not None:
        return ()
    return tuple(f"{envelope.public_id}_{index}" for index in range(count))

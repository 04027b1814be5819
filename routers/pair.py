"""Whether a request goes over a prefill and a decode worker, and over which. Pure.

Prefill goes where the prompt costs least to compute, the cache considered; decode where the fewest blocks are in use,
since it is sent all blocks whatever it has cached. A short prompt, and whatever no pair can take, goes to one worker
alone where there is one that can: a regular one, or a vLLM decode worker, which prefills what is not handed to it.
"""

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from backends.types import EngineKind, Role
from routers.base import Router
from routers.cost import DECODE_COST, PREFILL_COST
from routers.errors import NoReadyWorker
from routers.explain import Explained
from routers.kv_aware import KvAware
from routers.types import Candidate, Placement, PromptBlocks, RouteRequest

# So many handoffs that no decode worker took over, within so long: the two are not paired.
ABANDONED_LIMIT: Final = 3
ABANDONED_WINDOW_S: Final = 60.0
_UNPAIRED: Final = "prefill and decode workers failed to hand prompts over, and are not paired for a moment"


class NoPair(NoReadyWorker):
    """No pair, and no worker alone, can take the request now.

    Attributes:
        missing: The role that no ready worker has; ``None`` if there are both, and no two that fit.
    """

    def __init__(self, message: str, missing: Role | None = None) -> None:
        super().__init__(message)
        self.missing = missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Ranks that may take a request now, by their worker's role.

    Attributes:
        prefill: Of prefill workers.
        decode: Of decode workers.
        regular: Of workers that do both.
    """

    prefill: Sequence[Candidate] = ()
    decode: Sequence[Candidate] = ()
    regular: Sequence[Candidate] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """What the client fixes.

    Attributes:
        worker_id: The worker, or one of the two; ``None`` for any.
        dp_rank: Rank of the worker that answers, which of a pair is decode; ``None`` for any.
    """

    worker_id: str | None = None
    dp_rank: int | None = None


@dataclass(slots=True)
class Alone:
    """One worker serves the request."""

    placement: Placement


@dataclass(slots=True)
class Paired:
    """Two workers serve it.

    Attributes:
        prefill: Books the prompt's uncached tokens, until prefill has ended.
        decode: Books the prompt's blocks, none of them shared, and no tokens to prefill.
    """

    prefill: Placement
    decode: Placement


class PairHealth:
    """Which workers are not paired for a while, since decode did not take over what prefill had for it."""

    def __init__(self) -> None:
        self._abandoned: dict[tuple[str, str], deque[float]] = {}

    @property
    def is_tracking(self) -> bool:
        """Some handoff was abandoned."""
        return bool(self._abandoned)

    def abandoned(self, prefill_id: str, decode_id: str, now: float) -> None:
        """A handoff between the two was abandoned.

        Args:
            prefill_id: Worker.
            decode_id: Worker.
            now: Monotonic seconds.
        """
        key = (prefill_id, decode_id)
        self._abandoned.setdefault(key, deque(maxlen=ABANDONED_LIMIT)).append(now)

    def allows(self, prefill_id: str, decode_id: str, now: float) -> bool:
        """Whether the two may be paired."""
        key = (prefill_id, decode_id)
        times = self._abandoned.get(key)
        if times is None:
            return True
        if now - times[-1] >= ABANDONED_WINDOW_S:
            del self._abandoned[key]
            return True
        return len(times) < ABANDONED_LIMIT or now - times[0] >= ABANDONED_WINDOW_S

    def forget(self, worker_id: str) -> None:
        """A worker is gone, or another process."""
        for key in [key for key in self._abandoned if worker_id in key]:
            del self._abandoned[key]


@dataclass(slots=True)
class PairRouter:
    """Chooses one worker or two.

    Attributes:
        prefill: Policy for the prefill rank.
        decode: Policy for the decode rank; it is told of no cache.
        alone: Policy for requests that one worker serves.
        health: Pairs that are left alone.
        short_prompt_tokens: A prompt with at most so many tokens to compute goes to one worker, where one can serve
            it; 0 for none.
    """

    prefill: Router
    decode: Router
    alone: Router
    health: PairHealth = field(default_factory=PairHealth)
    short_prompt_tokens: int = 0

    def select(
        self,
        request: RouteRequest,
        pools: Pools,
        now: float,
        *,
        pins: Pins | None = None,
        needs_one_worker: bool = False,
    ) -> Alone | Paired:
        """Choose; synchronous, so that the booking can be the same step.

        Args:
            request: What is known of the request.
            pools: Who may take it.
            now: Monotonic seconds.
            pins: What the client fixes.
            needs_one_worker: No pair can serve it.

        Raises:
            NoPair: Nothing can take it now; the message says why.
        """
        pins = pins or Pins()
        pools = pinned(pools, pins)
        if needs_one_worker or self.short_prompt_tokens:
            single = self._alone(request, pools, pins)
            if single is not None and (needs_one_worker or self._is_short(request, single)):
                return Alone(single)
        pair = None if needs_one_worker else self._pair(request, pools, now)
        if pair is not None:
            return pair
        single = self._alone(request, pools, pins)
        if single is None:
            raise obstacle(pools, pins, needs_one_worker=needs_one_worker) or NoPair(_UNPAIRED)
        return Alone(single)

    def another_decode(
        self, request: RouteRequest, decode: Sequence[Candidate], prefill: Candidate, now: float
    ) -> Placement:
        """Choose where a prompt that lies ready at ``prefill`` is decoded.

        Args:
            request: What is known of the request.
            decode: Ranks that may take it.
            prefill: Where its blocks are.
            now: Monotonic seconds.

        Raises:
            NoPair: None of them can.
        """
        partners = self._partners(prefill, _by_engine(decode), now)
        if not partners:
            raise NoPair("no other decode worker is ready", Role.DECODE)
        return self.decode.select(_without_cache(request), partners)

    def _alone(self, request: RouteRequest, pools: Pools, pins: Pins) -> Placement | None:
        able = _able_alone(pools, pins)
        return self.alone.select(request, able) if able else None

    def explain(
        self, request: RouteRequest, pools: Pools, choice: Alone | Paired | None
    ) -> dict[Role, list[Explained]]:
        """Say what ``select`` would look at, by role; changes nothing.

        Args:
            request: What is known of the request.
            pools: Who may take it.
            choice: What ``select`` has chosen, ``None`` if it could not.
        """
        if isinstance(choice, Alone):
            decode = self.alone.explain(request, pools.decode)
        else:
            decode = self.decode.explain(_without_cache(request), pools.decode)
        return {
            Role.PREFILL: self.prefill.explain(request, pools.prefill),
            Role.DECODE: decode,
            Role.REGULAR: self.alone.explain(request, pools.regular),
        }

    def _is_short(self, request: RouteRequest, single: Placement) -> bool:
        if not self.short_prompt_tokens or not request.prompt_tokens:
            return False
        tokens = request.prompt_tokens
        if single.prompt is not None:
            tokens = single.prompt.uncached_tokens(single.overlap_blocks or 0)
        return tokens <= self.short_prompt_tokens

    def _pair(self, request: RouteRequest, pools: Pools, now: float) -> Paired | None:
        by_engine = _by_engine(pools.decode)
        able = [one for one in pools.prefill if self._partners(one, by_engine, now)]
        if not able:
            return None
        prefill = self.prefill.select(request, able)
        partners = self._partners(prefill.candidate, by_engine, now)
        return Paired(prefill, self.decode.select(_without_cache(request), partners))

    def _partners(
        self, prefill: Candidate, by_engine: Mapping[EngineKind | None, Sequence[Candidate]], now: float
    ) -> Sequence[Candidate]:
        partners = by_engine.get(_engine_of(prefill), ())
        if not self.health.is_tracking:
            return partners
        return [one for one in partners if self.health.allows(prefill.key.worker_id, one.key.worker_id, now)]


def kv_aware_pairs(rng: random.Random, short_prompt_tokens: int = 0) -> PairRouter:
    """The usual choice: prefill by cache and load, decode by load.

    Args:
        rng: Breaks ties.
        short_prompt_tokens: See ``PairRouter``.
    """
    return PairRouter(
        prefill=KvAware(rng, PREFILL_COST),
        decode=KvAware(rng, DECODE_COST),
        alone=KvAware(rng),
        short_prompt_tokens=short_prompt_tokens,
    )


def can_serve(pools: Pools, pins: Pins | None = None, *, needs_one_worker: bool = False) -> bool:
    """Whether a pair, or one worker alone, can serve a request; what pairs have lost together is not looked at."""
    return obstacle(pools, pins or Pins(), needs_one_worker=needs_one_worker) is None


def obstacle(pools: Pools, pins: Pins, *, needs_one_worker: bool = False) -> NoPair | None:
    """Why nothing in the pools can serve a request, ``None`` if something can.

    Args:
        pools: What there is; narrowed by ``pinned``.
        pins: What the client fixes.
        needs_one_worker: No pair can serve it.
    """
    if _able_alone(pools, pins):
        return None
    if needs_one_worker:
        return NoPair("no worker that serves requests alone is ready, which this one needs", Role.REGULAR)
    if not pools.prefill:
        return NoPair("no prefill worker is ready", Role.PREFILL)
    if not pools.decode:
        return NoPair("no decode worker is ready", Role.DECODE)
    engines = {_engine_of(one) for one in pools.prefill} & {_engine_of(one) for one in pools.decode}
    if engines - {None}:
        return None
    return NoPair("the prefill and the decode workers that are ready run different engines")


def _able_alone(pools: Pools, pins: Pins) -> list[Candidate]:
    """Who may serve the request alone: not what is beside a prefill worker that the client asks for."""
    if pins.worker_id is not None and any(one.key.worker_id == pins.worker_id for one in pools.prefill):
        return []
    # SGLang's decode workers refuse what comes without a handoff, or die of it.
    return [*pools.regular, *(one for one in pools.decode if _engine_of(one) is EngineKind.VLLM)]


def _by_engine(candidates: Sequence[Candidate]) -> dict[EngineKind | None, list[Candidate]]:
    by_engine: dict[EngineKind | None, list[Candidate]] = {}
    for one in candidates:
        if one.group is not None:
            by_engine.setdefault(one.group.engine, []).append(one)
    return by_engine


def _engine_of(candidate: Candidate) -> EngineKind | None:
    return candidate.group.engine if candidate.group is not None else None


def pinned(pools: Pools, pins: Pins) -> Pools:
    """The pools with what the client fixes; a pinned prefill worker leaves decode free, and the other way round.

    Raises:
        NoPair: What it fixes is in none of them.
    """
    prefill, decode, regular = pools.prefill, pools.decode, pools.regular
    if pins.worker_id is not None:
        wanted = [[one for one in pool if one.key.worker_id == pins.worker_id] for pool in (prefill, decode, regular)]
        if wanted[0]:
            prefill, regular = wanted[0], ()
        elif wanted[1]:
            decode, regular = wanted[1], ()
        else:
            prefill, decode, regular = (), (), wanted[2]
            if not regular:
                raise NoPair("the worker that the request is pinned to is not ready")
    if pins.dp_rank is not None:
        decode = [one for one in decode if one.key.dp_rank == pins.dp_rank]
        regular = [one for one in regular if one.key.dp_rank == pins.dp_rank]
        if not (decode or regular):
            raise NoPair("no worker with the rank that the request is pinned to is ready")
    return Pools(prefill=prefill, decode=decode, regular=regular)


def _without_cache(request: RouteRequest) -> RouteRequest:
    """The request as decode's policy sees it: all of the prompt's blocks come to the rank, and none is shared."""
    prompts = {group: PromptBlocks(one.block_size, one.prompt_tokens) for group, one in request.prompts.items()}
    return RouteRequest(request.prompt_tokens, request.stickiness_key, prompts)

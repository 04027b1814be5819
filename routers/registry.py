"""Names of policies to their constructors. Pure."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from routers.base import Router
from routers.consistent_hash import ConsistentHash
from routers.cost import DECODE_COST, DEFAULT_COST, CostParameters
from routers.kv_aware import Guard, KvAware, Recompute
from routers.least_loaded import LeastLoaded
from routers.pair import PairRouter
from routers.power_of_two import PowerOfTwo
from routers.prefix_approximate import PrefixApproximate
from routers.round_robin import RoundRobin

POLICIES: dict[str, Callable[[random.Random], Router]] = {
    LeastLoaded.name: LeastLoaded,
    RoundRobin.name: RoundRobin,
    PowerOfTwo.name: PowerOfTwo,
    ConsistentHash.name: ConsistentHash,
    KvAware.name: KvAware,
    PrefixApproximate.name: PrefixApproximate,
}
# Those that look at ``RouteRequest.prompts``: for others nobody needs to hash prompts.
BLOCK_POLICIES = frozenset({KvAware.name, PrefixApproximate.name})
# Chooses as least-loaded does wherever nothing is known of caches.
DEFAULT_POLICY = KvAware.name


def make_policy(
    name: str | None,
    seed: int | None,
    parameters: CostParameters = DEFAULT_COST,
    *,
    temperature: float = 0.0,
    guard: Guard = "all",
    max_wait_tokens: int = 0,
    recompute: Recompute = "all",
) -> Router:
    """Make a policy by name.

    Args:
        name: A key of ``POLICIES``; ``None`` takes the default.
        seed: Seed of its random choices; ``None`` takes one from the operating system.
        parameters: For the policies that go by cost.
        temperature: The same; see ``KvAware``.
        guard: The same.
        max_wait_tokens: The same.
        recompute: The same.

    Raises:
        ValueError: There is no such policy, or the temperature is none.
    """
    constructor, rng = _constructor(name), random.Random(seed)
    if constructor is KvAware or constructor is PrefixApproximate:
        return constructor(
            rng,
            parameters,
            temperature=temperature,
            guard=guard,
            max_wait_tokens=max_wait_tokens,
            recompute=recompute,
        )
    return constructor(rng)


def make_pairs(
    name: str | None,
    seed: int | None,
    short_prompt_tokens: int = 0,
    parameters: CostParameters = DEFAULT_COST,
    *,
    temperature: float = 0.0,
    guard: Guard = "all",
    max_wait_tokens: int = 0,
    recompute: Recompute = "all",
) -> PairRouter:
    """Make what chooses where prefill and decode workers serve a model.

    The policy chooses the prefill worker, or the worker that serves a request alone; decode goes by load.

    Args:
        name: A key of ``POLICIES``; ``None`` takes the default.
        seed: Seed of its random choices; ``None`` takes one from the operating system.
        short_prompt_tokens: See ``PairRouter``.
        parameters: For the policies that go by cost; in prefill, blocks in use count for nothing.
        temperature: The same; see ``KvAware``.
        guard: The same.
        max_wait_tokens: The same.
        recompute: The same.

    Raises:
        ValueError: There is no such policy, or the temperature is none.
    """
    make = partial(
        make_policy,
        name,
        seed,
        temperature=temperature,
        guard=guard,
        max_wait_tokens=max_wait_tokens,
        recompute=recompute,
    )
    return PairRouter(
        prefill=make(replace(parameters, track_active_blocks=False)),
        decode=KvAware(random.Random(seed), DECODE_COST),
        alone=make(parameters),
        short_prompt_tokens=short_prompt_tokens,
    )


def _constructor(name: str | None) -> Callable[[random.Random], Router]:
    constructor = POLICIES.get(name or DEFAULT_POLICY)
    if constructor is None:
        raise ValueError(f"unknown policy {name!r}, known: {', '.join(sorted(POLICIES))}")
    return constructor

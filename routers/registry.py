"""Names of policies to their constructors. Pure."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Unpack

from routers.base import Router
from routers.consistent_hash import ConsistentHash
from routers.cost import DECODE_COST, DEFAULT_COST, CostParameters
from routers.kv_aware import KvAware, KvOptions
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
    **options: Unpack[KvOptions],
) -> Router:
    """Make a policy by name.

    Args:
        name: A key of ``POLICIES``; ``None`` takes the default.
        seed: Seed of its random choices; ``None`` takes one from the operating system.
        parameters: For the policies that go by cost.
        **options: The same; see ``KvAware``.

    Raises:
        ValueError: There is no such policy, or an option is out of its range.
    """
    constructor, rng = _constructor(name), random.Random(seed)
    if constructor is KvAware or constructor is PrefixApproximate:
        return constructor(rng, parameters, **options)
    return constructor(rng)


def make_pairs(
    name: str | None,
    seed: int | None,
    short_prompt_tokens: int = 0,
    parameters: CostParameters = DEFAULT_COST,
    **options: Unpack[KvOptions],
) -> PairRouter:
    """Make what chooses where prefill and decode workers serve a model.

    The policy chooses the prefill worker, or the worker that serves a request alone; decode goes by load.

    Args:
        name: A key of ``POLICIES``; ``None`` takes the default.
        seed: Seed of its random choices; ``None`` takes one from the operating system.
        short_prompt_tokens: See ``PairRouter``.
        parameters: For the policies that go by cost; in prefill, blocks in use count for nothing.
        **options: The same; see ``KvAware``.

    Raises:
        ValueError: There is no such policy, or an option is out of its range.
    """
    make = partial(make_policy, name, seed, **options)
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

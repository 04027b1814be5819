"""Names of policies to their constructors. Pure."""

import random
from collections.abc import Callable

from routers.base import Router
from routers.consistent_hash import ConsistentHash
from routers.kv_aware import KvAware
from routers.least_loaded import LeastLoaded
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


def make_policy(name: str | None, seed: int | None) -> Router:
    """Make a policy by name.

    Args:
        name: A key of ``POLICIES``; ``None`` takes the default.
        seed: Seed of its random choices; ``None`` takes one from the operating system.

    Raises:
        ValueError: There is no such policy.
    """
    constructor = POLICIES.get(name or DEFAULT_POLICY)
    if constructor is None:
        raise ValueError(f"unknown policy {name!r}, known: {', '.join(sorted(POLICIES))}")
    return constructor(random.Random(seed))

"""Policy ``power-of-two``: the less loaded of two random ranks. Pure."""

import random
from collections.abc import Sequence

from routers.explain import explain_load
from routers.types import Candidate, Placement, RouteRequest


class PowerOfTwo:
    """The less loaded of two ranks drawn at random; nearly as even as looking at all, at constant cost.

    Args:
        rng: Draws the two.
    """

    name = "power-of-two"
    explain = staticmethod(explain_load)

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def select(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Placement:
        """Choose by load alone; ``request`` makes no difference."""
        del request
        if not candidates:
            raise ValueError("no candidates")
        if len(candidates) == 1:
            return Placement(candidates[0])
        first, second = self._rng.sample(range(len(candidates)), 2)
        one, other = candidates[first], candidates[second]
        one_load = (one.load.in_flight, one.load.prefill_tokens)
        return Placement(one if one_load <= (other.load.in_flight, other.load.prefill_tokens) else other)

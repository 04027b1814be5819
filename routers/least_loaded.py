"""Policy ``least-loaded``: the rank with the fewest requests in flight. Pure."""

import random
from collections.abc import Sequence

from routers.explain import explain_load
from routers.types import Candidate, Placement, RouteRequest


class LeastLoaded:
    """Fewest requests in flight; of those, the fewest prompt tokens still to prefill; of those, any.

    Args:
        rng: Breaks the remaining ties.
    """

    name = "least-loaded"
    explain = staticmethod(explain_load)

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def select(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Placement:
        """Choose by load alone; ``request`` makes no difference."""
        del request
        if not candidates:
            raise ValueError("no candidates")
        best: list[Candidate] = []
        lowest = (0, 0)
        for candidate in candidates:
            load = (candidate.load.in_flight, candidate.load.prefill_tokens)
            if not best or load < lowest:
                best, lowest = [candidate], load
            elif load == lowest:
                best.append(candidate)
        return Placement(best[0] if len(best) == 1 else self._rng.choice(best))

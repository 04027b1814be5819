"""Policy ``round-robin``: one rank after the other. Pure."""

import random
from collections.abc import Sequence

from routers.explain import explain_load
from routers.types import Candidate, Placement, RankKey, RouteRequest


class RoundRobin:
    """The rank that was chosen the longest time ago; new ranks come first.

    Remembers ranks rather than a position, so that candidates that come and go do not shift the turn.

    Args:
        rng: Orders ranks that were never chosen.
    """

    name = "round-robin"
    explain = staticmethod(explain_load)

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._turn = 0
        self._last: dict[RankKey, int] = {}

    def select(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Placement:
        """Choose by turn alone; ``request`` makes no difference."""
        del request
        if not candidates:
            raise ValueError("no candidates")
        self._turn += 1
        oldest = min(self._last.get(candidate.key, 0) for candidate in candidates)
        waiting = [candidate for candidate in candidates if self._last.get(candidate.key, 0) == oldest]
        chosen = waiting[0] if len(waiting) == 1 else self._rng.choice(waiting)
        self._last[chosen.key] = self._turn
        if len(self._last) > 4 * len(candidates) + 64:  # ranks of workers that are long gone
            live = {candidate.key for candidate in candidates}
            self._last = {key: turn for key, turn in self._last.items() if key in live}
        return Placement(chosen)

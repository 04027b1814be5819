"""Policy ``consistent-hash``: a session stays on its rank for as long as that rank is there. Pure."""

import random
from collections.abc import Sequence

import xxhash

from routers.explain import explain_load
from routers.least_loaded import LeastLoaded
from routers.types import Candidate, Placement, RouteRequest


class ConsistentHash:
    """Rendezvous hashing of the stickiness key: when ranks come or go, only the sessions of those move.

    Requests without a key go to the least loaded rank.

    Args:
        rng: Breaks ties of requests without a key.
    """

    name = "consistent-hash"
    explain = staticmethod(explain_load)

    def __init__(self, rng: random.Random) -> None:
        self._without_key = LeastLoaded(rng)

    def select(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Placement:
        """Choose by the request's key; the same in every gateway and after every restart."""
        if not candidates:
            raise ValueError("no candidates")
        if request.stickiness_key is None:
            return self._without_key.select(request, candidates)
        seed = xxhash.xxh3_64_intdigest(request.stickiness_key.encode("utf-8", "surrogatepass"))
        return Placement(max(candidates, key=lambda candidate: _weight(candidate, seed)))


def _weight(candidate: Candidate, seed: int) -> tuple[int, str, int]:
    worker_id, dp_rank = candidate.key
    return xxhash.xxh3_64_intdigest(f"{worker_id}/{dp_rank}".encode(), seed), worker_id, dp_rank

"""``python -m benchmarks.routing_micro``: what a choice, its booking and its prediction cost, in CPU time.

The ranks are busy: each holds the same shared prefix and 20 live prompts of its own. The prompt of 10,000 tokens shares
the prefix, which is the slow case: where the shared part ends must be searched on every rank.
"""

import random
from collections.abc import Callable
from typing import Final

from backends.types import EngineKind
from benchmarks.cpu_time import least_cpu_us
from benchmarks.routing_ranks import book_live, random_hashes
from kv_events.index_types import Overlap
from routers.assumed import PREDICTED_TTL_S, AssumedBlocks
from routers.kv_aware import KvAware
from routers.least_loaded import LeastLoaded
from routers.load import RankLoad
from routers.types import BlockGroup, Candidate, PromptBlocks, RankKey, RouteRequest

_GROUP: Final = BlockGroup(EngineKind.SGLANG, 16)
_TOKENS: Final = 10_000
_SHARED_BLOCKS: Final = 300
_REPEATS: Final = 9
_REPEAT_S: Final = 0.03
# Of a choice among 16, in microseconds.
_AIM_US: Final = 30.0


def _cpu_us(call: Callable[[], object]) -> float:
    return least_cpu_us(call, _REPEATS, _REPEAT_S)


def _busy_ranks(rng: random.Random, count: int, shared: list[int]) -> list[Candidate]:
    candidates = []
    for number in range(count):
        load = RankLoad()
        book_live(rng, load, shared, _TOKENS // 16 - len(shared))
        candidates.append(Candidate(RankKey(f"worker-{number}", 0), load, _GROUP))
    return candidates


def main() -> None:
    """Measure, and print a line for each figure."""
    rng = random.Random(1)
    shared = random_hashes(rng, _SHARED_BLOCKS)
    hashes = shared + random_hashes(rng, _TOKENS // 16 - len(shared))
    for count in (1, 4, 16, 64):
        candidates = _busy_ranks(rng, count, shared)
        overlap = Overlap({candidate.key: rng.randrange(_SHARED_BLOCKS) for candidate in candidates})
        request = RouteRequest(_TOKENS, None, {_GROUP: PromptBlocks(16, _TOKENS, hashes, overlap)})
        kv_aware, least_loaded = KvAware(rng), LeastLoaded(rng)
        took_us = _cpu_us(lambda: kv_aware.select(request, candidates))  # noqa: B023  # called at once
        plain_us = _cpu_us(lambda: least_loaded.select(request, candidates))  # noqa: B023
        aim = f"   aim {_AIM_US:.0f} us: {'met' if took_us <= _AIM_US else 'missed'}" if count == 16 else ""
        print(f"choice among {count:2}: {took_us:7.1f} us   least-loaded {plain_us:5.1f} us{aim}")
    load = candidates[0].load
    plain = _cpu_us(lambda: load.book(requests=1, blocks=625, prefill_tokens=9).release())
    known = _cpu_us(lambda: load.book(requests=1, blocks=625, prefill_tokens=9, block_hashes=hashes).release())
    new = len(hashes) - len(shared)
    print(f"booking and release: {plain:.2f} us without hashes, {known:.1f} us with {new} new blocks")
    predicted = AssumedBlocks(PREDICTED_TTL_S)
    for candidate in candidates[:16]:
        predicted.add(candidate.key, shared + random_hashes(rng, 325), 0.0)
    found = _cpu_us(lambda: predicted.overlap(hashes, 0.0))
    added = _cpu_us(lambda: predicted.withdraw(predicted.add(candidates[0].key, hashes, 0.0)))
    print(f"predictions: look-up on 16 ranks {found:.1f} us, adding and withdrawing 325 new blocks {added:.1f} us")


if __name__ == "__main__":
    main()

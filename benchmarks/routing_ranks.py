"""Busy ranks, alike for all benchmarks of what routing costs."""

import random
from collections.abc import Sequence
from typing import Final

from routers.load import RankLoad

_LIVE: Final = 20
_MAX_PREFILL_TOKENS: Final = 4_000


def random_hashes(rng: random.Random, count: int) -> list[int]:
    """Hashes of blocks that nobody else has."""
    return [rng.getrandbits(64) for _ in range(count)]


def book_live(rng: random.Random, load: RankLoad, shared: Sequence[int], own_blocks: int) -> None:
    """Book requests that run there for the rest of the benchmark.

    Args:
        rng: Makes their blocks, and how much of them is still to prefill.
        load: Of the rank.
        shared: Hashes of the blocks with which all their prompts begin.
        own_blocks: Further blocks of each.
    """
    for _ in range(_LIVE):
        hashes = [*shared, *random_hashes(rng, own_blocks)]
        load.book(
            requests=1,
            blocks=len(hashes),
            prefill_tokens=rng.randrange(_MAX_PREFILL_TOKENS),
            block_hashes=hashes,
        )

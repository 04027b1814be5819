"""``python -m benchmarks.routing_bound``: what caches can hit of a trace at most, whoever places its requests.

Caches alone, without load or time to compute: one as large as all together that drops what was used longest ago; one
that never drops anything; and several where a session stays where its cache is, under choices of where new prompts go.
The last of these choices knows from the whole trace how likely what would be dropped is to be asked for again.
"""

import argparse
import bisect
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from benchmarks.routing_traffic import TRACE_PIECE_TOKENS, trace_rows

# A prompt is taken to be of a session if more than the service's own first piece was seen before.
_OWN_PIECES: Final = 1
# Ahead of which what is dropped would have to be asked for again, to be missed.
_AHEAD_S: Final = 300.0
_MOST_TURNS: Final = 5
# Second, tokens of prompt and answer, and pieces of the prompt.
Row = tuple[float, int, int, list[int]]


class Cache:
    """Pieces in the order of their last use.

    Attributes:
        computed: Pieces put in so far that were not there.
        pieces: With the second of their last use, and the number of the session's turn.
        room: Pieces that it holds.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.computed = 0
        self.pieces: OrderedDict[int, tuple[float, int]] = OrderedDict()

    def leading(self, ids: Sequence[int]) -> int:
        """Leading pieces of a prompt that are there."""
        return next((index for index, one in enumerate(ids) if one not in self.pieces), len(ids))

    def put(self, ids: Sequence[int], at_s: float) -> int:
        """Compute a prompt; returns the leading pieces that were there."""
        found = self.leading(ids)
        turn = self.pieces[ids[found - 1]][1] + 1 if found > _OWN_PIECES else 0
        self.computed += len(ids) - found
        for one in reversed(ids):
            self.pieces[one] = (at_s, turn)
            self.pieces.move_to_end(one)
        while len(self.pieces) > self.room:
            self.pieces.popitem(last=False)
        return found

    def dropped_for(self, ids: Sequence[int]) -> list[tuple[float, int]]:
        """What would go if a prompt came."""
        missing = len(ids) - self.leading(ids)
        return list(islice(self.pieces.values(), max(0, missing - (self.room - len(self.pieces)))))


class Returns:
    """How likely a session's next turn comes soon, by its turns so far and the time since the last one."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._gaps_s: dict[int, list[float]] = defaultdict(list)
        self._turns: dict[int, int] = defaultdict(int)
        last: dict[int, tuple[float, int]] = {}
        has_returned: set[tuple[float, int, int]] = set()
        for at_s, _, _, ids in rows:
            found = next((index for index, one in enumerate(ids) if one not in last), len(ids))
            turn = 0
            if found > _OWN_PIECES:
                before_s, before = last[ids[found - 1]]
                turn = min(before + 1, _MOST_TURNS)
                if (before_s, before, ids[found - 1]) not in has_returned:
                    has_returned.add((before_s, before, ids[found - 1]))
                    self._gaps_s[before].append(at_s - before_s)
            self._turns[turn] += 1
            last.update(dict.fromkeys(ids, (at_s, turn)))
        for gaps in self._gaps_s.values():
            gaps.sort()

    def likely(self, age_s: float, turn: int) -> float:
        """Probability that it comes within the next minutes."""
        gaps = self._gaps_s[turn]
        past, soon = (bisect.bisect_right(gaps, seconds) for seconds in (age_s, age_s + _AHEAD_S))
        return (soon - past) / max(1, self._turns[turn] - past)


Choice = Callable[[Sequence[Cache], Sequence[int], float], Cache]


def choices(rng: random.Random, returns: Returns) -> dict[str, Choice]:
    """Where prompts go that no cache has the beginning of, by name."""

    def lost(cache: Cache, ids: Sequence[int], at_s: float) -> float:
        return sum(returns.likely(at_s - used_s, min(turn, _MOST_TURNS)) for used_s, turn in cache.dropped_for(ids))

    def oldest_s(cache: Cache) -> float:
        is_full = len(cache.pieces) >= cache.room
        return next(iter(cache.pieces.values()))[0] if is_full else float("-inf")

    return {
        "any": lambda caches, ids, at_s: rng.choice(caches),
        "fewest computed": lambda caches, ids, at_s: min(caches, key=lambda one: one.computed),
        "oldest dropped": lambda caches, ids, at_s: min(caches, key=lambda one: (oldest_s(one), one.computed)),
        "least missed": lambda caches, ids, at_s: min(caches, key=lambda one: (lost(one, ids, at_s), one.computed)),
    }


def hit_share(rows: Sequence[Row], caches: Sequence[Cache], choose: Choice) -> float:
    """Part of the prompts' tokens that is cached where they go."""
    hit = total = 0
    for at_s, length, _, ids in rows:
        best = max(caches, key=lambda one: one.leading(ids))
        cache = best if best.leading(ids) > _OWN_PIECES else choose(caches, ids, at_s)
        hit += min(length, cache.put(ids, at_s) * TRACE_PIECE_TOKENS)
        total += length
    return hit / max(1, total)


def _empty(caches: int, room: int) -> list[Cache]:
    return [Cache(room) for _ in range(caches)]


def main() -> None:
    """Print a table: a line for each window of the trace, and their mean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="recorded requests, JSON lines, perhaps compressed")
    parser.add_argument("--requests", type=int, default=2000, help="of a window")
    parser.add_argument("--step", type=int, default=1000, help="from the beginning of a window to that of the next")
    parser.add_argument("--caches", type=int, default=8)
    parser.add_argument("--cache-tokens", type=int, default=1_000_000, help="of each")
    options = parser.parse_args()
    rows = [(at_ms / 1000, length, output, ids) for at_ms, length, output, ids in trace_rows(options.trace)]
    room = options.cache_tokens // TRACE_PIECE_TOKENS
    by_name = choices(random.Random(1), Returns(rows))
    print("| first | one cache | endless | " + " | ".join(by_name) + " |\n" + "| --- " * (3 + len(by_name)) + "|")
    shares: list[list[float]] = []
    for first in range(0, len(rows) - options.requests, options.step):
        window = rows[first : first + options.requests]
        line = [hit_share(window, [Cache(size)], by_name["any"]) for size in (room * options.caches, 10**9)]
        line += [hit_share(window, _empty(options.caches, room), choose) for choose in by_name.values()]
        shares.append(line)
        print(f"| {first} | " + " | ".join(f"{share:.2%}" for share in line) + " |", flush=True)
    means = [sum(column) / len(column) for column in zip(*shares, strict=True)]
    print("| mean | " + " | ".join(f"{share:.2%}" for share in means) + " |")


if __name__ == "__main__":
    main()

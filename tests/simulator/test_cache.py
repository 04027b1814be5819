"""Prefix cache: against a naive model, and the cases that matter one by one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.cache import BASE, Lease, Namespace, PrefixCache
from tests.simulator.recording import Recorder

PAGE = 2


class NaiveCache:
    """The same promises with plain lists: blocks are whole prefixes, recency is a list."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.order: list[tuple[int, ...]] = []
        self.pins: dict[tuple[int, ...], int] = {}
        self.reserved = 0

    def prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[:end]) for end in range(PAGE, len(tokens) + 1, PAGE)]

    def match(self, tokens: list[int]) -> list[tuple[int, ...]]:
        found = []
        for prefix in self.prefixes(tokens):
            if prefix not in self.order:
                break
            found.append(prefix)
        return found

    def lease(self, tokens: list[int], total: int) -> tuple[list[tuple[int, ...]], int] | None:
        found = self.match(tokens)
        needed = -(-total // PAGE) - len(found)
        for prefix in found:
            self.pins[prefix] = self.pins.get(prefix, 0) + 1
        if sum(map(bool, self.pins.values())) + self.reserved + needed > self.num_blocks:
            for prefix in found:
                self.pins[prefix] -= 1
            return None
        while len(self.order) + self.reserved + needed > self.num_blocks:
            free = [p for p in self.order if not self.pins.get(p) and not self._has_child(p)]
            self.order.remove(free[0])
        self.reserved += needed
        return found, needed

    def release(self, tokens: list[int], held: list[tuple[int, ...]], reserved: int) -> None:
        held = list(held)
        for prefix in self.prefixes(tokens)[len(held) :]:
            if prefix not in self.order:
                self.order.append(prefix)
            self.pins[prefix] = self.pins.get(prefix, 0) + 1
            held.append(prefix)
        self.reserved -= reserved
        for prefix in reversed(held):
            self.pins[prefix] -= 1
            self.order.remove(prefix)
            self.order.append(prefix)

    def _has_child(self, prefix: tuple[int, ...]) -> bool:
        return any(len(other) == len(prefix) + PAGE and other[: len(prefix)] == prefix for other in self.order)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
ACTIONS = st.lists(st.tuples(st.sampled_from(["start", "keep", "end"]), PROMPTS, st.integers(0, 5)), max_size=40)


@settings(max_examples=300)
@given(ACTIONS)
def test_against_a_naive_model(actions: list[tuple[str, list[int], int]]) -> None:
    cache, naive = PrefixCache(8, PAGE), NaiveCache(8)
    open_leases: list[tuple[Lease, list[tuple[int, ...]], int, list[int]]] = []
    for action, prompt, extra in actions:
        if action == "start":
            lease = cache.lease(prompt, BASE, match_tokens=len(prompt), total_tokens=len(prompt) + extra)
            expected = naive.lease(prompt, len(prompt) + extra)
            assert (lease is None) == (expected is None)
            if lease is not None and expected is not None:
                assert lease.cached_tokens == len(expected[0]) * PAGE
                answer = [*prompt, *([0] * extra)]
                open_leases.append((lease, *expected, answer))
        elif open_leases:
            lease, held, reserved, answer = open_leases.pop(extra % len(open_leases))
            if action == "keep":  # what is kept is given back at the end
                assert cache.keep(lease, answer) == -(-len(answer) // PAGE)
                assert lease.reserved_blocks == len(answer) % PAGE
            cache.release(lease, answer)
            naive.release(answer, held, reserved)
        assert cache.stored_blocks == len(naive.order)
        assert cache.overlap_blocks(prompt) == len(naive.match(prompt))
    for lease, _, _, answer in open_leases:
        cache.release(lease, answer)
    assert cache.busy_blocks == 0


def test_a_kept_lease_holds_what_its_tokens_need_and_no_more() -> None:
    cache = PrefixCache(8, PAGE)
    lease = cache.lease([1, 2, 3, 4, 5], BASE, match_tokens=0, total_tokens=15)
    assert lease is not None
    assert cache.busy_blocks == 8
    assert cache.keep(lease, [1, 2, 3, 4, 5]) == cache.busy_blocks == 3
    assert cache.keep(lease, [1, 2, 3, 4, 5]) == cache.busy_blocks == 3
    assert cache.lease([9], BASE, match_tokens=0, total_tokens=12) is None
    cache.release(lease, [1, 2, 3, 4, 5])
    assert (cache.busy_blocks, cache.stored_blocks) == (0, 2)


def test_a_cache_that_stores_nothing_counts_room() -> None:
    cache = PrefixCache(4, PAGE, stores=False)
    lease = cache.lease([1, 2, 3], BASE, match_tokens=3, total_tokens=6)
    assert lease is not None
    cache.fill(lease, [1, 2, 3, 4])
    assert (cache.busy_blocks, cache.stored_blocks) == (3, 0)
    cache.release(lease, [1, 2, 3, 4, 5, 6])
    assert (cache.busy_blocks, cache.stored_blocks) == (0, 0)


def test_pinned_blocks_stay_and_too_much_is_refused() -> None:
    cache = PrefixCache(4, PAGE)
    lease = cache.lease([1, 2, 3, 4], BASE, match_tokens=4, total_tokens=6)
    assert lease is not None
    assert cache.lease([9] * 4, BASE, match_tokens=0, total_tokens=4) is None
    cache.release(lease, [1, 2, 3, 4])
    assert cache.lease([9] * 4, BASE, match_tokens=0, total_tokens=8) is not None
    assert cache.overlap_blocks([1, 2]) == 0


def test_namespaces_share_nothing() -> None:
    cache = PrefixCache(8, PAGE)
    lease = cache.lease([1, 2], Namespace("a"), match_tokens=2, total_tokens=2)
    assert lease is not None
    cache.release(lease, [1, 2])
    assert (cache.overlap_blocks([1, 2], Namespace("a")), cache.overlap_blocks([1, 2], Namespace("b"))) == (1, 0)


def test_partial_pages_are_not_stored_and_release_counts_once() -> None:
    cache = PrefixCache(8, PAGE)
    lease = cache.lease([1, 2, 3], BASE, match_tokens=3, total_tokens=3)
    assert lease is not None
    cache.release(lease, [1, 2, 3])
    cache.release(lease, [1, 2, 3])
    assert (cache.stored_blocks, cache.busy_blocks) == (1, 0)


def test_the_listener_hears_of_every_block() -> None:
    recorder = Recorder()
    cache = PrefixCache(2, PAGE, recorder)
    for prompt in ([1, 2, 3, 4], [5, 6]):
        lease = cache.lease(prompt, BASE, match_tokens=0, total_tokens=len(prompt))
        assert lease is not None
        cache.release(lease, prompt)
    cache.clear()
    assert recorder.heard == ["stored 2", "removed", "stored 1", "cleared"]


def test_a_refused_lease_does_not_count_as_use() -> None:
    cache = PrefixCache(4, PAGE)
    for prompt in ([1, 2], [3, 4]):
        lease = cache.lease(prompt, BASE, match_tokens=0, total_tokens=2)
        assert lease is not None
        cache.release(lease, prompt)
    assert cache.lease([1, 2, 5], BASE, match_tokens=2, total_tokens=11) is None
    lease = cache.lease([7, 8], BASE, match_tokens=0, total_tokens=6)
    assert lease is not None
    assert (cache.overlap_blocks([1, 2]), cache.overlap_blocks([3, 4])) == (0, 1)


def test_a_block_computed_again_is_kept_twice_where_the_engine_does_so() -> None:
    recorder = Recorder()
    cache = PrefixCache(5, PAGE, recorder, keeps_copies=True)
    prompt = [1, 2, 3, 4]
    for _ in range(2):
        lease = cache.lease(prompt, BASE, match_tokens=3, total_tokens=4)
        assert lease is not None
        cache.release(lease, prompt)
    assert cache.stored_blocks == 3
    # Two that compute the same at the same time share it.
    pair = [cache.lease([5, 6], BASE, match_tokens=1, total_tokens=2) for _ in range(2)]
    for lease in pair:
        assert lease is not None
        cache.release(lease, [5, 6])
    assert cache.stored_blocks == 4
    assert recorder.heard == ["stored 2", "stored 1", "stored 1"]
    lease = cache.lease([9] * 8, BASE, match_tokens=0, total_tokens=10)
    assert lease is not None
    assert (cache.stored_blocks, cache.overlap_blocks(prompt)) == (0, 0)
    assert recorder.heard[3:] == ["removed"] * 4

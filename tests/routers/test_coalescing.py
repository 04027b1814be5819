"""Prefills under way and who waits for them: against prompts that are compared block by block."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from routers.coalescing import Coalescing, Prefill, Waiting
from routers.types import RankKey

KEY = RankKey("w", 0)
BLOCK = 4
# Few different blocks, so that prompts begin alike.
PROMPTS = st.lists(st.integers(0, 2), max_size=8).map(tuple)


def hashes_of(prompt: Sequence[object]) -> list[int]:
    """Chained hashes of a prompt's blocks: each stands for its own block and all before it."""
    return [hash(tuple(prompt[: index + 1])) for index in range(len(prompt))]


def common(one: Sequence[object], other: Sequence[object]) -> int:
    """Leading blocks that two prompts have in common, one by one."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in same)


def nothing() -> int:
    return 0


def unasked() -> int:
    raise AssertionError("the rank's cache was asked for in vain")


def gone() -> None:
    raise AssertionError("it has left and goes all the same")


@given(PROMPTS, PROMPTS)
def test_what_two_prompts_share(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    prefill = Prefill(KEY, hashes_of(one), 0)
    assert prefill.shared_blocks(hashes_of(other)) == common(one, other)


@pytest.mark.parametrize("min_tokens", [0, -1])
def test_to_wait_for_nothing_is_refused(min_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"min_tokens is {min_tokens}, must be at least 1"):
        Coalescing(min_tokens)


# Tokens that are worth to be waited for, by tokens of a block, into blocks.
LEAST = {"one token": (1, 4, 1), "a block": (4, 4, 1), "a token more": (5, 4, 2), "blocks": (512, 64, 8),
         "a bit less": (511, 64, 8), "less than a block": (16, 64, 1), "blocks of one token": (3, 1, 3)}  # fmt: skip


@pytest.mark.parametrize("case", LEAST)
def test_tokens_are_rounded_up_to_blocks(case: str) -> None:
    min_tokens, block_size, least = LEAST[case]
    coalescing, prompt = Coalescing(min_tokens), hashes_of(range(20))
    assert coalescing.begin(KEY, prompt[: least - 1], block_size, 0) is None
    assert len(coalescing) == 0
    prefill = coalescing.begin(KEY, prompt, block_size, 0)
    assert prefill is not None
    for shared in range(20):
        asked = [*prompt[:shared], *hashes_of(["other"] * 3)]
        assert coalescing.shared_with(KEY, asked, block_size, nothing) is (prefill if shared >= least else None), shared
    # It goes when less than that is left to be computed.
    went: list[bool] = []
    coalescing.wait(prefill, prompt[:15], block_size, lambda: went.append(True))
    coalescing.progressed(prefill, 15 - least)
    assert not went
    coalescing.progressed(prefill, 15 - least + 1)
    assert went == [True]


# Blocks that are worth it are 2. Of the first prompt: blocks, and cached. Of the second: in common, and cached.
SHARES: dict[str, tuple[int, int, int, int, bool]] = {
    "nothing is there": (8, 0, 8, 0, True),
    "just enough": (8, 0, 2, 0, True),
    "too little in common": (8, 0, 1, 0, False),
    "what is shared was cached before": (8, 4, 4, 0, False),
    "all but one block was cached before": (8, 4, 5, 0, False),
    "all but two were cached before": (8, 4, 6, 0, True),
    "the cache has it by now": (8, 0, 8, 8, False),
    "the cache has all but one by now": (8, 0, 8, 7, False),
    "the cache has all but two by now": (8, 0, 8, 6, True),
    "the cache knows less than was assumed": (8, 4, 6, 2, True),
}


@pytest.mark.parametrize("case", SHARES)
def test_what_is_worth_to_be_waited_for(case: str) -> None:
    blocks, cached, shared, found, is_worth_it = SHARES[case]
    coalescing, prompt = Coalescing(2 * BLOCK), hashes_of(range(blocks))
    prefill = coalescing.begin(KEY, prompt, BLOCK, cached)
    assert prefill is not None
    asked = [*prompt[:shared], *hashes_of(["other"] * 3)]
    assert (coalescing.shared_with(KEY, asked, BLOCK, lambda: found) is prefill) is is_worth_it


def test_a_prompt_that_is_nearly_cached_is_no_prefill() -> None:
    coalescing, prompt = Coalescing(2 * BLOCK), hashes_of(range(8))
    assert coalescing.begin(KEY, prompt, BLOCK, 7) is None
    assert coalescing.begin(KEY, prompt, BLOCK, 6) is not None


def test_the_cache_is_asked_for_once_and_only_where_it_matters() -> None:
    coalescing, prompt = Coalescing(2 * BLOCK), hashes_of(range(8))
    assert coalescing.shared_with(KEY, prompt, BLOCK, unasked) is None
    for other in (["other"] * 8, ["another"] * 8):
        coalescing.begin(KEY, hashes_of(other), BLOCK, 0)
    nearly = coalescing.begin(KEY, prompt, BLOCK, 6)
    assert nearly is not None
    assert coalescing.shared_with(KEY, prompt[:7], BLOCK, unasked) is None
    assert coalescing.shared_with(RankKey("w", 1), prompt, BLOCK, unasked) is None
    coalescing.end(nearly)
    coalescing.begin(KEY, prompt[:4], BLOCK, 0)
    oldest = coalescing.begin(KEY, prompt, BLOCK, 0)
    asked: list[bool] = []

    def cached() -> int:
        asked.append(True)
        return 3

    assert coalescing.shared_with(KEY, prompt, BLOCK, cached) is oldest
    assert asked == [True]


def test_the_oldest_is_waited_for() -> None:
    coalescing, prompt = Coalescing(BLOCK), hashes_of(range(4))
    first, second = (coalescing.begin(KEY, prompt, BLOCK, 0) for _ in range(2))
    assert first is not None
    assert coalescing.shared_with(KEY, prompt, BLOCK, nothing) is first
    coalescing.end(first)
    assert coalescing.shared_with(KEY, prompt, BLOCK, nothing) is second


def test_they_go_in_the_order_in_which_they_came() -> None:
    coalescing, prompt = Coalescing(BLOCK), hashes_of(range(8))
    prefill = coalescing.begin(KEY, prompt, BLOCK, 0)
    assert prefill is not None
    went: list[str] = []
    for name, blocks in (("a", 8), ("b", 2), ("c", 4), ("d", 2), ("e", 8)):
        coalescing.wait(prefill, prompt[:blocks], BLOCK, lambda name=name: went.append(name))  # type: ignore[misc]
    coalescing.progressed(prefill, 1)
    assert went == []
    coalescing.progressed(prefill, 4)
    assert went == ["b", "c", "d"]
    coalescing.progressed(prefill, 2)  # a later word of less
    assert (went, prefill.cached_blocks, coalescing.waiting) == (["b", "c", "d"], 4, 2)
    coalescing.end(prefill)
    coalescing.end(prefill)
    assert went == ["b", "c", "d", "a", "e"]
    assert (len(coalescing), coalescing.waiting) == (0, 0)


def test_who_has_left_or_gone_does_neither_again() -> None:
    coalescing, prompt = Coalescing(BLOCK), hashes_of(range(4))
    prefill = coalescing.begin(KEY, prompt, BLOCK, 0)
    assert prefill is not None
    left = coalescing.wait(prefill, prompt, BLOCK, gone)
    went: list[bool] = []
    late = coalescing.wait(prefill, prompt, BLOCK, lambda: went.append(True))
    for _ in range(2):
        left.leave()
        left.go()
        late.go()
        late.leave()
    coalescing.progressed(prefill, 4)
    coalescing.end(prefill)
    assert went == [True]


@pytest.mark.parametrize("how", ["progressed", "end"])
def test_one_that_goes_may_have_another_one_leave(how: str) -> None:
    coalescing, prompt = Coalescing(BLOCK), hashes_of(range(4))
    prefill = coalescing.begin(KEY, prompt, BLOCK, 0)
    assert prefill is not None
    waiting: list[Waiting] = []
    coalescing.wait(prefill, prompt, BLOCK, lambda: waiting[0].leave())
    waiting.append(coalescing.wait(prefill, prompt, BLOCK, gone))
    if how == "end":
        coalescing.end(prefill)
    else:
        coalescing.progressed(prefill, 4)
    assert coalescing.waiting == 0


def test_workers_and_ranks_are_told_apart() -> None:
    coalescing, prompt = Coalescing(BLOCK), hashes_of(range(4))
    keys = [RankKey("w", 0), RankKey("w", 1), RankKey("v", 0)]
    prefills = [coalescing.begin(key, prompt, BLOCK, 0) for key in keys]
    for key, prefill in zip(keys, prefills, strict=True):
        assert coalescing.shared_with(key, prompt, BLOCK, nothing) is prefill
    assert coalescing.on("w") == prefills[:2]
    assert (coalescing.on("v"), coalescing.on("u")) == (prefills[2:], [])


# Against a model.


@dataclass(eq=False)
class Computed:
    """A prefill of the model."""

    real: Prefill
    key: RankKey
    prompt: tuple[int, ...]
    cached: int


@dataclass(eq=False)
class Waits:
    """A request of the model."""

    on: Computed
    real: Waiting
    needs: int
    number: int


class Model(RuleBasedStateMachine):
    """Prompts in place of hashes, and lists that are gone through."""

    def __init__(self) -> None:
        super().__init__()
        self.least = 2
        self.coalescing = Coalescing(self.least * BLOCK - 1)
        self.computed: list[Computed] = []
        self.waits: list[Waits] = []
        self.went: list[int] = []
        self.count = 0

    keys = st.sampled_from([RankKey("w", 0), RankKey("w", 1), RankKey("v", 0)])

    @rule(key=keys, prompt=PROMPTS, cached=st.integers(0, 8))
    def begin(self, key: RankKey, prompt: tuple[int, ...], cached: int) -> None:
        cached = min(cached, len(prompt))
        prefill = self.coalescing.begin(key, hashes_of(prompt), BLOCK, cached)
        assert (prefill is None) is (len(prompt) - cached < self.least)
        if prefill is not None:
            self.computed.append(Computed(prefill, key, prompt, cached))

    @rule(key=keys, prompt=PROMPTS, found=st.integers(0, 8))
    def request(self, key: RankKey, prompt: tuple[int, ...], found: int) -> None:
        wanted = [
            one
            for one in self.computed
            if one.key == key and common(one.prompt, prompt) - max(found, one.cached) >= self.least
        ]
        prefill = self.coalescing.shared_with(key, hashes_of(prompt), BLOCK, lambda: found)
        assert prefill is (wanted[0].real if wanted else None)
        if prefill is not None:
            self._wait(wanted[0], prefill, prompt)

    def _wait(self, one: Computed, prefill: Prefill, prompt: tuple[int, ...]) -> None:
        number, self.count = self.count, self.count + 1
        waiting = self.coalescing.wait(prefill, hashes_of(prompt), BLOCK, self._goes(number))
        needs = common(one.prompt, prompt) - self.least + 1
        self.waits.append(Waits(one, waiting, needs, number))

    def _goes(self, number: int) -> Callable[[], None]:
        return lambda: self.went.append(number)

    def _expect(self, gone: list[Waits]) -> None:
        """Those have gone, in this order, and nobody else."""
        assert self.went == [one.number for one in gone]
        self.went.clear()
        self.waits = [one for one in self.waits if one not in gone]

    @precondition(lambda self: self.computed)
    @rule(data=st.data(), blocks=st.integers(0, 8))
    def progress(self, data: st.DataObject, blocks: int) -> None:
        one = data.draw(st.sampled_from(self.computed))
        one.cached = max(one.cached, blocks)
        self.coalescing.progressed(one.real, blocks)
        self._expect([wait for wait in self.waits if wait.on is one and wait.needs <= one.cached])

    @precondition(lambda self: self.computed)
    @rule(data=st.data(), again=st.booleans())
    def end(self, data: st.DataObject, again: bool) -> None:
        one = data.draw(st.sampled_from(self.computed))
        self.computed.remove(one)
        for _ in range(1 + again):
            self.coalescing.end(one.real)
        self._expect([wait for wait in self.waits if wait.on is one])

    @precondition(lambda self: self.waits)
    @rule(data=st.data(), goes=st.booleans())
    def leave(self, data: st.DataObject, goes: bool) -> None:
        wait = data.draw(st.sampled_from(self.waits))
        if goes:
            wait.real.go()
            self._expect([wait])
        wait.real.leave()
        wait.real.go()
        self._expect([])
        self.waits = [one for one in self.waits if one is not wait]

    @invariant()
    def counts(self) -> None:
        assert len(self.coalescing) == len(self.computed)
        assert self.coalescing.waiting == len(self.waits)
        for worker in ("w", "v"):
            known = {id(one.real) for one in self.computed if one.key.worker_id == worker}
            assert {id(prefill) for prefill in self.coalescing.on(worker)} == known

    def teardown(self) -> None:
        for one in list(self.computed):
            self.coalescing.end(one.real)
            self._expect([wait for wait in self.waits if wait.on is one])
        assert (len(self.coalescing), self.coalescing.waiting, self.waits) == (0, 0, [])
        assert not self.coalescing._prefills


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)

"""The policy ``kv-aware``: costs into choices, ties, temperature, the guard against crowds, and what is not known."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.types import EngineKind
from kv_events.index_types import Overlap
from routers.cost import Cost, CostParameters, placement_cost
from routers.explain import Explained
from routers.kv_aware import Guard, KvAware, Recompute
from routers.load import RankLoad
from routers.prefill_pace import PrefillPace
from routers.types import BlockGroup, Candidate, PromptBlocks, RankKey, RouteRequest

GROUP = BlockGroup(EngineKind.SGLANG, 16)
WIDE = BlockGroup(EngineKind.VLLM, 64)


# The published weights alone, without what blocks count for that others have.
PLAIN = CostParameters(recompute_weight=0.0)


def ranks(count: int, group: BlockGroup | None = GROUP) -> list[Candidate]:
    """Idle ranks ``w0``, ``w1``, …"""
    return [Candidate(RankKey(f"w{index}", 0), RankLoad(), group) for index in range(count)]


def busy(candidate: Candidate, requests: int = 1, tokens: int = 0, blocks: int = 0) -> None:
    """Book something."""
    candidate.load.book(requests=requests, blocks=blocks, prefill_tokens=tokens)


def request(tokens: int = 160, group: BlockGroup = GROUP, **tiers: Any) -> RouteRequest:
    """A request of which ranks hold some blocks: worker to number, by tier."""
    by_rank: dict[str, Any] = {tier: {(name, 0): n for name, n in held.items()} for tier, held in tiers.items()}
    overlap = Overlap(**by_rank)
    hashes = [10**6 + index for index in range(tokens // group.block_size)]
    return RouteRequest(tokens, None, {group: PromptBlocks(group.block_size, tokens, hashes, overlap)})


def chosen(candidates: list[Candidate], asked: RouteRequest, policy: KvAware | None = None) -> str:
    """Where it goes."""
    return (policy or KvAware(random.Random(1), PLAIN)).select(asked, candidates).candidate.key.worker_id


@pytest.mark.parametrize(
    ("loads", "tiers", "where"),
    [
        pytest.param([{}, {}, {}], {"device": {"w1": 1}}, "w1", id="cached"),
        pytest.param([{}, {}, {}], {"device": {"w1": 4, "w2": 5}}, "w2", id="more is cached"),
        pytest.param([{"tokens": 16}, {"tokens": 32}, {}], {}, "w2", id="nothing to prefill"),
        pytest.param([{"blocks": 3}, {"blocks": 2}, {"blocks": 4}], {}, "w1", id="fewest blocks"),
        pytest.param([{"blocks": 11}, {}, {}], {"device": {"w0": 10}}, "not w0", id="cached but busy"),
        pytest.param([{"blocks": 9}, {}, {}], {"device": {"w0": 10}}, "w0", id="cached and less busy"),
        pytest.param([{}, {}, {}], {"device": {"w0": 3}, "host": {"w1": 5}}, "w1", id="host memory is worth less"),
        pytest.param([{}, {}, {}], {"device": {"w0": 4}, "host": {"w1": 5}}, "w0", id="but not nothing"),
        pytest.param([{}, {}, {}], {"device": {"w0": 2, "w1": 2}, "disk": {"w1": 9, "w0": 2}}, "w1", id="disk"),
        pytest.param([{}, {}, {}], {"host": {"w0": 9, "w1": 9}, "disk": {"w0": 9, "w1": 10}}, "w1",
                     id="disk beyond host"),
        pytest.param([{"requests": 2}, {"requests": 1}, {"requests": 2}], {}, "w1", id="a tie: fewest in flight"),
        pytest.param([{"requests": 9}, {}, {}], {"device": {"w0": 10}}, "not w0", id="cached but crowded"),
        pytest.param([{"requests": 5}, {}, {}], {"device": {"w0": 10}}, "w0", id="cached and not yet crowded"),
        pytest.param([{"requests": 9}, {"blocks": 99}, {"blocks": 99}], {}, "w0", id="crowded but not for its cache"),
    ],
)  # fmt: skip
def test_choice(loads: list[dict[str, int]], tiers: dict[str, Any], where: str) -> None:
    candidates = ranks(3)
    for candidate, load in zip(candidates, loads, strict=True):
        busy(candidate, **{"requests": 1, **load})
    found = chosen(candidates, request(**tiers))
    assert found != where[4:] if where.startswith("not ") else found == where


def test_a_placement_says_what_was_found() -> None:
    asked = request(device={"w1": 7})
    placement = KvAware(random.Random(1)).select(asked, ranks(3))
    assert placement.overlap_blocks == 7
    assert placement.prompt is asked.prompts[GROUP]
    assert placement.prompt.uncached_tokens(7) == 160 - 7 * 16
    assert (placement.prompt.full_blocks, PromptBlocks(16, 161).capacity_blocks) == (10, 11)


def test_blocks_that_live_requests_share_cost_nothing_more() -> None:
    candidates = ranks(2)
    asked = request()
    blocks = asked.prompts[GROUP].sequence_hashes
    candidates[1].load.book(requests=1, blocks=10, prefill_tokens=0, block_hashes=blocks)
    busy(candidates[0], blocks=1)
    assert chosen(candidates, asked) == "w1"


def test_what_a_cache_saves_loses_weight_where_most_prefill_waits() -> None:
    candidates = ranks(2)
    for candidate, tokens in zip(candidates, (160 + 64, 64), strict=True):
        busy(candidate, tokens=tokens)
    busy(candidates[1], blocks=6)
    assert chosen(candidates, request(device={"w0": 9})) == "w0"
    # 160 tokens behind, which is one prompt: half the credit is left.
    decaying = KvAware(random.Random(1), replace(PLAIN, overlap_score_credit_decay=1.0, prefill_load_scale=2.0))
    costs = [one.parts.credit_blocks for one in decaying.explain(request(device={"w0": 9}), candidates) if one.parts]
    assert costs == [4.5, 0.0]
    assert chosen(candidates, request(device={"w0": 9}), decaying) == "w1"


def test_what_one_has_is_not_lightly_computed_by_another() -> None:
    candidates = ranks(3)
    policy = KvAware(random.Random(1))
    asked = request(device={"w0": 10, "w1": 2})
    busy(candidates[0], blocks=135)  # against 16 blocks for each of the eight that the second would compute anew
    assert chosen(candidates, asked, policy) == "w0"
    assert [one.cost for one in policy.explain(asked, candidates)] == [145, 18 + 8 * 16, 20 + 160]
    busy(candidates[0], blocks=2)
    assert chosen(candidates, asked, policy) == "w1"
    # Where nobody has anything, and for whoever has most, the cost is that of the published weights.
    for one in (request(), request(device={"w2": 4})):
        found, plain = (policy.explain(one, candidates), KvAware(random.Random(1), PLAIN).explain(one, candidates))
        assert found[2] == plain[2]
        assert (found == plain) is (one.prompts[GROUP].overlap.device == {})


# Blocks that four ranks have of a prompt of ten, and how many of what each lacks count for more.
LACKS: dict[str, tuple[tuple[int, int, int, int], tuple[int, int, int, int]]] = {
    "nobody has any": ((0, 0, 0, 0), (0, 0, 0, 0)),
    "one has a history": ((9, 0, 0, 0), (0, 9, 9, 9)),
    "half have it": ((9, 9, 0, 0), (0, 0, 9, 9)),
    "most have it": ((9, 9, 9, 0), (0, 0, 0, 0)),
    "a history behind what most have": ((9, 4, 4, 0), (0, 5, 5, 5)),
    "two histories behind what all have": ((9, 7, 4, 4), (0, 2, 5, 5)),
}


@pytest.mark.parametrize("case", LACKS)
def test_what_counts_for_more_where_it_is_computed_anew(case: str) -> None:
    held, rare = LACKS[case]
    asked = request(device={f"w{number}": blocks for number, blocks in enumerate(held)})
    missing: dict[Recompute, tuple[int, ...]] = {"all": tuple(max(held) - blocks for blocks in held), "rare": rare}
    for recompute, counted in missing.items():
        policy = KvAware(random.Random(1), CostParameters(recompute_weight=1000.0), recompute=recompute)
        costs = [one.cost or 0.0 for one in policy.explain(asked, ranks(4))]
        assert costs == [10 - blocks + 10 + 1000 * lacks for blocks, lacks in zip(held, counted, strict=True)]


@pytest.mark.parametrize(("recompute", "where"), [("all", {"w0", "w1", "w2"}), ("rare", {"w3"})], ids=["all", "rare"])
def test_a_rank_that_has_just_started_gets_its_share_of_a_prompt_that_all_share(
    recompute: Recompute, where: set[str]
) -> None:
    candidates, asked = ranks(4), request(1600, device={"w0": 9, "w1": 9, "w2": 9})
    for candidate in candidates[:3]:
        busy(candidate, requests=2, blocks=20, tokens=320)
    assert chosen(candidates, asked, KvAware(random.Random(1), recompute=recompute)) in where


def test_samples_of_one_prompt_gather_while_the_first_is_computed() -> None:
    candidates = ranks(4)
    policy = KvAware(random.Random(1))
    first = policy.select(request(), candidates).candidate
    busy(first, tokens=160, blocks=10)
    asked = request(device={first.key.worker_id: 10})  # as predicted
    assert chosen(candidates, asked, policy) == first.key.worker_id


def test_no_candidates() -> None:
    with pytest.raises(ValueError, match="no candidates"):
        KvAware(random.Random(1)).select(request(), [])
    assert KvAware(random.Random(1)).explain(request(), []) == []


# Ties and temperature.


def test_a9_3_ties_go_to_any_of_the_best_by_the_seed_and_to_no_other() -> None:
    candidates = ranks(5)
    busy(candidates[1], requests=2)
    busy(candidates[3], blocks=1)
    runs = []
    for _ in range(2):
        policy = KvAware(random.Random(7))
        runs.append([chosen(candidates, request(), policy) for _ in range(300)])
    assert runs[0] == runs[1]
    counts = Counter(runs[0])
    assert set(counts) == {"w0", "w2", "w4"}
    assert min(counts.values()) > 60


@pytest.mark.parametrize("temperature", [0.2, 1.0, 5.0])
def test_a9_4_frequencies_follow_the_softmax(temperature: float) -> None:
    candidates, draws = ranks(4), 4_000
    for candidate, blocks in zip(candidates, (0, 3, 6, 12), strict=True):
        busy(candidate, blocks=blocks)
    policy = KvAware(random.Random(3), temperature=temperature)
    counts = Counter(chosen(candidates, request(), policy) for _ in range(draws))
    weights = [math.exp(-share / temperature) for share in (0, 0.25, 0.5, 1)]
    for index, weight in enumerate(weights):
        share = weight / sum(weights)
        sigma = math.sqrt(draws * share * (1 - share))
        assert abs(counts[f"w{index}"] - draws * share) <= 3 * sigma


def test_a_temperature_leaves_the_guard_alone_and_equal_costs_equal() -> None:
    candidates = ranks(3)
    busy(candidates[0], requests=9)
    policy = KvAware(random.Random(1), temperature=100.0)
    counts = Counter(chosen(candidates, request(device={"w0": 10}), policy) for _ in range(300))
    assert set(counts) == {"w1", "w2"}
    assert min(counts.values()) > 100
    assert chosen(candidates[:1], request(), policy) == "w0"


@pytest.mark.parametrize("temperature", [-0.1, math.inf, math.nan])
def test_temperatures_without_meaning_are_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature is"):
        KvAware(random.Random(1), temperature=temperature)


# The guard against crowds. One rank has nine requests, where the mean is three; by cost alone it would be chosen.

CROWD: dict[str, tuple[dict[str, Any], int]] = {
    "own history": ({"device": {"w0": 10, "w1": 4, "w2": 4}}, 4),
    "own history in host memory": ({"device": {"w0": 2, "w1": 4}, "host": {"w0": 10}}, 2),
    "half is elsewhere": ({"device": {"w0": 10, "w1": 5}}, 0),
    "half is elsewhere, on disk": ({"device": {"w0": 10}, "disk": {"w1": 5}}, 0),
    "half is in use": ({"device": {"w0": 10}}, 5),
    "all that it has others have": ({"device": {"w0": 3, "w1": 3, "w2": 3}}, 0),
}


@pytest.mark.parametrize("guard", ["all", "shared"])
@pytest.mark.parametrize("case", CROWD)
def test_the_guard(guard: Guard, case: str) -> None:
    tiers, used = CROWD[case]
    candidates, asked = ranks(3), request(**tiers)
    for candidate, requests in zip(candidates, (8, 0, 0), strict=True):
        busy(candidate, requests=requests or 1)
    hashes = asked.prompts[GROUP].sequence_hashes[:used]
    candidates[0].load.book(requests=1, blocks=used, prefill_tokens=0, block_hashes=hashes)
    policy = KvAware(random.Random(1), guard=guard)
    first = policy.explain(asked, candidates)[0]
    is_kept = guard == "shared" and case.startswith("own history")
    assert (chosen(candidates, asked, policy) == "w0") is is_kept
    assert (first.excluded, first.is_kept) == ((None, True) if is_kept else ("crowded", False))
    candidates[1].load.book(requests=9, blocks=0, prefill_tokens=0)  # the mean is higher: the first is not crowded
    first = policy.explain(asked, candidates)[0]
    assert (first.excluded, first.is_kept) == (None, False)


# The limit of waiting. A hundred blocks are on the first of three ranks, so that 1,600 tokens are computed elsewhere;
# case to: limit, tokens to prefill on each rank, which are too late, and where the request goes.

WAITS: dict[str, tuple[int, tuple[int, int, int], set[str], str]] = {
    "no limit": (0, (10**6, 0, 160), set(), "w0"),
    "waits no longer than computing anew takes": (1, (1600, 0, 160), {"w2"}, "w0"),
    "waits for as long as it may": (800, (2400, 0, 160), set(), "w0"),
    "would wait longer": (800, (2401, 0, 160), {"w0"}, "w1"),
    "others would wait longer than the one with the cache": (800, (0, 0, 160), {"w1", "w2"}, "w0"),
    "only the soonest is left": (1, (2401, 160, 0), {"w0", "w1"}, "w2"),
}


@pytest.mark.parametrize("case", WAITS)
@pytest.mark.parametrize("guard", ["all", "shared"])
def test_the_limit_of_waiting(guard: Guard, case: str) -> None:
    limit, tokens, late, where = WAITS[case]
    candidates, asked = ranks(3), request(1600, device={"w0": 100})
    for candidate, waiting in zip(candidates, tokens, strict=True):
        busy(candidate, tokens=waiting)
    policy = KvAware(random.Random(1), CostParameters(recompute_weight=1000.0), guard=guard, max_wait_tokens=limit)
    assert chosen(candidates, asked, policy) == where
    assert {one.worker_id for one in policy.explain(asked, candidates) if one.excluded == "late"} == late


# Tokens and ratio; prefill in tokens, and blocks that are cached, of three ranks; who is late, and where it goes.
RATIOS: dict[str, tuple[int, float, tuple[int, int, int], tuple[int, int, int], set[str], str]] = {
    "no limit": (0, 0.0, (10**6, 0, 160), (100, 0, 0), set(), "w0"),
    "waits for as long as it may": (0, 2.0, (4800, 0, 160), (100, 0, 0), set(), "w0"),
    "would wait longer": (0, 2.0, (4801, 0, 160), (100, 0, 0), {"w0"}, "w1"),
    "who saves less is not limited": (0, 0.001, (0, 10**6, 160), (100, 0, 0), set(), "w0"),
    "who saves as much is not limited": (0, 0.001, (10**6, 0, 10**6), (100, 100, 0), set(), "w1"),
    "what is saved more waits": (0, 1.0, (1600, 0, 10**5), (100, 50, 0), set(), "w0"),
    "what is saved more would wait longer": (0, 1.0, (1601, 0, 10**5), (100, 50, 0), {"w0"}, "w1"),
    "who saves less than others may be the soonest": (0, 1.0, (9999, 3300, 0), (100, 50, 0), {"w0", "w1"}, "w2"),
    "in time by both": (500, 2.0, (2100, 0, 160), (100, 0, 0), set(), "w0"),
    "late by tokens alone": (500, 2.0, (2101, 0, 160), (100, 0, 0), {"w0"}, "w1"),
    "in time by a low ratio": (10**6, 0.5, (2400, 0, 160), (100, 0, 0), set(), "w0"),
    "late by ratio alone": (10**6, 0.5, (2401, 0, 160), (100, 0, 0), {"w0"}, "w1"),
    "tokens limit who saves less": (100, 2.0, (0, 0, 160), (100, 0, 0), {"w1", "w2"}, "w0"),
}


def waiting(tokens: Sequence[int], cached: Sequence[int]) -> tuple[list[Candidate], RouteRequest]:
    """Ranks that have to compute so many tokens and hold so many blocks of a request, and that request."""
    candidates = ranks(len(tokens))
    for candidate, one in zip(candidates, tokens, strict=True):
        busy(candidate, tokens=one)
    return candidates, request(1600, device={f"w{index}": blocks for index, blocks in enumerate(cached) if blocks})


@pytest.mark.parametrize("case", RATIOS)
@pytest.mark.parametrize("guard", ["all", "shared"])
def test_the_limit_of_waiting_for_what_is_saved(guard: Guard, case: str) -> None:
    limit, ratio, tokens, cached, late, where = RATIOS[case]
    candidates, asked = waiting(tokens, cached)
    policy = KvAware(
        random.Random(1),
        CostParameters(recompute_weight=1000.0),
        guard=guard,
        max_wait_tokens=limit,
        max_wait_ratio=ratio,
    )
    assert chosen(candidates, asked, policy) == where
    assert {one.worker_id: one.excluded for one in policy.explain(asked, candidates)} == {
        name: "late" if name in late else None for name in ("w0", "w1", "w2")
    }


@given(
    tokens=st.lists(st.integers(0, 5000), min_size=3, max_size=3),
    cached=st.lists(st.integers(0, 100), min_size=3, max_size=3),
    limit=st.sampled_from([0, 1, 500, 4000]),
    ratio=st.sampled_from([0.0, 0.25, 1.0, 4.0]),
)
def test_who_is_late_is_told_one_by_one(tokens: list[int], cached: list[int], limit: int, ratio: float) -> None:
    candidates, asked = waiting(tokens, cached)
    policy = KvAware(random.Random(1), max_wait_tokens=limit, max_wait_ratio=ratio)
    excluded = [one.excluded for one in policy.explain(asked, candidates)]
    until_first = [waits + 1600 - 16 * blocks for waits, blocks in zip(tokens, cached, strict=True)]
    soonest = until_first.index(min(until_first))
    for index, (ahead, blocks) in enumerate(zip(until_first, cached, strict=True)):
        longer, saved = ahead - until_first[soonest], 16 * (blocks - cached[soonest])
        is_late = (limit > 0 and longer > limit) or (ratio > 0 and saved > 0 and longer > ratio * saved)
        assert excluded[index] == ("late" if is_late else None)
    assert excluded[int(chosen(candidates, asked, policy)[1:])] is None


@pytest.mark.parametrize("ratio", [-1.0, -0.001, math.inf, -math.inf, math.nan])
def test_a_ratio_that_is_none_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match=f"max_wait_ratio is {ratio}, must be finite and at least 0"):
        KvAware(random.Random(1), max_wait_ratio=ratio)


def test_who_is_crowded_does_not_make_the_others_late() -> None:
    candidates, asked = ranks(2), request(1600, device={"w0": 100})
    busy(candidates[0], requests=9)
    busy(candidates[1], tokens=10_000)
    policy = KvAware(random.Random(1), max_wait_tokens=100)
    assert [one.excluded for one in policy.explain(asked, candidates)] == ["crowded", None]
    assert chosen(candidates, asked, policy) == "w1"


def test_waits_are_compared_in_tokens_whatever_the_size_of_blocks() -> None:
    narrow, wide = ranks(1)[0], Candidate(RankKey("v", 0), RankLoad(), WIDE)
    busy(narrow, tokens=1000)
    asked = RouteRequest(640, None, {**request(640).prompts, WIDE: PromptBlocks(64, 640, range(10))})
    for limit, late in ((999, ["late", None]), (1000, [None, None])):
        policy = KvAware(random.Random(1), max_wait_tokens=limit)
        assert [one.excluded for one in policy.explain(asked, [narrow, wide])] == late


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="max_wait_tokens is -1"):
        KvAware(random.Random(1), max_wait_tokens=-1)


def test_prefill_counts_by_what_is_left_of_it() -> None:
    time, candidates = [0.0], ranks(2)
    for candidate in candidates:
        candidate.load.pace = PrefillPace(lambda: time[0])
    first = candidates[0].load.book(requests=1, blocks=0, prefill_tokens=1600)
    time[0] = 1.0
    first.first_token()
    busy(candidates[0], tokens=1600)
    busy(candidates[1], tokens=1200)
    assert chosen(candidates, request(160)) == "w1"
    time[0] = 1.5
    assert chosen(candidates, request(160)) == "w0"  # half of it is done; what w1 does is not known
    explained = KvAware(random.Random(1), PLAIN).explain(request(160), candidates)
    assert [one.active_prefill_tokens for one in explained] == [800, 1200]


# What is not known.


def test_without_blocks_the_least_loaded_is_chosen() -> None:
    candidates = ranks(3)
    for candidate, (requests, tokens) in zip(candidates, ((2, 0), (1, 10), (1, 9)), strict=True):
        busy(candidate, requests=requests, tokens=tokens)
    placement = KvAware(random.Random(1)).select(RouteRequest(160), candidates)
    assert placement.candidate is candidates[2]
    assert (placement.overlap_blocks, placement.prompt) == (None, None)


def test_a9_12_without_an_index_load_alone_decides() -> None:
    candidates = ranks(4)
    policy = KvAware(random.Random(1))
    prompts = {GROUP: PromptBlocks(16, 1_000, range(62))}
    for _ in range(40):
        placement = policy.select(RouteRequest(1_000, None, prompts), candidates)
        assert (placement.overlap_blocks, placement.prompt) == (0, prompts[GROUP])
        placement.candidate.load.book(requests=1, blocks=63, prefill_tokens=1_000, block_hashes=range(62))
    assert {candidate.load.in_flight for candidate in candidates} == {10}


ODD = st.dictionaries(st.sampled_from([RankKey("w0", 0), ("w1", 0), ("w2", 0), ("x", 3)]), st.integers(-(10**9), 10**9))


@given(st.builds(Overlap, ODD, ODD, ODD), st.integers(0, 400), st.lists(st.integers(0, 3)), st.floats(0, 9))
def test_a9_12_nothing_in_an_overlap_makes_the_choice_fail(
    overlap: Overlap, tokens: int, hashes: list[int], temperature: float
) -> None:
    candidates = ranks(3)
    candidates[0].load.book(requests=7, blocks=3, prefill_tokens=9, block_hashes=hashes[:3])
    asked = RouteRequest(tokens, None, {GROUP: PromptBlocks(16, tokens, hashes, overlap)})
    policy = KvAware(random.Random(1), temperature=temperature)
    placement = policy.select(asked, candidates)
    assert placement.candidate in candidates
    assert placement.overlap_blocks is not None
    assert 0 <= placement.overlap_blocks <= tokens // 16
    assert all(one.cost is not None and one.cost >= 0 for one in policy.explain(asked, candidates))


@pytest.mark.parametrize("numbers", [(0, 1), (-1, 1), (1, -1)])
def test_prompts_without_meaning_are_refused(numbers: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no prompt has"):
        PromptBlocks(*numbers)


# Workers that cut prompts differently.


def test_blocks_of_different_sizes_are_compared_by_their_tokens() -> None:
    narrow, wide = ranks(1)[0], Candidate(RankKey("v", 0), RankLoad(), WIDE)
    prompts = {GROUP: PromptBlocks(16, 640), WIDE: PromptBlocks(64, 640)}
    policy = KvAware(random.Random(1))
    costs = [one.cost for one in policy.explain(RouteRequest(640, None, prompts), [narrow, wide])]
    assert costs == [80.0, 80.0]
    prompts[WIDE].overlap.device[wide.key] = 1
    prompts[GROUP].overlap.device.update({narrow.key: 3, wide.key: 40})
    assert chosen([narrow, wide], RouteRequest(640, None, prompts)) == "v"
    prompts[GROUP].overlap.device[narrow.key] = 5
    assert chosen([narrow, wide], RouteRequest(640, None, prompts)) == "w0"


@pytest.mark.parametrize("group", [WIDE, None], ids=["other blocks", "no blocks"])
def test_where_blocks_are_not_known_the_prompt_counts_in_full(group: BlockGroup | None) -> None:
    unknown, known = Candidate(RankKey("u", 0), RankLoad(), group), ranks(1)[0]
    policy = KvAware(random.Random(1))
    explained = policy.explain(request(640), [unknown, known])
    assert [one.cost for one in explained] == [80.0, 80.0]
    assert chosen([unknown, known], request(640, device={"u": 40, "w0": 1})) == "w0"
    busy(known, blocks=41)
    assert chosen([unknown, known], request(640, device={"w0": 40})) == "u"


# Explained.


def test_explained_is_what_is_compared() -> None:
    candidates = ranks(2)
    busy(candidates[0], requests=8, tokens=32, blocks=4)
    policy = KvAware(random.Random(1), replace(PLAIN, decode_active_request_weight=1.0))
    first, second = policy.explain(request(170, device={"w0": 3}), candidates)
    facts = {"block_size": 16, "prompt_tokens": 170, "least_prefill_tokens": 0}
    parameters = CostParameters(decode_active_request_weight=1.0)
    parts = placement_cost(
        parameters, **facts, active_prefill_tokens=32, decode_blocks=14, in_flight=8, device_blocks=3
    )
    cost = Cost(*parts)
    assert first == Explained("w0", 0, 3, 10, 4, 32, 8, cost.total, "crowded", cost)
    assert cost.total == (202 / 16 - 3) + 14 + 8
    assert (second.cost, second.excluded, second.overlap_blocks) == (170 / 16 + 10, None, 0)
    assert chosen(candidates, request(170, device={"w0": 3}), policy) == "w1"


def test_explained_without_blocks_is_the_load() -> None:
    candidates = ranks(1)
    busy(candidates[0], requests=2, tokens=32, blocks=4)
    policy = KvAware(random.Random(1))
    assert policy.explain(RouteRequest(9), candidates) == [Explained("w0", 0, None, None, 4, 32, 2, None, None)]

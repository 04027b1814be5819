"""Policies by name."""

from typing import Any

import pytest

from backends.types import EngineKind
from kv_events.index_types import Overlap
from routers.cost import CostParameters
from routers.kv_aware import KvAware
from routers.load import RankLoad
from routers.pair import Alone, Paired, Pools
from routers.registry import BLOCK_POLICIES, DEFAULT_POLICY, POLICIES, make_pairs, make_policy
from routers.types import BlockGroup, Candidate, PromptBlocks, RankKey, RouteRequest


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_policies_are_called_by_their_own_name(name: str) -> None:
    assert make_policy(name, 1).name == name


def test_the_default() -> None:
    assert isinstance(make_policy(None, None), KvAware)  # which falls back to least-loaded
    assert DEFAULT_POLICY in POLICIES


def test_policies_that_look_at_blocks_are_those_that_place_by_them() -> None:
    group = BlockGroup(EngineKind.SGLANG, 16)
    asked = RouteRequest(32, None, {group: PromptBlocks(16, 32, [1, 2])})
    one = [Candidate(RankKey("w", 0), RankLoad(), group)]
    looking = {name for name in POLICIES if make_policy(name, 1).select(asked, one).prompt is not None}
    assert looking == BLOCK_POLICIES


@pytest.mark.parametrize("name", sorted(BLOCK_POLICIES))
def test_policies_that_go_by_cost_take_weights_and_a_temperature(name: str) -> None:
    group = BlockGroup(EngineKind.SGLANG, 16)
    asked = RouteRequest(32, None, {group: PromptBlocks(16, 32, [1, 2])})
    ranks = [Candidate(RankKey(one, 0), RankLoad(), group) for one in ("blocks", "prefill")]
    ranks[0].load.book(requests=1, blocks=9, prefill_tokens=0)
    ranks[1].load.book(requests=1, blocks=0, prefill_tokens=16)
    assert make_policy(name, 1).select(asked, ranks).candidate is ranks[1]
    scaled = make_policy(name, 1, CostParameters(prefill_load_scale=16.0))
    assert scaled.select(asked, ranks).candidate is ranks[0]
    warm = make_policy(name, 1, temperature=10.0)
    assert len({warm.select(asked, ranks).candidate.key for _ in range(50)}) == 2


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown policy 'x', known: .*least-loaded"):
        make_policy("x", 1)
    with pytest.raises(ValueError, match="unknown policy 'x'"):
        make_pairs("x", 1)


@pytest.mark.parametrize("name", sorted(BLOCK_POLICIES))
@pytest.mark.parametrize(("guard", "where"), [({}, 1), ({"guard": "shared"}, 0)], ids=["default", "shared"])
def test_the_guard_counts_for_prefill_and_for_one_worker_alone(name: str, guard: dict[str, Any], where: int) -> None:
    group = BlockGroup(EngineKind.SGLANG, 16)
    ranks = [Candidate(RankKey(one, 0), RankLoad(), group) for one in ("crowded", "idle")]
    ranks[0].load.book(requests=9, blocks=0, prefill_tokens=0)
    asked = RouteRequest(160, None, {group: PromptBlocks(16, 160, range(10), Overlap({("crowded", 0): 10}))})
    pairs = make_pairs(name, 1, **guard)
    for policy in (pairs.prefill, pairs.alone, make_policy(name, 1, **guard)):
        assert policy.select(asked, ranks).candidate is ranks[where]


@pytest.mark.parametrize("name", sorted(BLOCK_POLICIES))
@pytest.mark.parametrize(("limit", "where"), [({}, 0), ({"max_wait_tokens": 800}, 1)], ids=["default", "limit"])
def test_the_limit_of_waiting_counts_for_prefill_and_for_one_worker_alone(
    name: str, limit: dict[str, Any], where: int
) -> None:
    group = BlockGroup(EngineKind.SGLANG, 16)
    ranks = [Candidate(RankKey(one, 0), RankLoad(), group) for one in ("behind", "idle")]
    ranks[0].load.book(requests=1, blocks=0, prefill_tokens=1600)
    asked = RouteRequest(160, None, {group: PromptBlocks(16, 160, range(10), Overlap({("behind", 0): 10}))})
    pairs = make_pairs(name, 1, **limit)
    for policy in (pairs.prefill, pairs.alone, make_policy(name, 1, **limit)):
        assert policy.select(asked, ranks).candidate is ranks[where]


@pytest.mark.parametrize("name", sorted(BLOCK_POLICIES))
@pytest.mark.parametrize(("what", "where"), [({}, 0), ({"recompute": "rare"}, 1)], ids=["default", "rare"])
def test_what_counts_for_more_does_so_for_prefill_and_for_one_worker_alone(
    name: str, what: dict[str, Any], where: int
) -> None:
    group = BlockGroup(EngineKind.SGLANG, 16)
    ranks = [Candidate(RankKey(one, 0), RankLoad(), group) for one in ("old", "new", "full")]
    ranks[0].load.book(requests=1, blocks=12, prefill_tokens=160)
    ranks[2].load.book(requests=1, blocks=0, prefill_tokens=16000)
    held = Overlap({("old", 0): 5, ("full", 0): 5})
    asked = RouteRequest(160, None, {group: PromptBlocks(16, 160, range(10), held)})
    pairs = make_pairs(name, 1, **what)
    for policy in (pairs.prefill, pairs.alone, make_policy(name, 1, **what)):
        assert policy.select(asked, ranks).candidate is ranks[where]


@pytest.mark.parametrize("name", [None, *sorted(POLICIES)])
def test_a_policy_chooses_prefill_and_decode_goes_by_load(name: str | None) -> None:
    pairs = make_pairs(name, 1, 7)
    assert pairs.prefill.name == pairs.alone.name == (name or DEFAULT_POLICY)
    assert pairs.short_prompt_tokens == 7
    group = BlockGroup(EngineKind.SGLANG, 16)
    ranks = [Candidate(RankKey(one, 0), RankLoad(), group) for one in ("p", "d", "e", "r")]
    ranks[1].load.book(requests=1, blocks=9, prefill_tokens=0)
    ranks[2].load.book(requests=1, blocks=8, prefill_tokens=99)
    asked = RouteRequest(3200, "key", {group: PromptBlocks(16, 3200, [1, 2])})
    choice = pairs.select(asked, Pools(prefill=ranks[:1], decode=ranks[1:3]), 0.0)
    assert isinstance(choice, Paired)
    assert choice.decode.candidate is ranks[2]
    assert choice.prefill.candidate is ranks[0]
    assert isinstance(pairs.select(asked, Pools(regular=ranks[3:]), 0.0), Alone)


def test_costs_of_the_usual_pair() -> None:
    """Prefill counts no blocks in use; a regular worker counts both."""
    pairs = make_pairs(None, 1)
    group = BlockGroup(EngineKind.SGLANG, 16)
    full, idle = (Candidate(RankKey(one, 0), RankLoad(), group) for one in ("full", "idle"))
    full.load.book(requests=1, blocks=99, prefill_tokens=0)
    idle.load.book(requests=1, blocks=0, prefill_tokens=16)
    asked = RouteRequest(3200, None, {group: PromptBlocks(16, 3200, [1, 2])})
    assert pairs.prefill.select(asked, [full, idle]).candidate is full
    assert pairs.alone.select(asked, [full, idle]).candidate is idle


@pytest.mark.parametrize("name", sorted(BLOCK_POLICIES))
def test_weights_count_for_prefill_and_for_one_worker_alone(name: str) -> None:
    group = BlockGroup(EngineKind.SGLANG, 16)
    behind, full = (Candidate(RankKey(one, 0), RankLoad(), group) for one in ("behind", "full"))
    behind.load.book(requests=1, blocks=0, prefill_tokens=1600)
    full.load.book(requests=1, blocks=50, prefill_tokens=0)
    asked = RouteRequest(1600, None, {group: PromptBlocks(16, 1600, list(range(100)))})
    usual, light = make_pairs(name, 1), make_pairs(name, 1, 0, CostParameters(prefill_load_scale=0.25))
    assert usual.alone.select(asked, [behind, full]).candidate is full  # 100 blocks to prefill, against 50 in use
    assert light.alone.select(asked, [behind, full]).candidate is behind
    costs = [one.cost for one in light.prefill.explain(asked, [behind, full])]
    assert costs == [50.0, 25.0]  # a quarter of 200 and of 100, and nothing for blocks in use
    with pytest.raises(ValueError, match="temperature"):
        make_pairs(name, 1, temperature=-1.0)

"""The policies that do not look at load alone, and the breaker."""

import random
from collections import Counter

import pytest

from backends.types import EngineKind
from routers.breaker import Breaker, BreakerState
from routers.consistent_hash import ConsistentHash
from routers.explain import Explained
from routers.least_loaded import LeastLoaded
from routers.load import RankLoad
from routers.power_of_two import PowerOfTwo
from routers.round_robin import RoundRobin
from routers.types import BlockGroup, Candidate, PromptBlocks, RankKey, RouteRequest


def ranks(*names: str) -> list[Candidate]:
    return [Candidate(RankKey(name, 0), RankLoad()) for name in names]


@pytest.mark.parametrize("policy", [RoundRobin, PowerOfTwo, ConsistentHash])
def test_no_candidates_is_an_error(policy: type[RoundRobin]) -> None:
    with pytest.raises(ValueError, match="no candidates"):
        policy(random.Random(1)).select(RouteRequest(), [])


@pytest.mark.parametrize("policy", [LeastLoaded, RoundRobin, PowerOfTwo, ConsistentHash])
def test_policies_without_costs_explain_the_load_and_change_nothing(policy: type[RoundRobin]) -> None:
    group = BlockGroup(EngineKind.VLLM, 16)
    candidates = [Candidate(RankKey("a", 1), RankLoad(), group), *ranks("b")]
    candidates[0].load.book(requests=2, blocks=3, prefill_tokens=40)
    made = policy(random.Random(1))
    asked = RouteRequest(40, "key", {group: PromptBlocks(16, 40)})
    expected = [Explained("a", 1, None, 2, 3, 40, 2, None, None), Explained("b", 0, None, None, 0, 0, 0, None, None)]
    assert made.explain(asked, candidates) == expected
    assert made.explain(asked, []) == []
    assert made.select(asked, candidates).candidate is policy(random.Random(1)).select(asked, candidates).candidate


def test_round_robin_takes_everyone_once_before_anyone_twice() -> None:
    policy = RoundRobin(random.Random(1))
    candidates = ranks("a", "b", "c")
    turns = [policy.select(RouteRequest(), candidates).candidate.key.worker_id for _ in range(9)]
    assert turns[:3] == turns[3:6] == turns[6:]
    assert sorted(turns[:3]) == ["a", "b", "c"]


def test_round_robin_is_not_shifted_by_a_rank_that_goes_and_comes() -> None:
    policy = RoundRobin(random.Random(1))
    everyone = ranks("a", "b", "c")
    first = [policy.select(RouteRequest(), everyone).candidate for _ in range(3)]
    assert policy.select(RouteRequest(), first[1:]).candidate is first[1]
    assert policy.select(RouteRequest(), everyone).candidate is first[0]


def test_round_robin_forgets_ranks_that_are_long_gone() -> None:
    policy = RoundRobin(random.Random(1))
    for number in range(500):
        policy.select(RouteRequest(), ranks(f"w{number}"))
    assert len(policy._last) <= 4 + 65


def test_power_of_two_prefers_the_less_loaded() -> None:
    policy = PowerOfTwo(random.Random(1))
    busy, idle = ranks("busy", "idle")
    busy.load.book(requests=3, blocks=0, prefill_tokens=0)
    assert {policy.select(RouteRequest(), [busy, idle]).candidate.key.worker_id for _ in range(20)} == {"idle"}
    assert policy.select(RouteRequest(), [busy]).candidate is busy


def test_power_of_two_compares_prefill_when_requests_are_equal() -> None:
    policy = PowerOfTwo(random.Random(1))
    long, short = ranks("long", "short")
    long.load.book(requests=1, blocks=0, prefill_tokens=900)
    short.load.book(requests=1, blocks=0, prefill_tokens=10)
    assert {policy.select(RouteRequest(), [long, short]).candidate.key.worker_id for _ in range(20)} == {"short"}


def test_consistent_hash_keeps_a_session_and_moves_only_those_of_a_lost_rank() -> None:
    candidates = ranks("a", "b", "c", "d")
    policy, other = ConsistentHash(random.Random(1)), ConsistentHash(random.Random(2))
    sessions = [f"session-{number}" for number in range(400)]

    def placed(chooser: ConsistentHash, among: list[Candidate]) -> dict[str, str]:
        return {
            key: chooser.select(RouteRequest(stickiness_key=key), among).candidate.key.worker_id for key in sessions
        }

    before = placed(policy, candidates)
    assert before == placed(other, list(reversed(candidates))), "the same in every gateway, in any order"
    after = placed(policy, [one for one in candidates if one.key.worker_id != "b"])
    assert all(after[key] == worker for key, worker in before.items() if worker != "b")
    spread = Counter(before.values())
    assert all(60 < spread[name] < 140 for name in "abcd")


def test_consistent_hash_without_a_key_goes_by_load() -> None:
    busy, idle = ranks("busy", "idle")
    busy.load.book(requests=1, blocks=0, prefill_tokens=0)
    assert ConsistentHash(random.Random(1)).select(RouteRequest(), [busy, idle]).candidate is idle


def test_the_breaker_opens_after_failures_in_a_row_and_tries_one_request() -> None:
    breaker = Breaker(threshold=3, open_s=5.0)
    for now in (0.0, 1.0):
        breaker.failed(now)
    breaker.succeeded()
    for now in (2.0, 3.0, 4.0):
        assert breaker.allows(now)
        breaker.failed(now)
    assert str(breaker.state) == BreakerState.OPEN
    assert not breaker.allows(8.9)
    assert breaker.allows(9.0)
    breaker.sent(9.0)
    assert str(breaker.state) == BreakerState.HALF_OPEN
    assert not breaker.allows(9.1), "one trial at a time"
    breaker.failed(9.2)
    assert str(breaker.state) == BreakerState.OPEN
    breaker.sent(14.3)
    breaker.succeeded()
    assert str(breaker.state) == BreakerState.CLOSED
    assert breaker.allows(14.4)


def test_a_trial_whose_client_left_or_that_nobody_reported_makes_room_for_another() -> None:
    breaker = Breaker(threshold=1, open_s=5.0)
    breaker.failed(0.0)
    breaker.sent(5.0)
    breaker.released()
    assert breaker.allows(5.1)
    breaker.sent(5.2)
    assert not breaker.allows(6.0)
    assert breaker.allows(10.3)
    breaker.reset()
    assert str(breaker.state) == BreakerState.CLOSED


def test_a_trial_that_begins_to_answer_closes_the_breaker_and_one_more_failure_opens_it() -> None:
    breaker = Breaker(threshold=3, open_s=5.0)
    breaker.answering()  # not a trial
    for now in (0.0, 1.0, 2.0):
        breaker.failed(now)
    breaker.answering()
    assert str(breaker.state) == BreakerState.OPEN
    breaker.sent(7.0)
    breaker.answering()
    assert str(breaker.state) == BreakerState.CLOSED
    breaker.failed(8.0)
    assert str(breaker.state) == BreakerState.OPEN

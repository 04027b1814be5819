"""Whose follower a node is, and when that ends."""

from dataclasses import replace

import pytest

from relay.errors import RelayEnded
from relay.follower import LEADER_GRACE_S, Leader, LeaderWatch, check_leader, find_leader
from relay.identity import Match
from tests.relay.nodes import group, node, source

OURS = group()
LEADER = Leader("w0", "http://w0", OURS, dp_size=4, block_size=16, local_dp_ranks=(0, 1))
STRANGER = Leader("other", "http://other", group("10.0.0.7:5000"), dp_size=2, block_size=8, local_dp_ranks=(0,))


def changed(**changes: object) -> Leader:
    """The leader with changes."""
    return replace(LEADER, **changes)  # type: ignore[arg-type]


def test_a1_6_a_follower_picks_the_leader_of_its_own_group() -> None:
    assert find_leader(OURS, [STRANGER, LEADER, LEADER]) == (LEADER, Match.FULL)
    assert find_leader(OURS, [STRANGER]) is None


def test_a1_6_two_leaders_in_one_group_are_an_error() -> None:
    with pytest.raises(RelayEnded, match="w0 and w1"):
        find_leader(OURS, [LEADER, STRANGER, changed(worker_id="w1")])


def test_a_partial_match_is_told() -> None:
    theirs = group("leader:5000", "10.0.0.1", "fd00::1")
    assert find_leader(OURS, [changed(group=theirs)]) == (changed(group=theirs), Match.PARTIAL)


def test_a_leader_that_fits() -> None:
    check_leader(LEADER, node())
    check_leader(changed(block_size=0, local_dp_ranks=()), node())


@pytest.mark.parametrize(
    ("leader", "names"),
    [
        pytest.param(changed(dp_size=8), "dp_size 8", id="dp_size"),
        pytest.param(changed(block_size=8), "block_size 8", id="a1_15 block_size"),
        pytest.param(changed(local_dp_ranks=(0, 1, 3)), "rank 3", id="a1_3 the leader has a rank of ours"),
    ],
)
def test_a1_3_a_leader_that_does_not_fit_is_refused(leader: Leader, names: str) -> None:
    with pytest.raises(RelayEnded, match=names):
        check_leader(leader, node())


def test_a1_3_the_overlap_is_told_by_rank() -> None:
    with pytest.raises(RelayEnded, match="rank 0, 1"):
        check_leader(LEADER, node(kv_event_sources=[source(0), source(1), source(2)]))


def test_a1_9_a_leader_that_stays_away_has_gone() -> None:
    watch = LeaderWatch(OURS, LEADER)
    watch.on_leaders(0.0, {"g": (STRANGER,)})
    watch.on_leaders(LEADER_GRACE_S - 1, {"g": ()})
    with pytest.raises(RelayEnded, match="w0 has gone"):
        watch.on_leaders(LEADER_GRACE_S, {"g": (), "h": None})


def test_a1_13_a_leader_that_returns_in_time_is_the_same() -> None:
    watch = LeaderWatch(OURS, LEADER)
    watch.on_leaders(0.0, {"g": ()})
    watch.on_leaders(LEADER_GRACE_S - 1, {"g": (LEADER,)})
    watch.on_leaders(LEADER_GRACE_S + 1, {"g": ()})
    watch.on_leaders(2 * LEADER_GRACE_S, {"g": ()})


def test_gateways_that_cannot_be_asked_say_nothing_of_a_leader() -> None:
    watch = LeaderWatch(OURS, LEADER)
    for now_s in range(0, 1000, 5):
        watch.on_leaders(float(now_s), {"g": None, "h": None})
    watch.on_leaders(1000.0, {"g": (), "h": None})
    watch.on_leaders(1000.0 + LEADER_GRACE_S, {"g": (LEADER,), "h": None})


def test_one_gateway_that_knows_the_leader_is_enough() -> None:
    watch = LeaderWatch(OURS, LEADER)
    for now_s in range(0, 1000, 5):
        watch.on_leaders(float(now_s), {"g": (LEADER,), "h": ()})


@pytest.mark.parametrize(
    ("leader", "names"),
    [
        pytest.param(changed(dp_size=8), "dp_size", id="dp_size"),
        pytest.param(changed(block_size=8), "block_size", id="block_size"),
        pytest.param(changed(local_dp_ranks=(0,)), "local_dp_ranks", id="ranks"),
        pytest.param(changed(worker_id="w9", dp_size=8), "dp_size", id="another, and otherwise"),
    ],
)
def test_a1_9_a_leader_that_changes_is_another(leader: Leader, names: str) -> None:
    watch = LeaderWatch(OURS, LEADER)
    with pytest.raises(RelayEnded, match=names):
        watch.on_leaders(0.0, {"g": (STRANGER, leader)})


def test_a1_9_others_may_do_what_they_like() -> None:
    watch = LeaderWatch(OURS, LEADER)
    watch.on_leaders(0.0, {"g": (LEADER, STRANGER)})
    watch.on_leaders(5.0, {"g": (LEADER,)})
    watch.on_leaders(10.0, {"g": (LEADER, changed(worker_id="x", group=STRANGER.group, dp_size=1))})


MOVED = changed(worker_id="w1", worker_url="http://w1")


def test_a_second_leader_that_stays_is_an_error() -> None:
    watch = LeaderWatch(OURS, LEADER)
    both = {"g": (LEADER,), "h": (MOVED,)}
    assert watch.on_leaders(0.0, both) is None
    with pytest.raises(RelayEnded, match="two leaders"):
        watch.on_leaders(LEADER_GRACE_S, both)


@pytest.mark.parametrize("between", [(), (MOVED, LEADER)], ids=["gone for a while", "known under both for a while"])
def test_a1_13_a_leader_that_returns_under_another_address_is_followed_there(between: tuple[Leader, ...]) -> None:
    watch = LeaderWatch(OURS, LEADER)
    assert watch.on_leaders(0.0, {"g": (LEADER,)}) is None
    assert watch.on_leaders(5.0, {"g": between}) is None
    assert watch.on_leaders(10.0, {"g": (MOVED,), "h": None}) == "http://w1"
    assert watch.on_leaders(2 * LEADER_GRACE_S, {"g": (MOVED,), "h": (MOVED,)}) is None

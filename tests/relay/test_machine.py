"""A relay from start to end, as transcripts."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from relay.feed import GatewayState
from relay.follower import LEADER_GRACE_S, Leader
from relay.machine import AskEngine, AskGateways, End, Limits, Phase, Relay, RelayMachine, Remap, Resolve, Warn
from tests.relay.nodes import ADDRESS, group, leader_node, node, source

LIMITS = Limits(phase_s=100.0, overall_s=250.0, failure_s=60.0)
LEADER = Leader("w0", "http://w0", group(), dp_size=4, block_size=16, local_dp_ranks=(0, 1))
ACKNOWLEDGED = GatewayState(is_connected=True, is_acknowledged=True)


def machine() -> RelayMachine:
    """One that has asked its engine."""
    made = RelayMachine(LIMITS, 0.0)
    assert made.start() == [AskEngine(0.0)]
    return made


def running(now_s: float = 10.0) -> RelayMachine:
    """A follower that relays and is ready."""
    made = machine()
    made.on_metadata(now_s, node())
    made.on_group(now_s, group())
    made.on_leaders(now_s, {"g": (LEADER,)})
    for rank in (2, 3):
        made.on_source(now_s, rank, True)
    made.on_gateways({"g": ACKNOWLEDGED})
    assert made.not_ready == ""
    return made


def reason(commands: list[object]) -> str:
    """Why the machine ended."""
    (command,) = commands
    assert isinstance(command, End)
    return command.reason


def test_a_follower_comes_up() -> None:
    found = machine()
    assert found.on_engine_failed("refused") == [AskEngine(1.0)]
    assert "refused" in found.not_ready
    assert found.on_metadata(1.0, node()) == [AskEngine(5.0), Resolve(ADDRESS, 0.0)]
    assert found.on_group_failed("no answer") == [Resolve(ADDRESS, 1.0)]
    assert found.on_group(2.0, group()) == [AskGateways(0.0)]
    assert found.on_leaders(3.0, {"g": None}, "refused") == [AskGateways(1.0)]
    assert found.on_leaders(3.0, {"g": ()}) == [AskGateways(1.0)]
    assert found.on_leaders(4.0, {"g": (LEADER,)}) == [AskGateways(5.0), Relay(node(), group(), "http://w0")]
    assert found.phase is Phase.RELAY


def test_a_leader_comes_up_by_itself() -> None:
    found = machine()
    assert found.on_metadata(1.0, leader_node())[1:] == [Resolve(ADDRESS, 0.0)]
    assert found.on_group(2.0, group()) == [Relay(leader_node(), group(), None)]


def test_an_engine_of_one_node_needs_no_group() -> None:
    alone = leader_node(nnodes=1, dist_init_addr=None)
    assert machine().on_metadata(1.0, alone) == [AskEngine(5.0), Relay(alone, None, None)]


def test_a1_5_a_follower_that_publishes_nothing_is_an_error() -> None:
    assert "publishes no KV events" in reason([*machine().on_metadata(0.0, node(kv_event_sources=[]))])


def test_a1_5_a_leader_that_publishes_nothing_relays_nothing() -> None:
    found = machine()
    found.on_metadata(0.0, leader_node(kv_event_sources=[]))
    found.on_group(0.0, group())
    found.on_gateways({"g": ACKNOWLEDGED})
    assert found.not_ready == ""


def test_refused_metadata_end_it() -> None:
    assert reason([*machine().on_metadata_refused("null")]) == "null"


def test_a_partial_match_is_warned_of() -> None:
    found = machine()
    found.on_metadata(0.0, node())
    found.on_group(0.0, group())
    theirs = group("leader:5000", "10.0.0.1", "fd00::1")
    commands = found.on_leaders(0.0, {"g": (Leader("w0", "http://w0", theirs, 4, 16, (0, 1)),)})
    assert isinstance(commands[0], Warn)
    assert "fd00::1" in commands[0].text


@pytest.mark.parametrize(
    ("leader", "names"),
    [
        (Leader("w0", "http://w0", group(), 4, 16, (0, 2)), "rank 2"),
        (Leader("w0", "http://w0", group(), 2, 16, (0,)), "dp_size"),
        (Leader("w0", "http://w0", group(), 4, 8, (0,)), "block_size"),
    ],
    ids=["a1_3", "dp_size", "block_size"],
)
def test_a1_3_a_leader_that_does_not_fit_ends_it(leader: Leader, names: str) -> None:
    found = machine()
    found.on_metadata(0.0, node())
    found.on_group(0.0, group())
    assert names in reason([*found.on_leaders(0.0, {"g": (leader,)})])


def test_each_phase_has_its_own_deadline() -> None:
    found = machine()
    found.on_engine_failed("refused")
    assert found.on_time(99.0) == []
    assert "--startup-deadline-s) for the engine's metadata: refused" in reason([*found.on_time(100.0)])
    found = machine()
    found.on_metadata(90.0, node())
    assert found.on_time(189.0) == []
    found.on_group_failed("no answer")
    assert "group: no answer" in reason([*found.on_time(190.0)])


def test_all_phases_have_one_deadline_together() -> None:
    found = machine()
    found.on_metadata(90.0, node())
    found.on_group(180.0, group())
    found.on_leaders(240.0, {"g": ()})
    ended = reason([*found.on_time(250.0)])
    assert "--overall-deadline-s" in ended
    assert ADDRESS in ended


def test_sources_that_never_connect_are_waited_for_like_everything_else() -> None:
    found = machine()
    found.on_metadata(0.0, node())
    found.on_group(0.0, group())
    found.on_leaders(50.0, {"g": (LEADER,)})
    found.on_source(51.0, 2, True)
    assert found.on_time(149.0) == []
    assert "publishers" in reason([*found.on_time(150.0)])


def test_a1_11_readiness_is_what_is_so_now() -> None:
    found = running()
    found.on_source(20.0, 3, False)
    assert "rank 3" in found.not_ready
    found.on_source(30.0, 3, True)
    assert found.not_ready == ""
    found.on_gateways({"g": ACKNOWLEDGED, "h": GatewayState(is_connected=True)})
    assert "gateway h" in found.not_ready
    found.on_gateways({"g": GatewayState(is_acknowledged=True, last_error="refused")})
    assert "refused" in found.not_ready
    found.on_gateways({})
    assert found.not_ready


def test_a_source_that_stays_away_ends_it() -> None:
    found = running()
    found.on_source(20.0, 3, False)
    found.on_source(50.0, 3, False)
    assert found.on_time(79.0) == []
    assert "rank 3" in reason([*found.on_time(80.0)])


def test_a_lost_gateway_is_waited_for_for_ever() -> None:
    found = running()
    found.on_gateways({"g": GatewayState(last_error="refused")})
    assert found.on_time(1e6) == []
    assert found.phase is Phase.RELAY


def test_a1_12_a_gateway_that_refuses_for_good_ends_it() -> None:
    ended = reason([*running().on_gateways({"g": GatewayState(last_error="rank 2 is another's", is_refused=True)})])
    assert "rank 2 is another's" in ended


def test_a1_10_an_engine_that_misses_two_questions_has_gone() -> None:
    found = running()
    assert found.on_engine_failed("refused") == [AskEngine(5.0)]
    assert found.on_metadata(0.0, node(random_seed=9)) == [AskEngine(5.0)]
    assert found.on_engine_failed("refused") == [AskEngine(5.0)]
    assert "refused" in reason([*found.on_engine_failed("refused")])


def test_a1_10_an_engine_that_changes_is_another() -> None:
    changed = node(kv_event_sources=[source(2), source(3, endpoint="ipc://@x")])
    assert "ipc://@x" in reason([*running().on_metadata(20.0, changed)])


def test_the_engine_is_watched_while_the_leader_is_looked_for() -> None:
    found = machine()
    found.on_metadata(0.0, node())
    assert "dp_size" in reason([*found.on_metadata(5.0, node(dp_size=8))])


def test_a1_9_a_leader_that_goes_ends_it() -> None:
    found = running()
    assert found.on_leaders(20.0, {"g": ()}) == [AskGateways(5.0)]
    assert "has gone" in reason([*found.on_leaders(20.0 + LEADER_GRACE_S, {"g": ()})])


def test_a1_13_a_leader_that_moves_takes_the_relay_along() -> None:
    moved = Leader("w1", "http://w1", LEADER.group, LEADER.dp_size, LEADER.block_size, LEADER.local_dp_ranks)
    assert running().on_leaders(20.0, {"g": (moved,)}) == [AskGateways(5.0), Remap("http://w1")]


def test_a_part_that_ends_by_itself_ends_it() -> None:
    assert reason([*running().on_lost("the feed ended")]) == "the feed ended"


class Random(RuleBasedStateMachine):
    """Facts in any order and at any time: nothing is raised, and what has ended stays so."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.machine = machine()
        self.has_ended = False
        self.relays = 0

    def _note(self, commands: list[object]) -> None:
        assert not (self.has_ended and commands)
        self.has_ended = self.has_ended or any(isinstance(command, End) for command in commands)
        self.relays += sum(isinstance(command, Relay) for command in commands)

    @rule(passed_s=st.floats(0, 200))
    def time(self, passed_s: float) -> None:
        self.now_s += passed_s
        self._note([*self.machine.on_time(self.now_s)])

    @rule(found=st.sampled_from([node(), node(), leader_node(), node(dp_size=8), node(random_seed=1)]))
    def metadata(self, found: object) -> None:
        self._note([*self.machine.on_metadata(self.now_s, found)])  # type: ignore[arg-type]

    @rule()
    def engine_failed(self) -> None:
        self._note([*self.machine.on_engine_failed("refused")])

    @rule(is_found=st.booleans())
    def resolved(self, is_found: bool) -> None:
        found = self.machine.on_group(self.now_s, group()) if is_found else self.machine.on_group_failed("none")
        self._note([*found])

    @rule(view=st.sampled_from([None, (), (LEADER,), (Leader("w1", "http://w1", group(), 4, 16, ()), LEADER)]))
    def leaders(self, view: tuple[Leader, ...] | None) -> None:
        self._note([*self.machine.on_leaders(self.now_s, {"g": view})])

    @rule(rank=st.sampled_from([2, 3]), is_connected=st.booleans())
    def source(self, rank: int, is_connected: bool) -> None:
        if self.machine.phase is Phase.RELAY:
            self.machine.on_source(self.now_s, rank, is_connected)

    @rule(is_up=st.booleans(), is_refused=st.booleans())
    def gateways(self, is_up: bool, is_refused: bool) -> None:
        self._note([*self.machine.on_gateways({"g": GatewayState(is_up, is_up, "", is_refused)})])

    @invariant()
    def relays_once_and_is_never_ready_without(self) -> None:
        assert self.relays <= 1
        assert self.machine.not_ready or (self.relays and not self.has_ended)
        assert (self.machine.phase is Phase.ENDED) is self.has_ended


TestRandom = Random.TestCase

"""One relay from its start to its end: what to do next, how long to wait for it, and when to give up. Pure.

CONNECT: the engine is asked until it answers. GROUP: the address where the engine's nodes meet is resolved. LEADER: a
follower looks for its leader at the gateways; a leader knows itself. RELAY: the sources are read. ENDED: with a reason.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from relay.errors import RelayEnded
from relay.feed import GatewayState
from relay.follower import Leader, LeaderWatch, check_leader, find_leader
from relay.identity import GroupIdentity, Match
from relay.metadata import NodeMetadata, difference

# An engine that is busy may miss one question.
MISSED_POLLS = 2


class Phase(enum.StrEnum):
    """How far a relay has come."""

    CONNECT = "connect"
    GROUP = "group"
    LEADER = "leader"
    RELAY = "relay"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Limits:
    """Times, all in seconds.

    Attributes:
        phase_s: Longest stay in each phase before the relay runs.
        overall_s: Longest time to all of it together; ``None`` for no limit.
        failure_s: A source that is away for so long ends the relay.
        retry_s: Time between two questions to an engine or a gateway that have not answered yet.
        poll_s: Time between two of them afterwards.
    """

    phase_s: float = 1800.0
    overall_s: float | None = None
    failure_s: float = 60.0
    retry_s: float = 1.0
    poll_s: float = 5.0


@dataclass(frozen=True, slots=True)
class AskEngine:
    """Ask the engine for its metadata, after a time."""

    after_s: float


@dataclass(frozen=True, slots=True)
class Resolve:
    """Resolve the address of the engine's group, after a time."""

    address: str
    after_s: float


@dataclass(frozen=True, slots=True)
class AskGateways:
    """Ask all gateways for the leaders that they know, after a time."""

    after_s: float


@dataclass(frozen=True, slots=True)
class Relay:
    """Begin to relay the node's sources as a worker's; the ``None`` worker is the one that this node serves."""

    node: NodeMetadata
    group: GroupIdentity | None
    worker_url: str | None


@dataclass(frozen=True, slots=True)
class Remap:
    """Relay the sources as another worker's from now on: the leader is back under another address."""

    worker_url: str


@dataclass(frozen=True, slots=True)
class Warn:
    """Tell the operator something."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """End the process; ``reason`` is for people."""

    reason: str


Command = AskEngine | Resolve | AskGateways | Relay | Remap | Warn | End

_WAITING_FOR = {
    Phase.CONNECT: "the engine's metadata",
    Phase.GROUP: "the address of the engine's group",
    Phase.LEADER: "the leader",
    Phase.RELAY: "the engine's publishers",
}


class RelayMachine:
    """State of one relay: facts come in as calls with the time, commands go out, to be executed in order.

    Attributes:
        node: The node's metadata; ``None`` before they are known.
        group: The node's group; ``None`` before it is known, and for an engine of one node.
    """

    def __init__(self, limits: Limits, now_s: float) -> None:
        """Begin; the first command is ``start``'s."""
        self.node: NodeMetadata | None = None
        self.group: GroupIdentity | None = None
        self._limits = limits
        self._phase = Phase.CONNECT
        self._phase_began_s = self._began_s = now_s
        self._last_problem = ""
        self._missed_polls = 0
        self._watch: LeaderWatch | None = None
        # Since when each source is away; absent while it is connected.
        self._away_since_s: dict[int, float] = {}
        self._has_run = False
        self._gateways: Mapping[str, GatewayState] = {}

    @property
    def phase(self) -> Phase:
        """The phase now."""
        return self._phase

    @property
    def not_ready(self) -> str:
        """Why the relay is not ready, for people; empty if it is."""
        if self._phase is not Phase.RELAY:
            problem = f": {self._last_problem}" if self._last_problem else ""
            return f"phase {self._phase}{problem}"
        if self._away_since_s:
            return f"not connected to the publisher of rank {', '.join(map(str, sorted(self._away_since_s)))}"
        for url, state in self._gateways.items():
            if not (state.is_connected and state.is_acknowledged):
                return f"gateway {url}: {state.last_error or 'not yet acknowledged'}"
        return "" if self._gateways else "no gateway has acknowledged"

    def start(self) -> list[Command]:
        """Begin with the engine."""
        return [AskEngine(0.0)]

    def on_time(self, now_s: float) -> list[Command]:
        """Some time has passed."""
        if self._phase is Phase.ENDED:
            return []
        if self._has_run:
            late = {rank for rank, since_s in self._away_since_s.items() if now_s - since_s >= self._limits.failure_s}
            if late:
                listed = ", ".join(map(str, sorted(late)))
                return self._end(f"the publisher of rank {listed} is away for {self._limits.failure_s:g} s")
            return []
        overall_s = self._limits.overall_s
        if overall_s is not None and now_s - self._began_s >= overall_s:
            return self._too_late("--overall-deadline-s", overall_s)
        if now_s - self._phase_began_s >= self._limits.phase_s:
            return self._too_late("--startup-deadline-s", self._limits.phase_s)
        return []

    # The engine

    def on_metadata(self, now_s: float, node: NodeMetadata) -> list[Command]:
        """The engine told its metadata."""
        if self._phase is Phase.ENDED:
            return []
        self._missed_polls = 0
        again = AskEngine(self._limits.poll_s)
        if self.node is not None:
            changed = difference(self.node, node)
            return self._end(f"the engine is another than before: {changed}") if changed else [again]
        if not node.sources and not node.is_leader:
            return self._end("this node publishes no KV events, and a follower has nothing else to relay")
        self.node = node
        if node.dist_init_addr is not None and node.nnodes > 1:
            self._enter(Phase.GROUP, now_s)
            return [again, Resolve(node.dist_init_addr, 0.0)]
        return [again, *self._relay(now_s, None)]

    def on_metadata_refused(self, why: str) -> list[Command]:
        """The engine told metadata that cannot be used; asking again would not help."""
        return [] if self._phase is Phase.ENDED else self._end(why)

    def on_engine_failed(self, why: str) -> list[Command]:
        """The engine did not answer."""
        if self._phase is Phase.ENDED:
            return []
        if self.node is None:
            self._last_problem = why
            return [AskEngine(self._limits.retry_s)]
        self._missed_polls += 1
        if self._missed_polls >= MISSED_POLLS:
            return self._end(f"the engine does not answer any more: {why}")
        return [AskEngine(self._limits.poll_s)]

    # The group and its leader

    def on_group(self, now_s: float, group: GroupIdentity) -> list[Command]:
        """The group's address is resolved."""
        if self._phase is not Phase.GROUP or self.node is None:
            return []
        self.group = group
        if self.node.is_leader:
            return self._relay(now_s, None)
        self._enter(Phase.LEADER, now_s)
        return [AskGateways(0.0)]

    def on_group_failed(self, why: str) -> list[Command]:
        """The group's address could not be resolved."""
        if self._phase is not Phase.GROUP or self.node is None or self.node.dist_init_addr is None:
            return []
        self._last_problem = why
        return [Resolve(self.node.dist_init_addr, self._limits.retry_s)]

    def on_leaders(
        self, now_s: float, views: Mapping[str, tuple[Leader, ...] | None], problem: str = ""
    ) -> list[Command]:
        """The gateways were asked: leaders by gateway, ``None`` for one that did not answer, and why."""
        if self._phase not in (Phase.LEADER, Phase.RELAY) or self.node is None or self.group is None:
            return []
        try:
            if self._watch is not None:
                moved_to = self._watch.on_leaders(now_s, views)
                return [AskGateways(self._limits.poll_s), *([Remap(moved_to)] if moved_to else [])]
            found = find_leader(self.group, (leader for view in views.values() if view for leader in view))
            if found is None:
                host = self.node.dist_init_addr
                self._last_problem = problem or f"no gateway knows a leader of {self.group.key} ({host})"
                return [AskGateways(self._limits.retry_s)]
            leader, how = found
            check_leader(leader, self.node)
        except RelayEnded as exc:
            return self._end(str(exc))
        self._watch = LeaderWatch(self.group, leader)
        commands: list[Command] = [AskGateways(self._limits.poll_s), *self._relay(now_s, leader.worker_url)]
        if how is Match.PARTIAL:
            theirs, ours = (", ".join(group.addresses) for group in (leader.group, self.group))
            commands.insert(0, Warn(f"the group resolves to {ours} here and to {theirs} at its leader"))
        return commands

    # The sources and the gateways

    def on_source(self, now_s: float, rank: int, is_connected: bool) -> None:
        """The connection to a source was made or lost."""
        if is_connected:
            self._away_since_s.pop(rank, None)
            self._has_run = self._has_run or not self._away_since_s
        else:
            self._away_since_s.setdefault(rank, now_s)

    def on_gateways(self, states: Mapping[str, GatewayState]) -> list[Command]:
        """This is how the gateways stand to the relay now."""
        self._gateways = states
        if self._phase is Phase.RELAY:
            for url, state in states.items():
                if state.is_refused:
                    return self._end(f"the gateway {url} refuses this relay: {state.last_error}")
        return []

    def on_lost(self, why: str) -> list[Command]:
        """A part of the process has ended by itself."""
        return [] if self._phase is Phase.ENDED else self._end(why)

    # Parts

    def _relay(self, now_s: float, worker_url: str | None) -> list[Command]:
        assert self.node is not None
        self._enter(Phase.RELAY, now_s)
        self._away_since_s = dict.fromkeys(self.node.ranks, now_s)
        self._has_run = not self._away_since_s
        return [Relay(self.node, self.group, worker_url)]

    def _enter(self, phase: Phase, now_s: float) -> None:
        if self._phase is Phase.ENDED:
            raise ValueError("a relay that has ended stays so")
        self._phase, self._phase_began_s, self._last_problem = phase, now_s, ""

    def _end(self, reason: str) -> list[Command]:
        self._phase = Phase.ENDED
        return [End(reason)]

    def _too_late(self, option: str, limit_s: float) -> list[Command]:
        problem = f": {self._last_problem}" if self._last_problem else ""
        return self._end(f"waited {limit_s:g} s ({option}) for {_WAITING_FOR[self._phase]}{problem}")

"""Whose follower a node is: the leader of its group among those that the gateways know. Pure.

A leader's relay announces its group to every gateway. A gateway that cannot be asked says nothing about anybody, and
one that has just restarted has not heard of the leader yet. A leader that comes back under another address may be known
under both for a while.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from relay.errors import RelayEnded
from relay.identity import GroupIdentity, Match, match
from relay.metadata import NodeMetadata

# Longer than a leader's relay takes to tell a gateway that has restarted; shorter than an operator's patience.
LEADER_GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class Leader:
    """The first node of an engine, as its relay announced it to a gateway.

    Attributes:
        worker_id: The engine's name at the gateways.
        worker_url: Its address, as gateways know it.
        group: Where its nodes meet.
        dp_size: Data-parallel ranks of the engine.
        block_size: Tokens in a block; 0 if the leader's node publishes nothing.
        local_dp_ranks: Ranks that the leader's own node publishes.
    """

    worker_id: str
    worker_url: str
    group: GroupIdentity
    dp_size: int
    block_size: int
    local_dp_ranks: tuple[int, ...]


def find_leader(group: GroupIdentity, known: Iterable[Leader]) -> tuple[Leader, Match] | None:
    """Find the leader of a group; ``None`` if nobody has announced it yet. The same leader may be there several times.

    Raises:
        RelayEnded: There are two.
    """
    found: tuple[Leader, Match] | None = None
    for leader in known:
        how = match(group, leader.group)
        if how is Match.NONE:
            continue
        if found is None:
            found = leader, how
        elif found[0].worker_id != leader.worker_id:
            names = " and ".join(sorted((found[0].worker_id, leader.worker_id)))
            raise RelayEnded(f"two leaders announce the group {group.key}: {names}; stop the relay of one of them")
    return found


def check_leader(leader: Leader, node: NodeMetadata) -> None:
    """Check that a leader and a follower can be of one engine.

    Raises:
        RelayEnded: They cannot.
    """
    who = f"the leader {leader.worker_id}"
    if leader.dp_size != node.dp_size:
        raise RelayEnded(f"{who} has dp_size {leader.dp_size}, this node {node.dp_size}")
    if leader.block_size and leader.block_size != node.block_size:
        raise RelayEnded(f"{who} has block_size {leader.block_size}, this node {node.block_size}")
    shared = sorted(set(leader.local_dp_ranks) & set(node.ranks))
    if shared:
        listed = ", ".join(map(str, shared))
        raise RelayEnded(f"{who} publishes rank {listed} itself; each rank must be one node's")


class LeaderWatch:
    """Keeps an eye on the leader that was found, until the process ends."""

    def __init__(self, group: GroupIdentity, leader: Leader) -> None:
        """Begin with the leader as it is now."""
        self._group = group
        self._leader = leader
        self._missing_since_s: float | None = None
        self._several_since_s: float | None = None

    def on_leaders(self, now_s: float, views: Mapping[str, tuple[Leader, ...] | None]) -> str | None:
        """Compare with what the gateways say now: leaders by gateway, ``None`` for one that cannot be asked.

        Returns:
            The leader's address if it is another one than before, else ``None``.

        Raises:
            RelayEnded: The leader has gone, is no longer what it was, or there are two for too long.
        """
        answers = [view for view in views.values() if view is not None]
        ours = [one for view in answers for one in view if match(self._group, one.group) is not Match.NONE]
        if not ours:
            self._is_missing(now_s, can_tell=bool(answers))
            return None
        self._missing_since_s = None
        if self._are_several(now_s, ours):
            return None
        known_url = self._leader.worker_url
        for leader in ours:
            self._compare(leader)
        self._leader = ours[0]
        return None if ours[0].worker_url == known_url else ours[0].worker_url

    def _are_several(self, now_s: float, leaders: list[Leader]) -> bool:
        if len({leader.worker_id for leader in leaders}) == 1:
            self._several_since_s = None
            return False
        if self._several_since_s is None:
            self._several_since_s = now_s
        if now_s - self._several_since_s >= LEADER_GRACE_S:
            find_leader(self._group, leaders)  # raises
        return True

    def _is_missing(self, now_s: float, can_tell: bool) -> None:
        if not can_tell:
            self._missing_since_s = None
        elif self._missing_since_s is None:
            self._missing_since_s = now_s
        elif now_s - self._missing_since_s >= LEADER_GRACE_S:
            raise RelayEnded(f"the leader {self._leader.worker_id} has gone: no gateway knows it any more")

    def _compare(self, leader: Leader) -> None:
        known = self._leader
        for name in ("dp_size", "block_size", "local_dp_ranks"):
            before, after = getattr(known, name), getattr(leader, name)
            if before != after:
                raise RelayEnded(f"{name} of the leader {known.worker_id} was {before} and is now {after}")

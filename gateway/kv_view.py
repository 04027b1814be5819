"""The gateway's view of the engines' caches: whose events are followed, and how far the index can be trusted."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import zmq

from backends.types import EngineFacts, EngineKind
from gateway.kv_relayed import RelayedRank
from kv_events.errors import SourceMisconfigured
from kv_events.index import PrefixIndex, RankId
from kv_events.index_sweep import IndexSweeper
from kv_events.publisher import PublisherSpec, SourceObserver, SubscriberLimits
from kv_events.sequence import SourceState
from kv_events.sources import Source, announced_by_sglang, announced_by_vllm, set_by_operator
from kv_events.subscriber import KvSubscriber
from routers.fleet import Member
from routers.types import RankKey

logger = logging.getLogger("forebay.kv_events")

# vLLM announces a block for each of the requests that have computed it; SGLang once.
_COPIES = {EngineKind.SGLANG: 1, EngineKind.VLLM: 2}
# What is known of these is right, if perhaps not all; what is known of others may be stale.
_BAD = frozenset({SourceState.GAP, SourceState.MISCONFIGURED})
# What was to be heard may never be; a gap may yet be filled.
_LOST = frozenset({SourceState.COLD, SourceState.MISCONFIGURED})
TRUSTED = frozenset({SourceState.LIVE, SourceState.COLD})


class FollowedSource(Protocol):
    """Whoever keeps the index in step with one rank: a subscriber, or the end of a relay."""

    problem: str

    @property
    def endpoint(self) -> str:
        """Where the events come from."""

    @property
    def position(self) -> tuple[str, int | None]:
        """Epoch, and number of the newest batch; ``None`` if unknown."""

    def on_boot(self, identity: str) -> None:
        """Take note of the identity of the engine's process."""

    def close(self) -> None:
        """Follow the rank no more, and give its blocks back. May be called again."""


@dataclass(slots=True)
class _Followed:
    """One worker whose events are followed, or could not be.

    Attributes:
        facts: What its sources were made from.
        direct: Publishers that are announced, by rank.
        subscribers: Who follows a rank.
        states: By rank, as last told.
        problem: Why its events cannot be followed; empty if they can, or if it publishes none.
    """

    facts: EngineFacts
    direct: dict[int, PublisherSpec] = field(default_factory=dict)
    subscribers: dict[int, FollowedSource] = field(default_factory=dict)
    states: dict[int, SourceState] = field(default_factory=dict)
    problem: str = ""

    @property
    def is_misconfigured(self) -> bool:
        """Something of it cannot be the worker's, which another process may have put right."""
        return bool(self.problem) or SourceState.MISCONFIGURED in self.states.values()


class KvCounters(SourceObserver, Protocol):
    """``SourceObserver`` that is told of forgotten workers too."""

    def kv_forget(self, worker: str) -> None:
        """A worker's sources are followed no more."""

    def kv_forget_rank(self, worker: str, dp_rank: int) -> None:
        """One of a worker's ranks is followed no more."""


class KvView:
    """Follows the publishers of all workers into one index. Lives on the loop.

    Args:
        counters: Told of what the sources do.
        setting_of: The operator's ``kv_events`` of a worker: ``auto``, ``off``, or an endpoint.
        limits: Times of the subscribers.

    Attributes:
        index: Which rank holds which prefix.
        sweeper: Gives back what the index has forgotten.
        follows_any: Some source is followed; asked for with every request.
        clears: By worker, how often all its blocks were forgotten, by us or as it said itself.
        on_stored: Told of a worker that has announced blocks, which the index has by then, or from which what it was to
            announce may never be heard.
    """

    def __init__(
        self,
        counters: KvCounters,
        setting_of: Callable[[str], str],
        limits: SubscriberLimits | None = None,
    ) -> None:
        self.index = PrefixIndex()
        self._counters = counters
        self._setting_of = setting_of
        self._limits = limits
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sweeper = IndexSweeper(self.index)
        self.clears: Counter[str] = Counter()
        self.on_stored: Callable[[str], None] = lambda worker_id: None
        self._followed: dict[str, _Followed] = {}
        self._trusted: set[RankId] = set()
        self.follows_any = False

    # Workers.

    def changed(self, member: Member) -> bool:
        """Follow the sources of a worker whose facts are new, and tell them of its new life.

        Returns:
            Whether it is another process than before, so that all that is assumed of it is worthless.
        """
        facts, worker_id = member.facts, member.worker.id
        if facts is None:
            return False
        known = self._followed.get(worker_id)
        is_other = known is not None and known.facts.boot_id != facts.boot_id
        if known is None or not _same_sources(known.facts, facts) or (is_other and known.is_misconfigured):
            self.forget(worker_id)
            self._follow(member, facts)
            return is_other
        if is_other:
            for subscriber in known.subscribers.values():
                subscriber.on_boot(facts.boot_id)
        known.facts = facts
        return is_other

    def forget(self, worker_id: str) -> None:
        """Follow a worker no more; its blocks leave the index."""
        followed = self._followed.pop(worker_id, None)
        if followed is None:
            return
        del self.clears[worker_id]
        self._trusted.difference_update([(worker_id, dp_rank) for dp_rank in followed.states])
        for subscriber in followed.subscribers.values():
            subscriber.close()
        self._count_sources()
        self._counters.kv_forget(worker_id)

    def _count_sources(self) -> None:
        self.follows_any = any(followed.subscribers for followed in self._followed.values())

    def clear(self, worker_id: str) -> None:
        """A worker's cache is known to be empty, or worthless: forget its blocks, and go on following it."""
        self.clears[worker_id] += 1
        for rank in self.index.ranks():
            if rank[0] == worker_id:
                self.index.clear_rank(rank)
        followed = self._followed.get(worker_id)
        for source in followed.subscribers.values() if followed else ():
            if isinstance(source, RelayedRank):
                source.on_cleared()
        self.sweeper.wake()

    def _follow(self, member: Member, facts: EngineFacts) -> None:
        worker_id = member.worker.id
        followed = self._followed[worker_id] = _Followed(facts)
        self._subscribe(member, facts, followed)
        self._count_sources()

    def _subscribe(self, member: Member, facts: EngineFacts, followed: _Followed) -> None:
        worker_id = member.worker.id
        try:
            sources = self._sources(member, facts)
            for source in sources:
                if source.dp_rank >= facts.dp_size:
                    raise SourceMisconfigured(f"it announces rank {source.dp_rank}, and has {facts.dp_size}")
                followed.direct[source.dp_rank] = publisher_spec(worker_id, facts, source)
                self._subscribe_to(followed, source.dp_rank)
        except SourceMisconfigured as exc:
            followed.problem = str(exc)
            for subscriber in followed.subscribers.values():
                subscriber.close()
            followed.direct.clear()
            followed.subscribers.clear()
            self._trusted.difference_update([(worker_id, dp_rank) for dp_rank in followed.states])
            followed.states.clear()
            logger.error("worker %s: its KV events cannot be followed: %s", worker_id, exc)
            return
        missing = sorted(set(range(facts.dp_size)) - set(followed.subscribers)) if sources else []
        if missing:
            logger.warning("worker %s: nobody tells where the KV events of the ranks %s are", worker_id, missing)

    def _subscribe_to(self, followed: _Followed, dp_rank: int) -> None:
        spec = followed.direct[dp_rank]
        subscriber = KvSubscriber(self._context, spec, self.index, self.sweeper, self, self._limits)
        followed.subscribers[dp_rank] = subscriber
        if followed.facts.boot_id:
            subscriber.on_boot(followed.facts.boot_id)
        subscriber.start()

    # Relays.

    def attach(self, worker_id: str, dp_rank: int, make: Callable[[], FollowedSource]) -> None:
        """Follow a rank over a relay from now on, in place of whoever followed it; ``make`` makes the relay's end.

        Raises:
            KeyError: The worker's facts are not known.
        """
        followed = self._followed[worker_id]
        self._end(worker_id, followed, dp_rank)
        source = followed.subscribers[dp_rank] = make()
        if followed.facts.boot_id:
            source.on_boot(followed.facts.boot_id)
        self._count_sources()

    def detach(self, worker_id: str, dp_rank: int, source: FollowedSource) -> None:
        """Give up a relay's end, and follow the rank where it is announced, if it is; ranks of others stay."""
        followed = self._followed.get(worker_id)
        if followed is None or followed.subscribers.get(dp_rank) is not source:
            source.close()
            return
        self._end(worker_id, followed, dp_rank)
        if dp_rank in followed.direct:
            self._subscribe_to(followed, dp_rank)
        else:
            self._counters.kv_forget_rank(worker_id, dp_rank)
        self._count_sources()

    def _end(self, worker_id: str, followed: _Followed, dp_rank: int) -> None:
        known = followed.subscribers.pop(dp_rank, None)
        followed.states.pop(dp_rank, None)
        self._trusted.discard((worker_id, dp_rank))
        if known is not None:
            known.close()

    def knows(self, worker_id: str) -> bool:
        """Whether ranks of a worker can be followed."""
        return worker_id in self._followed

    def relay_of(self, worker_id: str, dp_rank: int) -> str | None:
        """Name of the relay's process that brings a rank's events, ``None`` if they come from the engine itself."""
        followed = self._followed.get(worker_id)
        source = followed.subscribers.get(dp_rank) if followed else None
        return source.publisher if isinstance(source, RelayedRank) else None

    def _sources(self, member: Member, facts: EngineFacts) -> Sequence[Source]:
        host = member.worker.origin.host
        setting = self._setting_of(member.worker.id)
        if setting == "off":
            return ()
        if setting != "auto":
            return set_by_operator(setting, host, facts.dp_size, facts.page_size)
        if not facts.kv_announcement:
            return ()
        if facts.engine is EngineKind.VLLM:
            return announced_by_vllm(facts.kv_announcement, host, facts.page_size) or ()
        return announced_by_sglang(facts.kv_announcement, host) or ()

    # What is known.

    def state(self, worker_id: str, dp_rank: int) -> str:
        """State of a rank's source: a ``SourceState``, or ``off`` where none is followed."""
        followed = self._followed.get(worker_id)
        if followed is None:
            return "off"
        if dp_rank not in followed.subscribers:
            return str(SourceState.MISCONFIGURED) if followed.problem else "off"
        return str(followed.states.get(dp_rank, SourceState.COLD))

    def problem(self, worker_id: str) -> str:
        """Why a worker's events cannot be followed; empty if there is nothing to say."""
        followed = self._followed.get(worker_id)
        if followed is None:
            return ""
        told = (subscriber.problem for subscriber in followed.subscribers.values())
        return followed.problem or next(filter(None, told), "")

    def is_trusted(self, key: RankId) -> bool:
        """Whether what the index has of a rank is right."""
        return key in self._trusted

    def trusts_all(self, keys: Iterable[RankId]) -> bool:
        """The same for several ranks at once, in a fraction of the time."""
        return self._trusted.issuperset(keys)

    def is_whole(self, key: RankKey) -> bool:
        """Whether the index has all that a rank holds, so that nothing needs to be guessed of it."""
        followed = self._followed.get(key.worker_id)
        return followed is not None and followed.states.get(key.dp_rank) is SourceState.LIVE

    def blocks(self, worker_id: str, dp_rank: int) -> int:
        """Blocks that the index has of a rank's device."""
        return self.index.rank_blocks((worker_id, dp_rank))

    def position(self, worker_id: str, dp_rank: int) -> tuple[str | None, int | None]:
        """Epoch and last sequence number of a rank's source, ``None`` where none is followed."""
        followed = self._followed.get(worker_id)
        subscriber = followed.subscribers.get(dp_rank) if followed else None
        if subscriber is None:
            return None, None
        return subscriber.position

    def is_eagle(self, key: RankKey) -> bool:
        """Whether the blocks that a rank announces cover one token more than its block size."""
        return key in self.index.eagle_ranks

    def endpoint(self, key: RankKey) -> str | None:
        """Where a rank's events are subscribed to, ``None`` if they are not."""
        followed = self._followed.get(key.worker_id)
        subscriber = followed.subscribers.get(key.dp_rank) if followed else None
        return subscriber.endpoint if subscriber else None

    # What sources tell; see ``SourceObserver``.

    def kv_event(self, worker: str, kind: str) -> None:
        """One event was applied."""
        if kind == "cleared":
            self.clears[worker] += 1
        elif kind == "stored":
            self.on_stored(worker)
        self._counters.kv_event(worker, kind)

    def kv_dropped(self, reason: str, count: int) -> None:
        """Something was left out."""
        self._counters.kv_dropped(reason, count)

    def kv_reset(self, worker: str, reason: str) -> None:
        """All that was known of a source was forgotten."""
        self._counters.kv_reset(worker, reason)

    def kv_state(self, worker: str, dp_rank: int, state: SourceState) -> None:
        """A source changed its state."""
        followed = self._followed.get(worker)
        if followed is not None:
            followed.states[dp_rank] = state
            (self._trusted.add if state in TRUSTED else self._trusted.discard)((worker, dp_rank))
            level = logging.WARNING if state in _BAD else logging.INFO
            logger.log(level, "worker %s: KV events of rank %d are %s", worker, dp_rank, state)
            if state in _LOST:
                self.on_stored(worker)
        self._counters.kv_state(worker, dp_rank, state)

    def close(self) -> None:
        """Close every socket."""
        for worker_id in list(self._followed):
            self.forget(worker_id)
        self.sweeper.close()
        self._context.destroy(linger=0)


def publisher_spec(worker_id: str, facts: EngineFacts, source: Source) -> PublisherSpec:
    """Describe the publisher of one rank of a worker, with the limits of its engine."""
    return PublisherSpec(
        worker_id,
        source,
        dp_size=facts.dp_size,
        capacity_blocks=facts.kv_blocks,
        max_copies=_COPIES[facts.engine],
    )


def _same_sources(known: EngineFacts, new: EngineFacts) -> bool:
    return (known.engine, known.dp_size, known.page_size, known.kv_blocks, known.kv_announcement) == (
        new.engine,
        new.dp_size,
        new.page_size,
        new.kv_blocks,
        new.kv_announcement,
    )

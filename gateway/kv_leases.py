"""Who brings the events of which rank: one lease for each rank of a worker, held by one relay. Pure.

A lease ends when its relay gives it back, or has been silent for too long. Whoever asks for a rank that another relay
holds is put off first, since that one may have died a moment ago; once the holder was heard again, for good.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from backends.types import EngineFacts
from kv_events.relay_wire import PROTOCOL, Hello, Refuse


@dataclass(slots=True)
class Relay:
    """One relay that was accepted.

    Attributes:
        session: The connection, as the socket names it.
        hello: What it said of itself.
        worker_id: Whose ranks it brings.
        heard_s: When it was last heard.
        ranks: Those that it brings.
        is_lost: It is silent; what came from it is kept for a while, in case it comes back.
        taken_bytes: What was applied in this session, to be acknowledged.
        acked_bytes: What was acknowledged.
        received_bytes: What has come in this session, as the window counts.
    """

    session: bytes
    hello: Hello
    worker_id: str
    heard_s: float
    ranks: frozenset[int]
    is_lost: bool = False
    taken_bytes: int = 0
    acked_bytes: int = 0
    received_bytes: int = 0


class OfferRefused(Exception):
    """A relay is not accepted.

    Attributes:
        refusal: What it is told.
    """

    def __init__(self, status: int, reason: str, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.refusal = Refuse(status, reason, message, is_final)


@dataclass(slots=True)
class LeaseTable:
    """The relays, by session and by rank.

    Attributes:
        beat_s: Time between two heartbeats of a relay.
        lease_s: Silence after which its ranks are free.
    """

    beat_s: float
    lease_s: float
    _by_session: dict[bytes, Relay] = field(default_factory=dict)
    _holders: dict[tuple[str, int], Relay] = field(default_factory=dict)
    _put_off_s: dict[str, float] = field(default_factory=dict)

    def relays(self) -> list[Relay]:
        """All relays, lost ones included until they are dropped."""
        return list(self._by_session.values())

    def of_session(self, session: bytes) -> Relay | None:
        """The relay behind a connection."""
        return self._by_session.get(session)

    def holder(self, worker_id: str, dp_rank: int) -> Relay | None:
        """Who brings a rank."""
        return self._holders.get((worker_id, dp_rank))

    def claim(self, session: bytes, hello: Hello, worker_id: str, now_s: float) -> tuple[Relay, list[Relay]]:
        """Give a relay all ranks that it offers, or none.

        Returns:
            The relay, and those whose place it takes: its own earlier session, and lost ones.

        Raises:
            OfferRefused: Another relay holds one of them.
        """
        ranks = frozenset(offer.dp_rank for offer in hello.ranks)
        before: list[Relay] = []
        for relay in self.relays():
            if relay.hello.publisher == hello.publisher:
                before.append(relay)
            elif relay.worker_id == worker_id and relay.ranks & ranks:
                if not relay.is_lost and now_s - relay.heard_s <= self.lease_s:
                    raise self._held(hello, relay, min(relay.ranks & ranks), now_s)
                before.append(relay)
        for relay in before:
            self.drop(relay)
        self._put_off_s.pop(hello.publisher, None)
        relay = Relay(session, hello, worker_id, now_s, ranks)
        self._by_session[session] = relay
        for dp_rank in ranks:
            self._holders[worker_id, dp_rank] = relay
        return relay, before

    def _held(self, hello: Hello, holder: Relay, dp_rank: int, now_s: float) -> OfferRefused:
        # A relay that has died since was not heard a whole beat after somebody else came for its place.
        asked_s = self._put_off_s.setdefault(hello.publisher, now_s)
        is_alive = holder.heard_s > asked_s + self.beat_s
        text = f"rank {dp_rank} of {holder.worker_id} has a relay already, {holder.hello.publisher[:8]}"
        if not is_alive:
            text += "; it is tried again in case that one is gone"
        return OfferRefused(409, "relay_duplicate", text, is_final=is_alive)

    def silent(self, now_s: float) -> list[Relay]:
        """Note which relays have been silent for too long, and give those that are so anew."""
        found = [relay for relay in self.relays() if not relay.is_lost and now_s - relay.heard_s > self.lease_s]
        for relay in found:
            relay.is_lost = True
        self._put_off_s = {name: at for name, at in self._put_off_s.items() if now_s - at < 10 * self.lease_s}
        return found

    def drop(self, relay: Relay) -> None:
        """Forget a relay; its ranks are free. May be called again."""
        self._by_session.pop(relay.session, None)
        for dp_rank in relay.ranks:
            if self._holders.get((relay.worker_id, dp_rank)) is relay:
                del self._holders[relay.worker_id, dp_rank]


def check_hello(hello: Hello) -> None:
    """Check what needs no knowledge of the worker.

    Raises:
        OfferRefused: The versions differ, or the offer contradicts itself.
    """
    if hello.protocol != PROTOCOL:
        raise OfferRefused(
            426,
            "relay_version",
            f"this gateway speaks version {PROTOCOL} of the relay's protocol, not {hello.protocol}",
        )
    numbers = [offer.dp_rank for offer in hello.ranks]
    if len(set(numbers)) < len(numbers):
        raise OfferRefused(400, "relay_malformed", "a rank is offered twice", is_final=True)


def check_offer(hello: Hello, worker_id: str, facts: EngineFacts, kv_setting: str) -> None:
    """Check that the ranks that a relay offers can be the worker's.

    Args:
        hello: The offer.
        worker_id: The worker, for messages.
        facts: What its engine says of itself.
        kv_setting: What the operator says of its events: ``auto``, ``off``, or an endpoint.

    Raises:
        OfferRefused: They cannot; the relay is told why.
    """
    if kv_setting != "auto":
        text = f"worker {worker_id} has kv_events={kv_setting}; leave that out to have its events relayed"
        raise OfferRefused(409, "relay_not_wanted", text, is_final=True)
    if hello.dp_size != facts.dp_size:
        text = f"worker {worker_id} has {facts.dp_size} rank(s), the relay's engine {hello.dp_size}"
        raise OfferRefused(422, "relay_dp_size", text, is_final=True)
    for offer in hello.ranks:
        if offer.dp_rank >= facts.dp_size:
            text = f"rank {offer.dp_rank} is out of range: worker {worker_id} has {facts.dp_size} rank(s)"
            raise OfferRefused(422, "rank_out_of_range", text, is_final=True)
        if offer.block_size not in (None, facts.page_size):
            text = f"rank {offer.dp_rank} has blocks of {offer.block_size} tokens, worker {worker_id} {facts.page_size}"
            raise OfferRefused(422, "relay_block_size", text, is_final=True)


def describe(relay: Relay, states: Mapping[int, str]) -> dict[str, object]:
    """One relay as the admin routes show it; ``states`` by rank."""
    group = relay.hello.group
    return {
        "publisher": relay.hello.publisher,
        "worker_id": relay.worker_id,
        "worker_url": relay.hello.worker_url,
        "role": relay.hello.role,
        "version": relay.hello.relay_version,
        "state": "lost" if relay.is_lost else "live",
        "dp_size": relay.hello.dp_size,
        "ranks": [
            {"dp_rank": offer.dp_rank, "block_size": offer.block_size, "state": states.get(offer.dp_rank)}
            for offer in relay.hello.ranks
        ],
        "group": {"literal": group.literal, "addresses": list(group.addresses)} if group else None,
    }

"""Where relays connect: takes the events of ranks that this gateway cannot reach by itself. Shell.

All of it happens in ``_tick``, as with a subscriber: what is received is applied before more is received, for two
milliseconds at a time. Relays stop sending while a window of theirs is not acknowledged.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

import zmq

from backends.worker_spec import WorkerSpecError, parse_worker_spec, worker_id
from gateway.kv_leases import LeaseTable, OfferRefused, Relay, check_hello, check_offer
from gateway.kv_relayed import RelayedRank
from gateway.kv_view import KvView, publisher_spec
from gateway.kv_zap import KeyGuard
from kv_events.errors import RelayMessageRefused
from kv_events.relay_keys import KeyPair, seen_from
from kv_events.relay_wire import (
    MAX_BODY_BYTES,
    WINDOW_BYTES,
    Accept,
    Ack,
    Beat,
    Bye,
    Clear,
    Hello,
    Refuse,
    Resync,
    ToRelay,
    cost_bytes,
    decode_from_relay,
    encode,
)
from kv_events.sources import Source
from kv_events.zmq_reader import Context, ZmqReader, quiet_socket
from routers.fleet import Member

logger = logging.getLogger("forebay.kv_events")

BURST_MESSAGES: Final = 32
# Sooner than the timer where a window fills.
ACK_BYTES: Final = WINDOW_BYTES // 8
MAX_UNAPPLIED_BYTES: Final = 2 * WINDOW_BYTES + MAX_BODY_BYTES


@dataclass(frozen=True, slots=True)
class ListenTimes:
    """Times, all in seconds; tests shorten them.

    Attributes:
        beat_s: Between two heartbeats, either way.
        lease_s: Silence after which the other side is lost.
        grace_s: What came from a lost relay is kept for so long, in case it comes back.
        tick_s: Work at one go.
    """

    beat_s: float = 1.0
    lease_s: float = 10.0
    grace_s: float = 10.0
    tick_s: float = 0.002


class KvListener:
    """The socket to which relays connect, and their leases. Made on a running loop; ``close`` ends it.

    Args:
        endpoint: ZMQ address to listen on.
        keys: The gateway's CURVE keys, ``None`` to let anybody inside this machine connect.
        authorized: Public keys that may connect.
        kv: Follows the ranks.
        member_of: Finds a worker by its id.
        setting_of: The operator's ``kv_events`` of a worker.
        times: Durations.

    Attributes:
        endpoint: Where it listens, with the port that was taken.
        public_key: The gateway's, in Z85; ``None`` without keys.

    Raises:
        zmq.ZMQError: The address cannot be taken.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        keys: KeyPair | None,
        authorized: Collection[bytes],
        kv: KvView,
        member_of: Callable[[str], Member | None],
        setting_of: Callable[[str], str],
        times: ListenTimes | None = None,
    ) -> None:
        self._times = times or ListenTimes()
        self._kv = kv
        self._member_of = member_of
        self._setting_of = setting_of
        self._loop = asyncio.get_running_loop()
        self._table = LeaseTable(self._times.beat_s, self._times.lease_s)
        self._ranks: dict[tuple[str, int], RelayedRank] = {}
        self._busy: deque[RelayedRank] = deque()
        self._next_tick: asyncio.Handle | None = None
        self._context: Context = zmq.Context()
        self._guard: KeyGuard | None = None
        socket = quiet_socket(self._context, zmq.ROUTER)
        if keys is not None:
            self._guard = KeyGuard(self._context, authorized, lambda: self._kv.kv_dropped("relay_key", 1))
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = keys.public_key, keys.secret_key
            socket.zap_domain = b"forebay"
        self.public_key = keys.public_key.decode() if keys else None
        try:
            socket.bind(endpoint)
        except zmq.ZMQError:
            socket.close(0)
            if self._guard is not None:
                self._guard.close()
            self._context.destroy(linger=0)
            raise
        # Without the IPv6 form of IPv4 addresses; all addresses are one wildcard, which relays replace.
        self.endpoint = seen_from(socket.getsockopt_string(zmq.LAST_ENDPOINT), "0.0.0.0")
        self._socket = socket
        self._reader = ZmqReader(socket, self._wake)
        self._timer = self._loop.call_later(self._times.beat_s, self._on_beat)
        self._is_closed = False

    def relays(self) -> list[Relay]:
        """The relays that are accepted, lost ones included for as long as they may come back."""
        return self._table.relays()

    def close(self) -> None:
        """Close the socket; the ranks of relays are given up. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._timer.cancel()
        if self._next_tick is not None:
            self._next_tick.cancel()
        for rank in self._ranks.values():
            rank.close()
        self._reader.close()
        if self._guard is not None:
            self._guard.close()
        self._context.destroy(linger=0)

    # Work

    def _wake(self) -> None:
        if self._next_tick is None and not self._is_closed:
            self._next_tick = self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._next_tick = None
        until_s = self._loop.time() + self._times.tick_s
        while True:
            if self._busy:
                self._apply()
            elif not self._receive():
                return
            if self._loop.time() >= until_s:
                self._wake()
                return

    def _apply(self) -> None:
        """Do a piece of the work of the next rank, each in its turn."""
        rank = self._busy.popleft()
        if rank.is_closed:
            return
        # Without work it has dropped what there was, which the relay's window must hear of all the same.
        if rank.has_work:
            rank.step(self._loop.time())
        if rank.has_work:
            self._busy.append(rank)
        # Whoever holds it now: the session that the work came with may be over.
        holder = self._table.holder(*rank.rank)
        if holder is not None:
            self._credit(holder, rank)

    def _credit(self, relay: Relay, rank: RelayedRank) -> None:
        relay.taken_bytes += rank.done_bytes
        rank.done_bytes = 0
        if relay.taken_bytes - relay.acked_bytes >= ACK_BYTES:
            self._ack(relay)

    def _ack(self, relay: Relay) -> None:
        relay.acked_bytes = relay.taken_bytes
        self._send(relay.session, Ack(relay.taken_bytes))

    def _send(self, session: bytes, message: ToRelay) -> None:
        try:
            self._socket.send_multipart([session, *encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as exc:
            logger.info("a relay cannot be told anything: %s", exc.strerror)
        # Sending may take in what the descriptor would have told of.
        self._wake()

    def _receive(self) -> bool:
        for count in range(BURST_MESSAGES):
            frames = self._reader.receive()
            if frames is None:
                return count > 0
            self._message(frames[0], frames[1:])
        return True

    # Messages

    def _message(self, session: bytes, frames: Sequence[bytes]) -> None:
        relay = self._table.of_session(session)
        try:
            message, body = decode_from_relay(frames)
        except RelayMessageRefused as exc:
            self._refuse(session, relay, 400, "relay_malformed", f"a message cannot be used: {exc}")
            return
        if isinstance(message, Hello):
            self._hello(session, message)
            return
        if relay is None:
            self._refuse(session, None, 410, "", "the session is over; say hello")
            return
        self._heard(relay)
        if isinstance(message, Beat):
            for health in message.ranks:
                rank = self._rank_of(relay, health.dp_rank)
                if rank is not None:
                    rank.on_health(health.is_connected)
        elif isinstance(message, Bye):
            logger.info("the relay %s of worker %s has gone", relay.hello.publisher[:8], relay.worker_id)
            self._drop(relay)
        else:
            rank = self._rank_of(relay, message.dp_rank)
            if rank is None:
                self._refuse(session, relay, 410, "relay_other_rank", f"rank {message.dp_rank} is not this relay's")
                return
            cost = cost_bytes(frames)
            relay.received_bytes += cost
            if relay.received_bytes - relay.taken_bytes > MAX_UNAPPLIED_BYTES:
                self._refuse(session, relay, 400, "relay_window", "more was sent than the window allows")
                return
            was_busy = rank.has_work
            rank.take(message, body, cost)
            if rank.has_work and not was_busy:
                self._busy.append(rank)
            self._credit(relay, rank)

    def _rank_of(self, relay: Relay, dp_rank: int) -> RelayedRank | None:
        if self._table.holder(relay.worker_id, dp_rank) is not relay:
            return None
        rank = self._ranks.get((relay.worker_id, dp_rank))
        return None if rank is None or rank.is_closed else rank

    def _heard(self, relay: Relay) -> None:
        relay.heard_s = self._loop.time()
        if relay.is_lost:
            relay.is_lost = False
            for rank in self._ranks_of(relay):
                rank.on_session_back()

    def _refuse(self, session: bytes, relay: Relay | None, status: int, reason: str, text: str) -> None:
        if reason:
            self._kv.kv_dropped(reason, 1)
            logger.warning("a relay is refused: %s", text)
        if relay is not None:
            self._drop(relay)
        self._send(session, Refuse(status, reason, text, is_final=False))

    def _hello(self, session: bytes, hello: Hello) -> None:
        try:
            member = self._member(hello)
            facts = member.facts
            if facts is None or not self._kv.knows(member.worker.id):
                raise OfferRefused(503, "", f"worker {member.worker.id} has not been reached yet")
            check_offer(hello, member.worker.id, facts, self._setting_of(member.worker.id))
            relay, before = self._table.claim(session, hello, member.worker.id, self._loop.time())
        except OfferRefused as exc:
            if exc.refusal.reason:
                self._kv.kv_dropped(exc.refusal.reason, 1)
                logger.warning("the relay %s is refused: %s", hello.publisher[:8], exc)
            self._send(session, exc.refusal)
            return
        for other in before:
            for dp_rank in other.ranks:
                if other.worker_id != relay.worker_id or dp_rank not in relay.ranks:
                    self._detach(other.worker_id, dp_rank)
        ranks = [self._attach(relay, member, offer.dp_rank, offer.block_size) for offer in hello.ranks]
        cursors = tuple(cursor for rank in ranks if (cursor := rank.cursor()) is not None)
        for rank in ranks:
            rank.on_session()
        times = self._times
        logger.info(
            "worker %s: the relay %s (%s) brings the KV events of the ranks %s",
            relay.worker_id,
            hello.publisher[:8],
            hello.role,
            sorted(relay.ranks),
        )
        self._send(session, Accept(relay.worker_id, times.beat_s, times.lease_s, cursors))
        for rank in ranks:
            rank.report()

    def _member(self, hello: Hello) -> Member:
        check_hello(hello)
        try:
            member = self._member_of(worker_id(parse_worker_spec(hello.worker_url)))
        except WorkerSpecError as exc:
            raise OfferRefused(404, "relay_unknown_worker", f"{hello.worker_url!r} is no worker: {exc}") from exc
        if member is None:
            raise OfferRefused(
                404,
                "relay_unknown_worker",
                f"there is no worker {hello.worker_url} here; add it, or correct --worker-url",
            )
        return member

    def _attach(self, relay: Relay, member: Member, dp_rank: int, block_size: int | None) -> RelayedRank:
        """Give a relay a rank; what is known of it stays if it comes from the same relay."""
        assert member.facts is not None
        key = (relay.worker_id, dp_rank)
        source = Source(dp_rank, "", block_size=block_size or member.facts.page_size)
        spec = publisher_spec(relay.worker_id, member.facts, source)
        known = self._ranks.get(key)
        if known is not None and not known.is_closed and (known.publisher, known.spec) == (relay.hello.publisher, spec):
            return known

        def make() -> RelayedRank:
            rank = self._ranks[key] = RelayedRank(
                spec, relay.hello.publisher, self._kv.index, self._kv.sweeper, self._kv, self._teller(key)
            )
            return rank

        self._kv.attach(relay.worker_id, dp_rank, make)
        return self._ranks[key]

    def _teller(self, key: tuple[str, int]) -> Callable[[Resync | Clear], None]:
        def tell(message: Resync | Clear) -> None:
            holder = self._table.holder(*key)
            if holder is not None and not self._is_closed:
                self._send(holder.session, message)

        return tell

    # Time

    def _on_beat(self) -> None:
        now_s = self._loop.time()
        # While this loop stood still nobody could be heard.
        late_s = now_s - self._timer.when()
        self._timer = self._loop.call_later(self._times.beat_s, self._on_beat)
        for relay in self.relays():
            relay.heard_s += late_s
        for relay in self._table.silent(now_s):
            logger.warning("worker %s: the relay %s is silent", relay.worker_id, relay.hello.publisher[:8])
            for rank in self._ranks_of(relay):
                rank.on_session_lost()
        for relay in self.relays():
            ranks = self._ranks_of(relay)
            if relay.is_lost:
                if now_s - relay.heard_s > self._times.lease_s + self._times.grace_s:
                    self._drop(relay)
            elif len(ranks) < len(relay.ranks) or self._member_of(relay.worker_id) is None:
                self._refuse(relay.session, relay, 410, "", f"worker {relay.worker_id} is another one than it was")
            else:
                self._ack(relay)
            for rank in ranks:
                rank.expire(now_s)

    def _ranks_of(self, relay: Relay) -> list[RelayedRank]:
        found = (self._rank_of(relay, dp_rank) for dp_rank in relay.ranks)
        return [rank for rank in found if rank is not None]

    def _drop(self, relay: Relay) -> None:
        self._table.drop(relay)
        for dp_rank in relay.ranks:
            self._detach(relay.worker_id, dp_rank)

    def _detach(self, worker: str, dp_rank: int) -> None:
        if self._table.holder(worker, dp_rank) is None:
            rank = self._ranks.pop((worker, dp_rank), None)
            if rank is not None:
                self._kv.detach(worker, dp_rank, rank)

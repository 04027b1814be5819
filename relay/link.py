"""One gateway, held for ever: found by its HTTP address, connected, told everything, and found again. Shell.

Each connection is a socket of its own, which does not reconnect by itself: what it had not sent yet when the
connection was lost must not reach a gateway that has forgotten the session.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from backends.upstream.base import UpstreamClient
from kv_events.errors import RelayMessageRefused
from kv_events.relay_keys import KeyPair, generate_keys
from kv_events.relay_wire import (
    Accept,
    Ack,
    Beat,
    Bye,
    Clear,
    Hello,
    RankHealth,
    Refuse,
    Resync,
    decode_from_gateway,
    encode,
)
from kv_events.zmq_reader import Context, ZmqReader, quiet_socket
from relay.feed import GatewayState
from relay.lanes import Lanes, LinkCounts
from relay.lookup import Listener, LookupFailed, look_up
from relay.mirror import SourceMirror

logger = logging.getLogger("forebay.relay")

FIRST_BACKOFF_S: Final = 0.1
MAX_BACKOFF_S: Final = 5.0
# Of the HTTP request, and of the answer to ``Hello``.
ANSWER_TIMEOUT_S: Final = 10.0
# For the last message to leave; nothing depends on it.
BYE_LINGER_MS: Final = 200
_BURST: Final = 16

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED


class _Session:
    """One connection to one gateway."""

    def __init__(self, context: Context, listener: Listener, keys: KeyPair | None, wake: Callable[[], None]) -> None:
        self.is_lost = False
        # It was accepted, or lost.
        self.changed = asyncio.Event()
        self.lanes: Lanes | None = None
        self.accept: Accept | None = None
        self.error = ""
        self.is_refused = False
        self.heard_at_s = asyncio.get_running_loop().time()
        socket = quiet_socket(context, zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 0)  # the window bounds it
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        if listener.public_key is not None:
            keys = keys or generate_keys()
            socket.curve_serverkey = listener.public_key
            socket.curve_publickey, socket.curve_secretkey = keys.public_key, keys.secret_key
        # Asking a socket that has nothing takes as long as sending, so it is not asked without a cause.
        self.may_read = True
        self._wake = wake
        self._socket = socket
        self._monitor = ZmqReader(socket.get_monitor_socket(_FAILED | _LOST), self._watch)
        self._reader = ZmqReader(socket, self._has_come)
        socket.connect(listener.endpoint)

    def end(self, error: str, *, is_refused: bool = False) -> None:
        """Use the connection no more; the first reason stands."""
        if not self.is_lost:
            self.error, self.is_refused = error, is_refused
            self.is_lost = True
            self.changed.set()

    def _has_come(self) -> None:
        self.may_read = True
        self._wake()

    def receive(self) -> list[bytes] | None:
        """Read one message; ``None`` if there is none."""
        if not self.may_read:
            return None
        frames = self._reader.receive()
        self.may_read = frames is not None
        return frames

    def _watch(self) -> None:
        """Read what the connection itself tells."""
        while (frames := self._monitor.receive()) is not None:
            event = parse_monitor_message(frames)["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.end("the gateway refuses this relay's key; add its public key to --kv-authorized-keys")
            elif event & _FAILED:
                self.end("the gateway's listener and this relay do not agree on keys; see --key-file")
            elif event & _LOST:
                self.end("the connection to the gateway's listener was lost, or could not be made")

    def send(self, frames: list[bytes]) -> None:
        """Give a message to the socket, which takes any number."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
            # Sending may take in what the descriptor would have told of.
            self.may_read = True
        except zmq.ZMQError as exc:
            self.end(f"cannot send to the gateway: {exc.strerror}")

    def close(self) -> None:
        """Close the socket; a session that still holds gives its ranks back."""
        if self._socket.closed:
            return
        if self.lanes is not None and not self.is_lost:
            self.send(encode(Bye()))
        self.end("closed")
        self._socket.disable_monitor()
        self._monitor.close()
        self._reader.close(BYE_LINGER_MS)


class GatewayLink:
    """Holds the connection to one gateway while ``run`` runs.

    Args:
        url: The gateway's HTTP address.
        hello: Who this relay is.
        mirrors: What it brings.
        context: For sockets; stays its owner's.
        client: For the HTTP request; stays its owner's.
        keys: CURVE keys of this relay, ``None`` for plain connections inside the machine.
        admin_key: The gateway's admin key, ``None`` if it has none.
        wake: Called when ``pump`` has something to do.

    Attributes:
        counts: What was sent.
    """

    def __init__(
        self,
        url: str,
        hello: Hello,
        mirrors: Sequence[SourceMirror],
        *,
        context: Context,
        client: UpstreamClient,
        keys: KeyPair | None,
        admin_key: str | None,
        wake: Callable[[], None],
    ) -> None:
        self.counts = LinkCounts()
        self._url = url
        self._hello = hello
        self._mirrors = mirrors
        self._context = context
        self._client = client
        self._keys = keys
        self._admin_key = admin_key
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._session: _Session | None = None
        self._error = ""
        self._is_refused = False
        self._is_closed = False

    def state(self) -> GatewayState:
        """How the gateway stands to this relay now."""
        session = self._session
        is_accepted = session is not None and session.lanes is not None and not session.is_lost
        return GatewayState(session is not None and is_accepted, is_accepted, self._error, self._is_refused)

    async def run(self) -> None:
        """Connect, and again whenever the connection is lost, until cancelled or closed."""
        backoff_s = FIRST_BACKOFF_S
        while not self._is_closed:
            was_accepted = False
            try:
                listener = await look_up(self._client, self._url, self._admin_key, self._keys, ANSWER_TIMEOUT_S)
                was_accepted = await self._hold(listener)
            except LookupFailed as exc:
                self._note(str(exc))
            except zmq.ZMQError as exc:
                self._note(f"no connection to the gateway's listener: {exc.strerror}")
            backoff_s = FIRST_BACKOFF_S if was_accepted else min(backoff_s * 2, MAX_BACKOFF_S)
            await asyncio.sleep(backoff_s)

    def _note(self, error: str, *, is_refused: bool = False) -> None:
        if error and error != self._error and not self._is_closed:
            logger.warning("gateway %s: %s", self._url, error)
        self._error, self._is_refused = error, is_refused

    async def _hold(self, listener: Listener) -> bool:
        """Keep one connection for as long as it holds; true if the gateway had accepted this relay."""
        session = self._session = _Session(self._context, listener, self._keys, self._wake)
        try:
            session.send(encode(self._hello))
            while not session.is_lost:
                session.changed.clear()
                beat_s = session.accept.beat_s if session.accept else ANSWER_TIMEOUT_S
                due_s = self._loop.time() + beat_s
                try:
                    async with asyncio.timeout(beat_s):
                        await session.changed.wait()
                except TimeoutError:
                    # While this loop stood still nothing could be heard.
                    session.heard_at_s += self._loop.time() - due_s
                    self._on_beat(session)
        finally:
            self._session = None
            session.close()
        self._note(session.error, is_refused=session.is_refused)
        return session.lanes is not None

    def _on_beat(self, session: _Session) -> None:
        limit_s = session.accept.lease_s if session.accept else ANSWER_TIMEOUT_S
        if self._loop.time() - session.heard_at_s >= limit_s:
            session.end(f"the gateway has said nothing for {limit_s:g} s")
        elif session.lanes is not None:
            self.beat()

    def beat(self) -> None:
        """Tell that this relay is there, and which publishers are connected."""
        if self._session is not None and self._session.lanes is not None:
            health = tuple(RankHealth(mirror.dp_rank, mirror.is_connected) for mirror in self._mirrors)
            self._session.send(encode(Beat(health)))
            self._wake()

    def remap(self, hello: Hello) -> None:
        """Give the ranks back, and offer them as another worker's."""
        self._hello = hello
        if self._session is not None:
            if self._session.lanes is not None and not self._session.is_lost:
                self._session.send(encode(Bye()))
            self._session.end("the leader has another address")

    def close(self, *, is_silent: bool = False) -> None:
        """Give the ranks back, or go without a word, and close the connection; ``run`` ends."""
        self._is_closed = True
        if self._session is not None:
            if is_silent:
                self._session.end("closed")
            self._session.close()

    def pump(self) -> bool:
        """Read what has come and send a few messages; false if there was nothing to do."""
        session = self._session
        if session is None or session.is_lost:
            return False
        did = False
        while (frames := session.receive()) is not None:
            did = True
            session.heard_at_s = self._loop.time()
            try:
                self._take(session, frames)
            except RelayMessageRefused as exc:
                session.end(f"what the gateway sent cannot be understood: {exc}")
        for _ in range(_BURST):
            message = session.lanes.next_message() if session.lanes else None
            if message is None or session.is_lost:
                break
            did = True
            session.send(message)
        return did

    def _take(self, session: _Session, frames: list[bytes]) -> None:
        message = decode_from_gateway(frames)
        lanes = session.lanes
        if isinstance(message, Refuse):
            session.end(message.message, is_refused=message.is_final)
        elif isinstance(message, Accept):
            session.accept = message
            session.lanes = Lanes(self._mirrors, message.cursors, self.counts)
            self.counts.sessions += 1
            session.changed.set()
            self._note("")
            logger.info("gateway %s: accepted as a relay of worker %s", self._url, message.worker_id)
            self.beat()
        elif lanes is not None and isinstance(message, Ack):
            lanes.taken_bytes = message.taken_bytes
        elif lanes is not None and isinstance(message, Resync):
            logger.warning("gateway %s wants rank %d anew: %s", self._url, message.dp_rank, message.reason)
            lanes.resync(message.dp_rank)
        elif lanes is not None and isinstance(message, Clear):
            for mirror in self._mirrors:
                if mirror.dp_rank == message.dp_rank:
                    mirror.clear(message.epoch, message.last_seq)

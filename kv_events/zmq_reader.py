"""A plain ZMQ socket on the running loop, by its file descriptor. Shell.

The descriptor of a ZMQ socket tells that something has happened to it, once, and not that there is something to read.
So whoever is woken reads until there is nothing more, or comes back by itself.
"""

import asyncio
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

Context = zmq.Context[zmq.Socket[bytes]]

MAX_MESSAGE_BYTES = 64 << 20
RECEIVE_HWM = 2_000
# A publisher drops replies for which there is no room, so there must be room for all that it keeps.
REPLAY_HWM = 20_000
RECONNECT_MS = 100
RECONNECT_MAX_MS = 5_000
HEARTBEAT_MS = 5_000
HEARTBEAT_TIMEOUT_MS = 15_000


def quiet_socket(context: Context, kind: int) -> zmq.Socket[bytes]:
    """Make a socket that gives up nothing by itself, and waits for nothing when it is closed."""
    socket = context.socket(kind)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.RCVHWM, REPLAY_HWM if kind == zmq.DEALER else RECEIVE_HWM),
        (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
        (zmq.RECONNECT_IVL, RECONNECT_MS),
        (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
        (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
        (zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS),
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, 30),
        (zmq.TCP_KEEPALIVE_INTVL, 10),
        (zmq.TCP_KEEPALIVE_CNT, 3),
        (zmq.IPV6, 1),
    ):
        socket.setsockopt(option, value)
    return socket


class ZmqReader:
    """Owns a socket, and the loop's watch on it.

    Attributes:
        socket: To be connected by the owner; after anything is sent on it the reader wakes by itself.
    """

    def __init__(self, socket: zmq.Socket[bytes], wake: Callable[[], None]) -> None:
        """Watch ``socket`` from the running loop; ``wake`` is called when there may be something to read."""
        self.socket = socket
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._is_closed = False
        self._loop.add_reader(self._fd, wake)
        # What happens between here and the first wait would not be told.
        self._loop.call_soon(wake)

    def receive(self) -> list[bytes] | None:
        """Read one message, all of its frames; ``None`` if there is none, and then the descriptor tells of the next."""
        if self._is_closed:
            return None
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket and end the watch; what is not sent yet gets ``linger_ms``. May be called again."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._fd)
            self.socket.close(linger_ms)


class ConnectionMonitor:
    """Tells when a socket reached its peer, and when it lost it. Owns the monitoring, not the socket."""

    def __init__(self, socket: zmq.Socket[bytes], wake: Callable[[], None]) -> None:
        """Watch the connections of ``socket``; to be made before it connects."""
        self._watched = socket
        pair = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._reader = ZmqReader(pair, wake)

    def events(self) -> list[bool]:
        """Give what has happened since the last call: true for a connection made, false for one lost."""
        found = []
        while (frames := self._reader.receive()) is not None:
            event = parse_monitor_message(frames)["event"]
            found.append(event == zmq.EVENT_HANDSHAKE_SUCCEEDED)
        return found

    def close(self) -> None:
        """End the monitoring, before the socket is closed. May be called again."""
        if not self._watched.closed:
            self._watched.disable_monitor()
        self._reader.close()

"""Which CURVE keys may connect: answers the questions that the ZMQ library asks of every new connection. Shell."""

from collections.abc import Callable, Collection
from typing import Final

import zmq
from zmq.utils import z85

from kv_events.zmq_reader import Context, ZmqReader

_ADDRESS: Final = "inproc://zeromq.zap.01"
_VERSION: Final = b"1.0"


class KeyGuard:
    """Lets the owners of known keys connect to the sockets of one context. To be made before they listen.

    Args:
        context: Of the sockets.
        allowed: Public keys in Z85.
        on_denied: Called for each connection that was refused.
    """

    def __init__(self, context: Context, allowed: Collection[bytes], on_denied: Callable[[], None]) -> None:
        self._allowed = frozenset(allowed)
        self._on_denied = on_denied
        socket = context.socket(zmq.REP)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(_ADDRESS)
        self._socket = socket
        self._reader = ZmqReader(socket, self._answer)

    def _answer(self) -> None:
        while (frames := self._reader.receive()) is not None:
            # Version, request, domain, address, identity, mechanism, credentials.
            if len(frames) != 7 or frames[0] != _VERSION:
                request, is_allowed = (frames[1] if len(frames) > 1 else b""), False
            else:
                request, is_allowed = frames[1], frames[5] == b"CURVE" and z85.encode(frames[6]) in self._allowed
            status, text = (b"200", b"OK") if is_allowed else (b"400", b"this key is not among the authorized ones")
            if not is_allowed:
                self._on_denied()
            self._socket.send_multipart([_VERSION, request, status, text, b"", b""])

    def close(self) -> None:
        """Answer no more. May be called again."""
        self._reader.close()

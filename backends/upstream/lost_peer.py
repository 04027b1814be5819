"""Settings of sockets by which a peer is noticed that is gone without a word: its machine, or the network between."""

import socket
from collections.abc import Iterable
from typing import Final

# A peer that is silent for this long is asked whether it is there, by its kernel, at this interval, so often.
IDLE_S: Final = 15
INTERVAL_S: Final = 5
PROBES: Final = 3
# Of data that nobody acknowledges. A worker that leaves the rest of a request unread for as long is lost, too.
UNACKNOWLEDGED_S: Final = 30


def _options(*names_and_values: tuple[int, str, int]) -> tuple[tuple[int, int, int], ...]:
    """Those that this system knows."""
    return tuple(
        (level, getattr(socket, name), value) for level, name, value in names_and_values if hasattr(socket, name)
    )


# Of connections to clients, who may read as slowly as they like: they only have to be there.
TO_CLIENTS: Final = _options(
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", IDLE_S),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", INTERVAL_S),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", PROBES),
)
TO_WORKERS: Final = TO_CLIENTS + _options((socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", UNACKNOWLEDGED_S * 1000))


def set_options(sock: socket.socket, options: Iterable[tuple[int, int, int]]) -> None:
    """Set them on a TCP socket; a socket of another family stays as it is."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        for option in options:
            sock.setsockopt(*option)

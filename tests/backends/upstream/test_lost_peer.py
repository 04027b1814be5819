"""Peers that are gone without a word: the kernel is asked to notice, on both sides; upstream in ``test_conformance``.

That it does, after thirty seconds of a network taken away, takes a network of one's own; what is tested is that the
sockets have been told.
"""

import socket

from backends.upstream.lost_peer import IDLE_S, INTERVAL_S, PROBES, TO_CLIENTS, UNACKNOWLEDGED_S, set_options
from gateway.server import bind

ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES),
]


def is_told(sock: socket.socket) -> bool:
    """Whether the kernel asks whether the peer is there."""
    return all(sock.getsockopt(level, name) == value for level, name, value in ALIVE)


def test_a_lost_peer_is_noticed_in_half_a_minute() -> None:
    assert IDLE_S + INTERVAL_S * PROBES == UNACKNOWLEDGED_S == 30


def test_a_clients_connection_is_told_by_the_listener() -> None:
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert is_told(accepted)
            # A client may read as slowly as it likes.
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0


def test_other_sockets_stay_as_they_are() -> None:
    first, second = socket.socketpair()
    with first, second:
        set_options(first, TO_CLIENTS)
        assert first.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0

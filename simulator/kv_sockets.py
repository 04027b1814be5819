"""The sockets of the ranks' publishers: one a rank, at ports in a row."""

from __future__ import annotations

import zmq

from simulator.options import parse_endpoint

Context = zmq.Context[zmq.Socket[bytes]]
Sockets = list[zmq.Socket[bytes]]

# How often a run of free ports is looked for when the system may choose.
_PORT_ATTEMPTS = 50


def bind_run(context: Context, kind: int, endpoint: str, ranks: range, hwm: int, sockets: Sockets) -> str:
    """Bind one socket for each rank, at the endpoint's port plus the rank; returns the endpoint of rank 0.

    Port 0 lets the system choose.

    Raises:
        OSError: Not possible.
    """
    host, port = parse_endpoint(endpoint)
    for attempt in range(1, _PORT_ATTEMPTS + 1):
        base = port
        try:
            for rank in ranks:
                socket = context.socket(kind)
                sockets.append(socket)
                socket.set_hwm(hwm)
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.IPV6, ":" in host)
                socket.bind(f"tcp://{host}:{base + rank if base else '*'}")
                if not base:
                    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
                    base = int(bound.rpartition(":")[2]) - rank
        except zmq.ZMQError as exc:
            for socket in sockets:
                socket.close(linger=0)
            sockets.clear()
            # Only a run that the system began may be tried elsewhere: its neighbours can be taken.
            if port or base == 0 or attempt == _PORT_ATTEMPTS:
                raise OSError(exc.errno, exc.strerror) from exc
            continue
        return f"tcp://{host}:{base}"
    raise AssertionError("every attempt ends in a return or a raise")

"""haproxy as the measure: one thread, the same engines, nothing that the gateway could not do as well."""

import re
from collections.abc import Sequence


def config_text(listen_port: int, engine_ports: Sequence[int], *, is_for_streams: bool) -> str:
    """The configuration file.

    Args:
        listen_port: Port on 127.0.0.1 that it listens on.
        engine_ports: Ports of the engines.
        is_for_streams: Forward every piece at once. Without it the beginnings of streams are held back, and several
            events cost as much as one; with it a large body costs 1.4 times as much, so that it is off for bodies.
    """
    servers = "\n".join(f"    server engine{index} 127.0.0.1:{port}" for index, port in enumerate(engine_ports))
    return f"""global
    nbthread 1
    maxconn 4096

defaults
    mode http
    no log
    option http-keep-alive
    no option http-buffer-request
    {"option" if is_for_streams else "no option"} http-no-delay
    http-reuse always
    timeout connect 5s
    timeout client 120s
    timeout server 120s

frontend clients
    bind 127.0.0.1:{listen_port}
    default_backend engines

backend engines
    balance leastconn
{servers}
"""


def version_of(text: str) -> str:
    """The version number in what ``haproxy -v`` prints, ``unknown`` if there is none."""
    found = re.search(r"version (\d[\w.]*)", text)
    return found[1] if found else "unknown"

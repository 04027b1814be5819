"""Short messages between engines: one JSON object a line, over TCP.

Non-blocking sockets with the loop's readers and writers instead of transports: an engine opens and
closes its port inside a restart, which must not wait, and no task is needed for a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
from collections.abc import Callable, Mapping
from typing import Any

import orjson

_LONGEST_LINE_BYTES = 1 << 20
_LOCAL_NAMES = ("localhost", "")

Message = Mapping[str, Any]


def _ignore(*_: Any) -> None:
    """Stand in for a callback that nobody has set."""


def _no_answer(_: bytes) -> bytes:
    """Stand in for the one that answers HTTP."""
    return b""


class Link:
    """One connection to another engine, owned by whoever dialled or accepted it.

    ``on_message`` gets every object. Whoever speaks HTTP instead gets what ``on_http`` returns for the request
    line, and the connection ends.
    ``on_closed`` is called once when the other side is gone or was never there, not after ``close``.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, home: set[Link] | None = None) -> None:
        self.on_message: Callable[[Message], None] = _ignore
        self.on_http: Callable[[bytes], bytes] = _no_answer
        self.on_closed: Callable[[], None] = _ignore
        self.is_connected = False
        self._loop = loop
        self._home = home
        self._sock: socket.socket | None = None
        self._is_over = False
        self._http_line = b""
        self._received = bytearray()
        self._unsent = bytearray()

    @classmethod
    def dial(cls, loop: asyncio.AbstractEventLoop, host: str, port: int) -> Link:
        """Connect to ``host``; what is sent before that succeeds goes out then."""
        link = cls(loop)
        address = "127.0.0.1" if host in _LOCAL_NAMES else host
        try:
            version = ipaddress.ip_address(address).version
        except ValueError:
            found = loop.run_in_executor(None, _resolve, address, port)
            found.add_done_callback(link._resolved)
        else:
            link._connect(socket.AF_INET6 if version == 6 else socket.AF_INET, (address, port))
        return link

    def send(self, message: Message) -> None:
        """Send one object."""
        self._unsent += orjson.dumps(message) + b"\n"
        if self.is_connected:
            self._flush()

    def close(self) -> None:
        """End the connection; nothing is called any more. May be called twice."""
        if self._is_over:
            return
        self._is_over = True
        # They know the request that owns the link: no cycle is left for the collector.
        self.on_message, self.on_http, self.on_closed = _ignore, _no_answer, _ignore
        if self._home is not None:
            self._home.discard(self)
        sock, self._sock = self._sock, None
        if sock is not None:
            self._loop.remove_reader(sock)
            self._loop.remove_writer(sock)
            sock.close()

    def adopt(self, sock: socket.socket) -> None:
        """Take over a connected socket."""
        self._sock = sock
        self.is_connected = True
        self._loop.add_reader(sock, self._readable)
        if self._unsent:
            self._flush()

    def _resolved(self, found: asyncio.Future[tuple[socket.AddressFamily, Any] | None]) -> None:
        if self._is_over or found.cancelled():
            return
        address = found.result()
        if address is None:
            self._lost()
        else:
            self._connect(*address)

    def _connect(self, family: socket.AddressFamily, address: Any) -> None:
        sock = self._sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            code = sock.connect_ex(address)
        except (OSError, OverflowError):  # no port number
            code = errno.EINVAL
        if code in (0, errno.EINPROGRESS):
            self._loop.add_writer(sock, self._connected)
        else:
            self._loop.call_soon(self._lost)

    def _connected(self) -> None:
        sock = self._sock
        assert sock is not None
        self._loop.remove_writer(sock)
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._lost()
        else:
            self.adopt(sock)

    def _flush(self) -> None:
        sock = self._sock
        if sock is None:
            return
        try:
            sent = sock.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._loop.call_soon(self._lost)
            return
        del self._unsent[:sent]
        if self._unsent:
            self._loop.add_writer(sock, self._flush)
        else:
            self._loop.remove_writer(sock)

    def _readable(self) -> None:
        assert self._sock is not None
        try:
            data = self._sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        while not self._is_over:
            line, found, rest = self._received.partition(b"\n")
            if not found:
                break
            self._received = rest
            self._take(bytes(line))
        if not data or len(self._received) > _LONGEST_LINE_BYTES:
            self._lost()

    def _take(self, line: bytes) -> None:
        if self._http_line:
            if not line.strip():
                self._unsent += self.on_http(self._http_line)
                self._flush()
                self._lost()
            return
        if line.startswith((b"GET ", b"POST ", b"PUT ")):
            self._http_line = line
            return
        try:
            message = orjson.loads(line)
        except orjson.JSONDecodeError:
            message = None
        if isinstance(message, dict):
            self.on_message(message)
        else:
            self._lost()

    def _lost(self) -> None:
        if not self._is_over:
            on_closed = self.on_closed
            self.close()
            on_closed()


class Listener:
    """A port for other engines; it owns the links that it has accepted.

    Raises:
        OSError: The address cannot be bound.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.on_link: Callable[[Link], None] = _ignore
        self._loop = loop
        self._sock = socket.create_server((host, port), family=family, backlog=2048)
        self._sock.setblocking(False)
        self._links: set[Link] = set()
        self.port: int = self._sock.getsockname()[1]
        loop.add_reader(self._sock, self._accept)

    def close(self) -> None:
        """Refuse new connections and end the accepted ones. May be called twice."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()
        for link in list(self._links):
            link.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # gone before it was accepted
            sock, _ = self._sock.accept()
            sock.setblocking(False)
            link = Link(self._loop, self._links)
            self._links.add(link)
            link.adopt(sock)
            self.on_link(link)


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any] | None:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return None
    return family, address

"""HTTP/1.1 client for the data plane: a pool of connections, last used first reused.

A request costs this client tens of microseconds where general clients take milliseconds; ``docs/performance.md``
has the figures. What it leaves out: proxies, redirects, HTTP/2, decompression.
"""

import asyncio
import ssl

from backends.errors import ConnectFailed, ConnectTimeout, RequestUnsendable
from backends.tasks import OwnedTasks
from backends.upstream.base import Origin, UpstreamRequest
from backends.upstream.h1_call import H1Call
from backends.upstream.h1_connection import H1Connection
from backends.upstream.h1_request import request_head

# Engines close idle connections after 5 s; leaving earlier avoids most of the races with that.
IDLE_LIMIT_S = 3.0


class H1Client:
    """Connections to all workers: last used, first reused, none older than ``idle_limit_s`` of idleness.

    Args:
        connect_timeout_s: Limit of one connection attempt, name resolution and TLS included.
        idle_limit_s: Idle connections are closed after this time.
        tls: Context for ``https`` origins; ``None`` makes a default one when first needed.
        resends_stale: A call whose pooled connection ended before any byte of an answer is sent again, once; else it
            fails with ``ConnectionDropped.was_reused``.
    """

    def __init__(
        self,
        *,
        connect_timeout_s: float = 5.0,
        idle_limit_s: float = IDLE_LIMIT_S,
        tls: ssl.SSLContext | None = None,
        resends_stale: bool = True,
    ) -> None:
        self._resends_stale = resends_stale
        self.loop = asyncio.get_running_loop()
        self._connect_timeout_s = connect_timeout_s
        self._idle_limit_s = idle_limit_s
        self._tls = tls
        self._idle: dict[Origin, list[H1Connection]] = {}
        self._open: set[H1Connection] = set()
        self._tasks = OwnedTasks("connect")
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def active_connections(self) -> int:
        """Connections that carry a call now, connecting ones included."""
        return len(self._open) - self.idle_connections + len(self._tasks)

    @property
    def connecting(self) -> int:
        """Connection attempts under way."""
        return len(self._tasks)

    @property
    def idle_connections(self) -> int:
        """Connections kept for reuse."""
        return sum(map(len, self._idle.values()))

    def send(self, origin: Origin, request: UpstreamRequest) -> H1Call:
        """Start ``request`` on an idle connection, or on a new one; see ``UpstreamClient.send``."""
        try:
            wire_head = request_head(origin, request)
        except RequestUnsendable as exc:
            call = H1Call(self.loop, origin, request, b"", self._replace_stale)
            call.fail(exc)
            return call
        call = H1Call(self.loop, origin, request, wire_head, self._replace_stale)
        idle = self._idle.get(origin)
        oldest = self.loop.time() - self._idle_limit_s
        while idle:
            connection = idle.pop()
            if connection.is_usable() and connection.idle_since > oldest:
                call.attach(connection)
                return call
            connection.abandon()
        self.connect_and_send(call)
        return call

    def _replace_stale(self, call: H1Call) -> bool:
        """A pooled connection ended under ``call``: what else is idle there is as old. Send it anew, if we are to."""
        for connection in self._idle.pop(call.origin, []):
            connection.abandon()
        if self._resends_stale:
            self.connect_and_send(call)
        return self._resends_stale

    def connect_and_send(self, call: H1Call) -> None:
        """Connect in an owned task and write ``call``'s request; used for new and for replaced connections."""
        if self._is_closed:
            call.fail(ConnectFailed("this client is closed"))
            return
        task = self._tasks.spawn(self._connect(call), call.origin.authority)
        call.set_connecting(task)

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled():  # by the call itself, which has its error then, or because this client closes
                call.fail(ConnectFailed("this client is closed"))

        task.add_done_callback(ended)

    async def _connect(self, call: H1Call) -> None:
        origin = call.origin
        connection = H1Connection(self, origin)
        is_kept = False
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self.loop.create_connection(
                    lambda: connection,
                    origin.host,
                    origin.port,
                    ssl=self._tls_context() if origin.scheme == "https" else None,
                )
        except TimeoutError:
            call.fail(ConnectTimeout(f"no connection to {origin.authority} within {self._connect_timeout_s} s"))
        except (OSError, ValueError) as exc:  # names that cannot be names are ValueErrors
            call.fail(ConnectFailed(f"cannot connect to {origin.authority}: {exc}"))
        else:
            is_kept = True
            if call.is_closed:
                self.release(origin, connection)
            else:
                call.attach(connection)
        finally:
            if not is_kept:
                self.connection_closed(connection)  # uvloop may close the socket without telling the protocol
                connection.abandon()

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    def connection_opened(self, connection: H1Connection) -> None:
        """Count a connection (called by the connection itself)."""
        self._open.add(connection)

    def connection_closed(self, connection: H1Connection) -> None:
        """Forget a connection wherever it is kept (called by the connection itself)."""
        self._open.discard(connection)
        idle = self._idle.get(connection.origin)
        if idle and connection in idle:
            idle.remove(connection)

    def release(self, origin: Origin, connection: H1Connection) -> None:
        """Keep a clean connection for reuse and see to it that it does not stay for ever."""
        if self._is_closed:
            connection.abandon()
            return
        connection.idle_since = self.loop.time()
        self._idle.setdefault(origin, []).append(connection)
        if self._sweeper is None:
            self._sweeper = self.loop.call_later(self._idle_limit_s, self._sweep)

    def _sweep(self) -> None:
        self._sweeper = None
        oldest = self.loop.time() - self._idle_limit_s
        for origin, idle in list(self._idle.items()):
            stale = [connection for connection in idle if connection.idle_since <= oldest]
            self._idle[origin] = [connection for connection in idle if connection.idle_since > oldest]
            for connection in stale:
                connection.abandon()
            if not self._idle[origin]:
                del self._idle[origin]
        if self._idle:
            self._sweeper = self.loop.call_later(self._idle_limit_s, self._sweep)

    async def aclose(self) -> None:
        """Close every connection; calls still running end with an error."""
        self._is_closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._tasks.aclose()
        self._idle.clear()
        for connection in list(self._open):
            connection.shut_down()

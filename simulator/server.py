"""The simulated engine as one object: sockets, routes, faults, log.

In a test::

    engine = SimulatedEngine(EngineOptions(inter_token_ms=1))
    await engine.start()
    try:
        engine.add_fault(at="headers", do="reset")
        ...
        await engine.wait_for(lambda e: e.running == 1)
    finally:
        await engine.stop()
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from simulator.api import EngineApi, FatalRequest
from simulator.control import handle_control
from simulator.core import Core
from simulator.exchange import Exchange, Request
from simulator.faulting import GARBAGE, FaultRunner
from simulator.faults import FaultTable, parse_fault
from simulator.http_server import Connection
from simulator.log import DisconnectEntry, EngineLog, RequestEntry
from simulator.options import EngineOptions
from simulator.roles import AnyPublisher, make_publisher, make_sglang, make_vllm, open_peer_port
from simulator.sglang.follower import FollowerApi
from simulator.sglang.routes import SGLangApi
from simulator.vllm.routes import VllmApi

_T = TypeVar("_T")


class WaitTimeout(Exception):
    """What was waited for did not happen in time."""


class SimulatedEngine:
    """One engine on one port; lives on the loop that calls ``start``."""

    def __init__(self, options: EngineOptions | None = None) -> None:
        self.options = options or EngineOptions()
        self.keep_alive_s = self.options.keep_alive_s
        self.log = EngineLog(self.options.log_limit, self.log_changed)
        self.is_dead = False
        self._faults = FaultTable()
        self._connections: set[Connection] = set()
        self._connections_made = 0
        self._waiters: list[tuple[Callable[[SimulatedEngine], Any], asyncio.Future[Any]]] = []
        self._server: asyncio.Server | None = None
        self._publisher: AnyPublisher | None = None
        self._loop: asyncio.AbstractEventLoop
        self._core: Core
        self._runner: FaultRunner
        self._api: EngineApi

    # -- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Boot and listen.

        Raises:
            OSError: The address cannot be bound.
        """
        self._loop = asyncio.get_running_loop()
        self._server = await self._loop.create_server(
            self._make_connection, self.options.host, self.options.port, backlog=2048
        )
        # Nothing has been accepted before this coroutine gives up control.
        self.options = replace(self.options, port=self._server.sockets[0].getsockname()[1])
        try:
            self._boot()
        except OSError:
            self._server.close()
            self._server = None
            raise

    async def stop(self) -> None:
        """Close everything; open exchanges end with their connections. May be called twice."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        self._halt()
        for connection in list(self._connections):
            connection.cut(reset=True)
        for _, future in self._waiters:
            future.cancel()
        self._waiters.clear()
        await server.wait_closed()
        # The transports report their end in the next turns of the loop.
        for _ in range(100):
            if not self._connections:
                break
            await asyncio.sleep(0)

    def restart(self, *, spare: Exchange | None = None) -> None:
        """Come back as a new process: empty cache, new identity, every request and connection lost.

        Args:
            spare: An exchange that survives, for the route that asks for the restart.
        """
        self._halt()
        for connection in list(self._connections):
            exchange = connection.exchange
            if exchange is None or exchange is not spare:
                if exchange is not None:
                    exchange.cut("restart", reset=True)
                else:
                    connection.cut(reset=True)
        self.is_dead = False
        self._boot()
        self.log.changed()

    def die(self) -> None:
        """Die as the real engine does; nothing is answered any more until a restart.

        With SGLang connections end without a byte. vLLM's server outlives its engine for a moment:
        streams end with an error event, unary calls with 500, and its health is 503.
        """
        grace_s = self._api.begin_death()
        if self._publisher is not None:
            self._publisher.close()
        if grace_s:
            self._core.timers.after(grace_s, self._exit)
            self.log.changed()
        else:
            self._exit()

    def _exit(self) -> None:
        self.is_dead = True
        self._halt()
        for connection in list(self._connections):
            if connection.exchange is not None:
                connection.exchange.cut("died", reset=False)
            else:
                connection.cut(reset=False)
        self.log.changed()

    def reset(self) -> None:
        """Forget faults, log and, unless something runs, cached blocks; a dead engine comes back to life."""
        self._faults.clear()
        self.log.clear()
        if self._publisher is not None:
            self._publisher.reset()
        if self.is_dead:
            self.is_dead = False
            self._boot()
        elif not self._core.is_busy:
            self._core.clear_caches()

    def _halt(self) -> None:
        self._core.stop()
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def _boot(self) -> None:
        listener = open_peer_port(self.options, self._loop)
        if listener is not None:
            # A restart finds the same ports again.
            self.options = replace(self.options, bootstrap_port=listener.port)
        if self.options.kv_events is not None:
            try:
                self._publisher = make_publisher(self.options, self._loop, self._faults, self.log, self.restart)
            except OSError:
                if listener is not None:
                    listener.close()
                raise
            self.options = self._publisher.options
        parts = (self.options, self._loop, self.log, self._publisher, self._faults, listener)
        if self.options.engine == "vllm":
            core = make_vllm(*parts, die=self.die)
            self._core = core
            self._runner = FaultRunner(self._faults, core.timers, self.restart)
            self._api = VllmApi(core, self._runner)
        else:
            self._core = make_sglang(*parts)
            self._runner = FaultRunner(self._faults, self._core.timers, self.restart)
            leads = self.options.node_rank == 0
            self._api = SGLangApi(self._core, self._runner) if leads else FollowerApi(self._core)
        if self._publisher is not None:
            self._publisher.announce_start()

    # -- what tests look at ----------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Base URL, without a slash at the end."""
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        return f"http://{host}:{self.port}"

    @property
    def port(self) -> int:
        """Port that is listened on."""
        return self.options.port

    @property
    def boot_id(self) -> int:
        """The ``random_seed`` of this boot."""
        return self._core.boot_id

    @property
    def core(self) -> Core:
        """The engine of this boot."""
        return self._core

    @property
    def running(self) -> int:
        """Sequences being computed."""
        return self._core.running

    @property
    def waiting(self) -> int:
        """Sequences in the queues."""
        return self._core.waiting

    @property
    def held(self) -> int:
        """Sequences registered but not dispatched (paused engine)."""
        return self._core.held

    @property
    def pinned_blocks(self) -> int:
        """Blocks of ended requests that a vLLM prefill engine keeps for decode."""
        return self._core.pinned_blocks

    @property
    def live_rooms(self) -> list[Any]:
        """Rooms, or vLLM's fetches, that are in use."""
        return [room.get("room", room.get("request_id")) for room in self.transfers["rooms"]]

    @property
    def transfers(self) -> dict[str, Any]:
        """What ``GET /_transfers`` shows: rooms, fetches and pinned blocks."""
        handoff = self._core.handoff
        if handoff is None:
            return {"role": self.options.role, "rooms": [], "pinned": [], "pinned_blocks": 0}
        return handoff.describe()

    @property
    def open_connections(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    @property
    def open_exchanges(self) -> int:
        """Requests that have not been answered completely."""
        return sum(c.exchange is not None and not c.exchange.is_over for c in self._connections)

    @property
    def fault_list(self) -> list[dict[str, Any]]:
        """Faults still to come."""
        return self._faults.describe()

    def add_fault(self, fault: Mapping[str, Any] | None = None, /, **fields: Any) -> None:
        """Script a fault, with the fields of ``POST /_fault``.

        Raises:
            FaultError: It means nothing.
        """
        self._faults.add(parse_fault({**(fault or {}), **fields} if isinstance(fault, Mapping | None) else fault))

    def freeze(self) -> None:
        """Let simulated time stand still: nothing is generated, everything else works.

        May be called inside a predicate of ``wait_for``, to stop exactly where it becomes true.
        """
        self._core.freeze()

    def thaw(self) -> None:
        """Let simulated time go on."""
        self._core.thaw()

    async def wait_for(self, predicate: Callable[[SimulatedEngine], _T], timeout_s: float = 5.0) -> _T:
        """Wait until ``predicate`` of this engine is true, and return its value.

        It is looked at again after every change of the log and of the counts.

        Raises:
            WaitTimeout: It was never true within ``timeout_s``.
        """
        value = predicate(self)
        if value:
            return value
        future: asyncio.Future[_T] = self._loop.create_future()
        self._waiters.append((predicate, future))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as exc:
            raise WaitTimeout(f"not within {timeout_s} s") from exc
        finally:
            self._waiters = [waiter for waiter in self._waiters if waiter[1] is not future]

    # -- what connections call -------------------------------------------------------------------

    def log_changed(self) -> None:
        """Look at the waiters again."""
        for predicate, future in self._waiters:
            if future.done():
                continue
            try:
                value = predicate(self)
            except Exception as exc:  # noqa: BLE001 - the waiter gets it, the engine must not
                future.set_exception(exc)
                continue
            if value:
                future.set_result(value)

    def accepted(self, connection: Connection) -> bool:
        """Register a connection and apply the faults of its start."""
        self._connections.add(connection)
        fault = self._faults.take("connect")
        if fault is None:
            return True
        if fault.kind == "delay":
            self._core.timers.after(fault.number / 1000, connection.unmute)
        elif fault.kind == "garbage":
            connection.send_and_close(GARBAGE)
        elif fault.kind == "restart":
            self.restart()
        elif fault.kind != "hang":
            connection.cut(reset=fault.kind == "reset")
        return False

    def gone(self, connection: Connection) -> None:
        """Forget a connection."""
        self._connections.discard(connection)
        self.log.changed()

    def note(self, request: Request, connection: Connection) -> RequestEntry:
        """Log a request; those of the control routes are not kept."""
        body = request.body
        entry = RequestEntry(
            number=0,
            connection=connection.number,
            method=request.method,
            path=request.path,
            query=request.query,
            headers=[(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers],
            body_length=len(body),
            received_s=time.monotonic(),
        )
        if len(body) <= self.options.log_body_bytes:
            entry.body = body
        else:
            entry.body_digest = entry.digest_of(body)
        if not request.path.startswith("/_"):
            entry.number = self.log.next_number()
            self.log.add_request(entry)
        return entry

    def note_disconnect(self, exchange: Exchange) -> None:
        """Log a client that left early."""
        entry = exchange.entry
        self.log.add_disconnect(
            DisconnectEntry(
                time.monotonic(), entry.connection, entry.number, entry.path, tuple(entry.rids), entry.stream
            )
        )

    def handle(self, exchange: Exchange) -> None:
        """Answer a request, unless a fault or death comes first."""
        path = exchange.request.path
        if path.startswith("/_"):
            handle_control(self, exchange)
            return
        if self.is_dead:
            exchange.cut("died", reset=True)
            return
        self._api.prepare(exchange)
        if not self._faults:
            self._serve(exchange)
            return
        facts = self._api.facts(exchange)
        if self._faults.expects(facts):
            exchange.facts = facts
        if path in self._api.abort_paths:
            self._runner.at_head(
                "abort", exchange, facts, lambda: self._serve(exchange), lambda: exchange.respond(200, b"", None)
            )
            return
        self._runner.at_head("headers", exchange, facts, lambda: self._serve(exchange))

    def _serve(self, exchange: Exchange) -> None:
        try:
            self._api.handle(exchange)
        except FatalRequest:
            self.die()

    def _make_connection(self) -> Connection:
        self._connections_made += 1
        return Connection(self, self._loop, self._connections_made)

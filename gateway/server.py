"""The process around a gateway: socket, uvicorn, signals, and the drain before the end."""

import asyncio
import gc
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn
import uvloop

from backends.upstream.lost_peer import TO_CLIENTS, set_options
from gateway.access_log import AccessLog
from gateway.app import Gateway
from gateway.logs import configure_logging
from gateway.protocol import ConnectionProtocol
from gateway.settings import Settings, SettingsError, describe, describe_changed
from gateway.start_checks import check_files, doubtful, why_not_listening

logger = logging.getLogger("forebay")

BACKLOG = 2048
# Longer than any usual client's own limit, so that it is the client who closes an idle connection.
KEEP_ALIVE_S = 75
# New objects, less freed ones, between two collections.
GC_THRESHOLD = 10_000
# What connections get to flush after the drain.
CLOSE_GRACE_S = 2


class GatewayServer(uvicorn.Server):
    """uvicorn's server with a drain in front of its shutdown: the port stays open, so that probes see "draining"."""

    def __init__(self, gateway: Gateway, on_started: Callable[[], None] = lambda: None) -> None:
        config = uvicorn.Config(
            gateway.asgi,
            http=ConnectionProtocol,
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_GRACE_S,
            backlog=BACKLOG,
            proxy_headers=False,
            ssl_certfile=gateway.settings.tls_cert_file,
            ssl_keyfile=gateway.settings.tls_key_file,
            ssl_version=ssl.PROTOCOL_TLS_SERVER,
        )
        super().__init__(config)
        self._gateway = gateway
        self._loop = asyncio.get_running_loop()
        self._signals = 0
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take requests, and say so (uvicorn hook)."""
        await super().startup(sockets)
        if not self.should_exit:
            self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: drain and exit; second: exit now (signal handler)."""
        del sig, frame
        self._signals += 1
        if self._signals > 1:
            self.force_exit = True
            self.should_exit = True
        self._loop.call_soon_threadsafe(self._gateway.begin_drain)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until told to stop; SIGHUP reads the configuration's workers again (uvicorn hook)."""
        if hasattr(signal, "SIGHUP"):
            self._loop.add_signal_handler(signal.SIGHUP, self._gateway.reload)
        try:
            await super().serve(sockets)
        finally:
            if hasattr(signal, "SIGHUP"):
                self._loop.remove_signal_handler(signal.SIGHUP)

    async def on_tick(self, counter: int) -> bool:
        """Leave the main loop when the drain is over (uvicorn hook)."""
        if self._gateway.drained.is_set():
            self.should_exit = True
        return await super().on_tick(counter)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket's address taken, not yet listening.

    Raises:
        OSError: The name is unknown, or the address is taken or not ours.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        set_options(sock, TO_CLIENTS)  # those that it accepts have them from it
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def base_url(sock: socket.socket, *, is_tls: bool = False) -> str:
    """The URL of a bound socket."""
    host, port = sock.getsockname()[:2]
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def run_async(settings: Settings, *, on_started: Callable[[str], None] | None = None) -> int:
    """Serve until a signal or a fatal fault.

    Args:
        settings: The effective settings.
        on_started: Called with the base URL once requests are taken.

    Returns:
        The process's exit code: 0 after a signal, 1 when it could not listen or go on, 2 when an option is wrong.
    """
    configure_logging(settings.log_format, settings.log_level)
    try:
        check_files(settings)
    except SettingsError as exc:
        return _fail(str(exc), 2)
    try:
        sock = bind(settings.host, settings.port)
    except OSError as exc:
        return _fail(why_not_listening(settings.host, settings.port, exc), 1)
    with sock:
        access_log = AccessLog(log_format=settings.log_format)
        try:
            gateway = Gateway(settings, access_log)
        except SettingsError as exc:
            await access_log.close()
            return _fail(str(exc), 2)
        logger.info("settings: %s", describe_changed(settings))
        logger.debug("all settings: %s", describe(settings))
        for text in doubtful(settings.workers):
            logger.warning("%s", text)
        url = base_url(sock, is_tls=settings.tls_cert_file is not None)

        def started() -> None:
            logger.info("listening on %s", url)
            if on_started is not None:
                on_started(url)

        await GatewayServer(gateway, started).serve(sockets=[sock])
    if gateway.failed is not None:
        return _fail(f"stopped because {gateway.failed!r} failed, see the log", 1)
    return 0


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"forebay: {message}\n")
    return code


def _settle_memory(url: str) -> None:
    """Take what start-up made out of the garbage collector's sight; it lives as long as the process.

    What a request makes is freed with its last reference. With hundreds of requests in flight the default of 700 new
    objects is passed all the time, and each collection looks through everything that is alive to find next to nothing.
    """
    del url
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 10, 10)


def run(settings: Settings) -> int:
    """Serve in this process until a signal; see ``run_async``."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run_async(settings, on_started=_settle_memory))

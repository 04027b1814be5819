"""What the relay tells about itself over HTTP: ``/health``, ``/ready``, ``/metrics``. Shell."""

import contextlib
import json
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import uvicorn

from relay.errors import RelayEnded

Message = MutableMapping[str, Any]
# Path to status, content type and body.
Pages = Callable[[str], tuple[int, str, bytes] | None]

JSON = "application/json"
METRICS = "text/plain; version=0.0.4; charset=utf-8"


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals end the relay, and the relay ends this.
        yield


class HealthServer:
    """Answers with what ``pages`` gives, from ``bind`` to ``stop``."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._socket: socket.socket | None = None
        self._server: _Server | None = None

    def bind(self, host: str, port: int) -> int:
        """Take the port, and return it; 0 lets the system choose.

        Raises:
            RelayEnded: It cannot be had.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family)
        except OSError as exc:
            raise RelayEnded(f"--health-port: cannot listen on {host}:{port}: {exc.strerror or exc}") from exc
        return int(self._socket.getsockname()[1])

    async def run(self) -> None:
        """Serve until ``stop``."""
        assert self._socket is not None
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        await self._server.serve(sockets=[self._socket])

    def stop(self) -> None:
        """End ``run`` soon, or release the port if it never ran."""
        if self._server is not None:
            self._server.should_exit = True
        elif self._socket is not None:
            self._socket.close()

    async def _answer(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        page = self._pages(scope["path"])
        if page is None:
            page = 404, JSON, b'{"error": "not found; there are /health, /ready and /metrics"}'
        elif scope["method"] not in ("GET", "HEAD"):
            page = 405, JSON, b'{"error": "GET it"}'
        status, kind, body = page
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


def json_page(status: int, **fields: object) -> tuple[int, str, bytes]:
    """Make a page of JSON."""
    return status, JSON, json.dumps(fields).encode()

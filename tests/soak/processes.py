"""The gateway and the engines of a soak as processes of their own, ended by their pids."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import free_port
from tests.fakes.running import PATIENCE_S, TIME_SCALE
from tests.fakes.wire import Wire, call, request_bytes
from tests.soak.bodies import EMBEDDER, MODEL
from tests.soak.plan import MAX_BODY_BYTES

START_S = 3 * PATIENCE_S
CONTROL_S = 2.0 * TIME_SCALE
# Answers above the second one are refused, those between the two are sent on while they are read.
MAX_RESPONSE_BYTES = 3_000_000

ENGINES: dict[str, tuple[str, ...]] = {
    "sglang": ("--model", MODEL, "--dp-size", "2"),
    "sglang-incremental": ("--model", MODEL, "--incremental-streaming-output"),
    "vllm": ("--model", MODEL, "--engine", "vllm"),
    "vllm-2": ("--model", MODEL, "--engine", "vllm"),
    "embedder": ("--model", EMBEDDER, "--is-embedding"),
    "embedder-vllm": ("--model", EMBEDDER, "--is-embedding", "--engine", "vllm"),
}
FEWER_ENGINES = ("sglang", "sglang-incremental", "vllm", "embedder")


class Child:
    """A process whose output goes to files.

    Args:
        name: Name of its files.
        arguments: Arguments of the ``forebay`` command.
        directory: Where the files are.
    """

    def __init__(self, name: str, arguments: Sequence[str], directory: Path) -> None:
        self.name = name
        self.stdout = directory / f"{name}.out"
        self.stderr = directory / f"{name}.err"
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Id of the process."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """It was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it; what it prints is added to its files."""
        # Warnings about connections and coroutines that nobody closed or awaited are shown, and looked for later.
        command = [sys.executable, "-W", "always::ResourceWarning", "-m", "gateway", *self._arguments]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("FOREBAY_")}
        with self.stdout.open("ab") as out, self.stderr.open("ab") as err:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=inherited, start_new_session=True
            )

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def ended(self) -> int:
        """Wait for its end; its exit code."""
        assert self._process is not None
        async with asyncio.timeout(START_S):
            while self._process.poll() is None:  # noqa: ASYNC110 -- another process
                await asyncio.sleep(0.02)
        return self._process.returncode


class Engine(Child):
    """A simulated engine that can be killed and comes back at the same port."""

    def __init__(self, name: str, seed: int, directory: Path) -> None:
        self.port = free_port()
        options = ("--inter-token-ms", "2", "--health-min-s", "0", "--keep-alive-s", "2", "--seed", str(seed))
        arguments = ("simulate", "--port", str(self.port), "--log-limit", "10", *options, *ENGINES[name])
        super().__init__(name, arguments, directory)

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    async def serve(self) -> None:
        """Start it, and again if its port was taken meanwhile, until it listens."""
        async with asyncio.timeout(START_S):
            while not self._is_listening():
                if not self.is_running:
                    self.start()
                await asyncio.sleep(0.05)

    def _is_listening(self) -> bool:
        with socket.socket() as probe:
            return self.is_running and probe.connect_ex(("127.0.0.1", self.port)) == 0

    async def control(self, path: str, body: Any = None) -> bool:
        """Ask a control route; whether it has answered, which one that is killed or hangs does not."""
        with contextlib.suppress(OSError, EOFError, TimeoutError, ValueError, IndexError):
            async with asyncio.timeout(CONTROL_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                with contextlib.closing(writer):
                    wire = Wire(reader, writer)
                    await wire.send(request_bytes(path, body or {}))
                    return (await wire.answer()).status == 200
        return False


class Gateway(Child):
    """The gateway in front of engines."""

    def __init__(self, engines: Sequence[Engine], directory: Path) -> None:
        options = {
            "--port": "0",
            "--log-format": "json",
            "--max-body-bytes": str(MAX_BODY_BYTES),
            "--max-response-bytes": str(MAX_RESPONSE_BYTES),
            "--health-interval-s": "0.25",
            "--health-timeout-s": "1",
            "--identify-backoff-max-s": "0.5",
            "--breaker-open-s": "0.25",
        }
        arguments = [word for pair in options.items() for word in pair]
        workers = [word for engine in engines for word in ("--worker", engine.url)]
        super().__init__("gateway", ["serve", *arguments, *workers], directory)
        self.address = ("", 0)
        self._workers = len(engines)

    async def ready(self) -> None:
        """Wait until it listens and every worker is ready."""
        async with asyncio.timeout(START_S):
            while not (found := re.search(r"listening on http://([\d.]+):(\d+)", self.stderr.read_text())):
                assert self.is_running, self.stderr.read_text()
                await asyncio.sleep(0.05)
            self.address = found[1], int(found[2])
            while sum(member["is_ready"] for member in (await self.get("/workers"))["workers"]) < self._workers:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def get(self, path: str) -> Any:
        """JSON of one of its own routes."""
        return (await call(self.address, path, method="GET")).json()

    async def text(self, path: str) -> str:
        """Text of one of its own routes."""
        return (await call(self.address, path, method="GET")).body.decode()

    def sockets(self) -> int:
        """Sockets that it holds open."""
        count = 0
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed since
                count += os.readlink(entry).startswith("socket:")
        return count

    def files(self) -> int:
        """Open file descriptors of any kind."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

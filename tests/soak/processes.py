"""The gateway and the engines of a soak as processes of their own, ended by their pids."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.processes import free_port
from tests.fakes.running import PATIENCE_S, TIME_SCALE
from tests.fakes.wire import Answer, Wire, call, request_bytes
from tests.soak.bodies import EMBEDDER, MODEL, VLLM_MODEL
from tests.soak.pair_bodies import SHORT_PROMPT_TOKENS
from tests.soak.plan import MAX_BODY_BYTES

START_S = 6 * PATIENCE_S
# glibc keeps what large blocks have left in its heap, once it has seen some freed: up to 20 MiB that come and go. With
# fixed thresholds these are given back at once, so that what is resident is what is held.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
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

# Options of a gateway in front of pairs.
PAIR_OPTIONS = {
    "--short-prompt-tokens": str(SHORT_PROMPT_TOKENS),
    "--prefill-header-timeout-s": str(4.0 * TIME_SCALE),
    "--prefill-hold-timeout-s": str(4.0 * TIME_SCALE),
    "--handoff-drain-timeout-s": str(2.0 * TIME_SCALE),
    # A control route may still wait for a worker that was killed, and is given the whole of it.
    "--drain-timeout-s": str(10.0 * TIME_SCALE),
    "--handoff-max-age-s": str(3.0 * TIME_SCALE),
}
# How long prefill keeps what nobody fetches, and how long one half of a pair waits for the other.
LEASE_S = 4.0 * TIME_SCALE
_PAIR_TIMES = {"--transfer-lease-s": LEASE_S, "--transfer-timeout-s": 3.0 * TIME_SCALE, "--lost-prefill-s": 0.3}
_PAIR_LOG = "30000"


def _half(role: str, *options: str) -> tuple[str, ...]:
    times = [word for name, value in _PAIR_TIMES.items() for word in (name, str(value))]
    return ("--role", role, *times, "--log-limit", _PAIR_LOG, "--log-body-bytes", "0", *options)


_SGLANG_PAIR = ("--model", MODEL)
# In their development mode they can be paused.
_VLLM_PAIR = ("--model", VLLM_MODEL, "--engine", "vllm", "--dev-mode")
HALVES: dict[str, tuple[str, ...]] = {
    # It serves what pairs cannot, and is the measure of their answers.
    "alone": _SGLANG_PAIR,
    "prefill": _half("prefill", *_SGLANG_PAIR, "--dp-size", "2"),
    "prefill-2": _half("prefill", *_SGLANG_PAIR),
    "decode": _half("decode", *_SGLANG_PAIR),
    "decode-2": _half("decode", *_SGLANG_PAIR, "--dp-size", "2"),
    "vllm-prefill": _half("prefill", *_VLLM_PAIR),
    "vllm-prefill-2": _half("prefill", *_VLLM_PAIR),
    "vllm-decode": _half("decode", *_VLLM_PAIR),
    "vllm-decode-2": _half("decode", *_VLLM_PAIR),
}
FEWER_HALVES = ("alone", "prefill", "decode", "decode-2", "vllm-prefill", "vllm-prefill-2", "vllm-decode")
_OPTIONS = {**ENGINES, **HALVES}


# A number that is not zero: decode's own blocks are as few as a fraction of them, so those are no sign.
_BUSY = re.compile(
    r"(sglang:num_running_reqs|sglang:num_queue_reqs|vllm:num_requests_(running|waiting))\{.* (?!0(\.0)?$)"
)


def _role(name: str) -> str:
    options = _OPTIONS[name]
    return options[options.index("--role") + 1] if "--role" in options else "regular"


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
        """Start it; what it prints is added to its files.

        In this session: Linux gives each session the same share of the cores (``sched_autogroup``), so the clients, one
        process among all those of their session, would stand still for seconds.
        """
        # Warnings about connections and coroutines that nobody closed or awaited are shown, and looked for later.
        command = [sys.executable, "-W", "always::ResourceWarning", "-m", "gateway", *self._arguments]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("FOREBAY_")}
        inherited |= _ALLOCATOR
        with self.stdout.open("ab") as out, self.stderr.open("ab") as err:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=inherited, process_group=0
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
    """A simulated engine that can be killed and comes back at the same port.

    Attributes:
        port: Where it listens.
        model: What it serves.
        role: ``regular``, or its half of a pair.
        logs: What its processes have told of themselves, see ``keep_log``; parsed, it would slow the clients down.
    """

    def __init__(self, name: str, seed: int, directory: Path) -> None:
        self.port = free_port()
        self.model = MODEL if VLLM_MODEL not in _OPTIONS[name] else VLLM_MODEL
        self.role = _role(name)
        self.logs: list[bytes] = []
        own = ("--bootstrap-port", str(free_port())) if self.role == "prefill" else ()
        options = ("--inter-token-ms", "2", "--health-min-s", "0", "--keep-alive-s", "2", "--seed", str(seed))
        arguments = ("simulate", "--port", str(self.port), "--log-limit", "10", *options, *_OPTIONS[name], *own)
        super().__init__(name, arguments, directory)

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def worker_id(self) -> str:
        """Its id at the gateway."""
        return self.url.removeprefix("http://")

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
        return await self._asked(path, body or {}) is not None

    async def _asked(self, path: str, body: Any = None, *, method: str = "POST") -> Answer | None:
        with contextlib.suppress(OSError, EOFError, TimeoutError, ValueError, IndexError):
            async with asyncio.timeout(CONTROL_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                with contextlib.closing(writer):
                    wire = Wire(reader, writer)
                    await wire.send(request_bytes(path, body, method=method))
                    answer = await wire.answer()
                    return answer if answer.status == 200 and answer.is_whole else None
        return None

    async def keep_log(self) -> None:
        """Add what it has seen to ``logs``, unless it serves alone or does not answer."""
        if self.role != "regular" and self.is_running and (answer := await self._asked("/_log", method="GET")):
            self.logs.append(answer.body)

    async def left_over(self) -> dict[str, Any]:
        """What it still has of requests, empty if nothing."""
        found: dict[str, Any] = {}
        for path in ("/metrics", "/_transfers"):
            answer = await self._asked(path, method="GET")
            if answer is None:
                found[path] = "no answer"
            elif path == "/metrics":
                found |= {line: True for line in answer.body.decode().splitlines() if _BUSY.match(line)}
            else:
                found |= {name: value for name, value in answer.json().items() if value and name != "role"}
        return found


class Gateway(Child):
    """The gateway in front of engines; ``more`` are options beside the usual ones."""

    def __init__(
        self, engines: Sequence[Engine], directory: Path, more: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        options = {
            **more,
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
        workers = [word for engine in engines for word in ("--worker", f"{engine.url},role={engine.role}")]
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
        return (await call(self.address, path, method="GET", patience_s=START_S)).json()

    async def text(self, path: str) -> str:
        """Text of one of its own routes."""
        return (await call(self.address, path, method="GET", patience_s=START_S)).body.decode()

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

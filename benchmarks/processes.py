"""Processes of a benchmark: started, watched, pinned, and ended by their pids, whatever happens."""

import contextlib
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from benchmarks import procfs

_STOP_TIMEOUT_S: Final = 5.0
_START_TIMEOUT_S: Final = 30.0
_LAST_LINES: Final = 2


class BenchmarkFailed(Exception):
    """A measurement could not be made, or an answer was wrong."""


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Let SIGINT and SIGTERM wait until the block is over, so that no process is begun and then not known of.

    Blocking them instead would be inherited by what is started.

    Raises:
        KeyboardInterrupt: At the end, if one of them came.
    """
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


class Children:
    """Processes that live until the ``with`` block ends.

    Args:
        temp: Directory for what they print.
    """

    def __init__(self, temp: Path) -> None:
        self.temp = temp
        self._running: list[tuple[str, subprocess.Popen[bytes], Path]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_all()

    def start(self, name: str, command: Sequence[str], core: int, *, is_piped: bool = False) -> subprocess.Popen[bytes]:
        """Start a process and pin it to ``core`` where that is possible.

        Args:
            name: Name in messages.
            command: Program and arguments.
            core: Core to run on.
            is_piped: Its stdout is a pipe to us; otherwise it is thrown away.
        """
        errors = self.temp / f"{name}.{len(self._running)}.log"
        # SIGINT goes to the whole foreground group; in a session of its own a child ends when we say so.
        with interrupts_deferred(), errors.open("wb") as sink:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if is_piped else subprocess.DEVNULL,
                stderr=sink,
                start_new_session=True,
            )
            self._running.append((name, process, errors))
        procfs.pin(process.pid, core)
        return process

    def check(self) -> None:
        """Raise if a process has ended.

        Raises:
            BenchmarkFailed: It has; with the end of what it printed.
        """
        for name, process, errors in self._running:
            if process.poll() is not None:
                tail = errors.read_text("utf-8", "replace").strip().splitlines()[-_LAST_LINES:]
                raise BenchmarkFailed(f"{name} ended with {process.returncode}: {' | '.join(tail)}")

    def stop(self, process: subprocess.Popen[bytes]) -> None:
        """End one process and forget it."""
        with interrupts_deferred():
            self._running = [entry for entry in self._running if entry[1] is not process]
            _end(process)

    def stop_all(self) -> None:
        """End what still runs, the last first."""
        with interrupts_deferred():
            while self._running:
                _end(self._running.pop()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


class Lines:
    """Lines from a process's stdout, each with a limit on the wait.

    Args:
        process: With a pipe as its stdout.
        check: Called now and then while waiting; raises if something has died.
    """

    def __init__(self, process: subprocess.Popen[bytes], check: Callable[[], None]) -> None:
        assert process.stdout is not None
        self._fd = process.stdout.fileno()
        self._check = check
        self._held = b""

    def next(self, timeout_s: float) -> str:
        """The next line.

        Raises:
            BenchmarkFailed: None came in time, or a process ended.
        """
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._held:
            ready, _, _ = select.select([self._fd], [], [], 0.2)
            if ready:
                data = os.read(self._fd, 65536)
                if not data:
                    time.sleep(0.1)  # let the process be reaped, so that the check says why
                    self._check()
                    raise BenchmarkFailed("the load generator closed its output")
                self._held += data
                continue
            self._check()
            if time.monotonic() > deadline:
                raise BenchmarkFailed(f"the load did not end within {timeout_s:g} s: answers are missing")
        line, _, self._held = self._held.partition(b"\n")
        return line.decode("utf-8", "replace")

    def next_starting(self, word: str, timeout_s: float) -> list[str]:
        """The words of the next line that starts with ``word``; ``wrong`` lines raise, others are skipped.

        Raises:
            BenchmarkFailed: As ``next``, or the load generator has seen a wrong answer.
        """
        while True:
            words = self.next(timeout_s).split(" ")
            if words[0] == word:
                return words
            if words[0] == "wrong":
                raise BenchmarkFailed("wrong answer: " + " ".join(words[1:]))


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def call(port: int, method: str, path: str, body: object = None, timeout_s: float = 10.0) -> tuple[int, bytes]:
    """One request with a JSON body; status and body of the answer.

    Raises:
        OSError: Nobody answers.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        payload = None if body is None else json.dumps(body).encode()
        connection.request(method, path, payload, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except http.client.HTTPException as exc:
        raise OSError(f"no valid answer: {exc!r}") from exc
    finally:
        connection.close()


def wait_until(is_ready: Callable[[], bool], check: Callable[[], None], what: str) -> None:
    """Wait until ``is_ready``; refused connections count as not yet.

    Raises:
        BenchmarkFailed: It was never ready, or a process ended.
    """
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        check()
        with contextlib.suppress(OSError):
            if is_ready():
                return
        if time.monotonic() > deadline:
            raise BenchmarkFailed(f"{what} is not ready after {_START_TIMEOUT_S:g} s")
        time.sleep(0.05)


def forebay_command() -> list[str]:
    """How the gateway's own command is started: by this interpreter, so that versions cannot differ."""
    return [sys.executable, "-m", "gateway"]

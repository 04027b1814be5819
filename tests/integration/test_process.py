"""The gateway as a process: SIGHUP, SIGTERM while it starts, proxies of the environment, and wrong TLS options."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.cli import main
from tests.fakes.running import PATIENCE_S, running_gateway
from tests.fakes.wire import call, request_bytes, wire
from tests.integration.test_dynamic_workers import ENDLESS, UNARY, id_of, simulated

START_S = 3 * PATIENCE_S
TLS = Path(__file__).parents[1] / "data" / "tls"


class Process:
    """A gateway in a process of its own, and what it logs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.lines: list[str] = []
        self.address = ("", 0)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    async def line(self, pattern: str) -> re.Match[str]:
        """Wait for a log line."""
        assert self._process.stderr is not None
        async with asyncio.timeout(START_S):
            while True:
                raw = (await self._process.stderr.readline()).decode()
                assert raw, f"it ended without {pattern!r}: {self.lines}"
                self.lines.append(raw)
                if found := re.search(pattern, raw):
                    return found

    async def listening(self) -> None:
        """Wait until it takes requests."""
        found = await self.line(r"listening on https?://([\d.]+):(\d+)")
        self.address = found[1], int(found[2])

    async def workers(self) -> dict[str, str]:
        """States of its workers by id."""
        listed = (await call(self.address, "/workers", method="GET")).json()["workers"]
        return {entry["id"]: entry["state"] for entry in listed}

    async def has(self, expected: dict[str, str]) -> None:
        """Wait for states of workers."""
        async with asyncio.timeout(START_S):
            while await self.workers() != expected:  # noqa: ASYNC110 -- another process
                await asyncio.sleep(0.02)

    async def exit_code(self) -> int:
        """Wait for its end."""
        async with asyncio.timeout(PATIENCE_S):
            _, rest = await self._process.communicate()
            self.lines += rest.decode().splitlines()
        assert self._process.returncode is not None
        return self._process.returncode


@asynccontextmanager
async def process(*options: str) -> AsyncIterator[Process]:
    """Run ``forebay serve`` for the length of the block."""
    command = [sys.executable, "-m", "gateway", "serve", "--port", "0", *options]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("FOREBAY_")}
    child = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env=inherited)
    try:
        yield Process(child)
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


def write(path: Path, *urls: str) -> Path:
    """A configuration file with these workers."""
    path.write_text("[server]\ndrain_timeout_s = 20\nhealth_interval_s = 0.1\n")
    path.write_text(path.read_text() + "".join(f'[[workers]]\nurl = "{url}"\n' for url in urls))
    return path


async def test_sighup_reads_the_workers_of_the_file_again(tmp_path: Path) -> None:
    async with simulated(inter_token_ms=5) as one, simulated() as two, simulated() as three:
        path = write(tmp_path / "forebay.toml", one.url)
        async with process("--config", str(path)) as served:
            await served.listening()
            await served.has({id_of(one): "ready"})
            # One more comes at run time: it is not the file's.
            await call(served.address, f"/add_worker?url={three.url}")
            await served.has({id_of(one): "ready", id_of(three): "ready"})
            async with wire(served.address) as connection:
                body = {**ENDLESS, "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
                pinned = {"X-Forebay-Worker": id_of(one)}
                await connection.send(request_bytes("/generate", body, headers=pinned))
                head = await connection.head()
                write(path, two.url)
                served.send(signal.SIGHUP)
                await served.has({id_of(one): "draining", id_of(two): "ready", id_of(three): "ready"})
                events = (await connection.body(*head)).events()
                assert (len(events) > 100, events[-1]) == (True, b"[DONE]")
            after = {id_of(two): "ready", id_of(three): "ready"}
            await served.has(after)
            # What cannot be read changes nothing.
            for broken in ("[[workers]]\nurl = 'nowhere'\n", "[[workers", "[server]\nnonsense = 1\n"):
                path.write_text(broken)
                served.send(signal.SIGHUP)
                await served.line("was not read again")
                assert await served.workers() == after
            assert (await call(served.address, "/generate", UNARY)).status == 200
            served.send(signal.SIGTERM)
            assert await served.exit_code() == 0


async def test_sighup_leaves_the_workers_of_the_command_line_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with simulated() as one, simulated() as two:
        path = write(tmp_path / "forebay.toml", two.url)
        async with running_gateway(one.url, config=path) as gateway:
            gateway.gateway.reload()
            assert "are not read: others were given" in caplog.text
            assert [member.worker.url for member in gateway.gateway.services.fleet] == [one.url]


async def test_sighup_without_a_file_is_harmless(caplog: pytest.LogCaptureFixture) -> None:
    async with running_gateway() as gateway:
        gateway.gateway.reload()
        assert "nothing to read again" in caplog.text


@pytest.mark.parametrize("client", ["httptools", "httpx"])
async def test_field_case_98_proxies_of_the_environment_are_not_used(
    monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with simulated() as engine, running_gateway(engine.url, upstream_client=client) as gateway:
        assert (await call(gateway.address, "/generate", UNARY)).status == 200


async def test_field_case_128_sigterm_while_it_starts_ends_it_in_order() -> None:
    async with process("--worker", "http://127.0.0.1:9") as served:
        await served.line("settings")
        served.send(signal.SIGTERM)
        assert await served.exit_code() == 0
        assert "Traceback" not in "".join(served.lines)


def test_field_case_128_sigterm_before_there_is_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_settings(argv: object) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("gateway.cli.load_settings", load_settings)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["serve"]) == 0
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        pytest.param(["--tls-key-file", str(TLS / "localhost.key")], "--tls-cert-file", id="a key alone"),
        pytest.param(["--tls-cert-file", str(TLS / "localhost.crt")], "localhost.crt", id="a certificate alone"),
        pytest.param(
            ["--tls-cert-file", "/nonexistent.crt", "--tls-key-file", str(TLS / "localhost.key")],
            "/nonexistent.crt", id="no such file",
        ),
        pytest.param(
            ["--tls-cert-file", str(TLS / "localhost.key"), "--tls-key-file", str(TLS / "localhost.crt")],
            "PEM certificate", id="the wrong way round",
        ),
    ],
)  # fmt: skip
def test_wrong_tls_options_are_one_clear_line(
    options: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gateway.server.configure_logging", lambda *args: None)
    assert main(["serve", "--port", "0", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("forebay: ")
    assert says in line

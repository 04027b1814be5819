"""The demo: what it starts, what it prints, and that every way out stops all of it with the right exit code."""

import asyncio
import os
import shlex
import signal
import socket
import sys
import types
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

import httpx
import pytest

from gateway.settings import Settings, SettingsError

Serve = Callable[[Settings, Callable[[str], None]], Awaitable[int]]


class Demo(Protocol):
    """The demo with a gateway of the test's own in place of the real one."""

    def __call__(self, serve: Serve, *argv: str) -> int: ...


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Demo]:
    def run(serve: Serve, *argv: str) -> int:
        async def run_async(settings: Settings, *, on_started: Callable[[str], None]) -> int:
            return await serve(settings, on_started)

        server = types.ModuleType("gateway.server")
        vars(server).update(run_async=run_async)
        monkeypatch.setitem(sys.modules, "gateway.server", server)
        monkeypatch.delitem(sys.modules, "gateway.demo", raising=False)
        from gateway.demo import run as run_demo

        return run_demo(argv or ["--port", "0"])

    before = signal.getsignal(signal.SIGTERM)
    yield run
    assert signal.getsignal(signal.SIGTERM) is before
    sys.modules.pop("gateway.demo", None)


def is_listening(url: str) -> bool:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, int(port))) == 0


def test_two_engines_answer_while_the_gateway_runs_and_are_gone_after(
    demo: Demo, capsys: pytest.CaptureFixture[str]
) -> None:
    urls: list[str] = []

    async def serve(settings: Settings, on_started: Callable[[str], None]) -> int:
        async with httpx.AsyncClient(trust_env=False) as client:
            for spec in settings.workers:
                urls.append(spec.url)
                assert (await client.get(f"{spec.url}/health")).status_code == 200
        on_started("http://127.0.0.1:4321")
        return 0

    assert demo(serve) == 0
    assert len(set(urls)) == 2
    assert not any(map(is_listening, urls))
    assert "http://127.0.0.1:4321" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_stop_all(demo: Demo, number: signal.Signals) -> None:
    urls: list[str] = []

    async def serve(settings: Settings, on_started: Callable[[str], None]) -> int:
        urls.extend(spec.url for spec in settings.workers)
        os.kill(os.getpid(), number)
        await asyncio.Event().wait()
        raise AssertionError

    assert demo(serve) == 0
    assert len(urls) == 2
    assert not any(map(is_listening, urls))


def test_a_taken_port_is_named(demo: Demo, capsys: pytest.CaptureFixture[str]) -> None:
    async def serve(settings: Settings, on_started: Callable[[str], None]) -> int:
        raise AssertionError

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert demo(serve, "--port", str(port)) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_a_gateway_that_cannot_start_is_no_traceback(demo: Demo, capsys: pytest.CaptureFixture[str]) -> None:
    async def serve(settings: Settings, on_started: Callable[[str], None]) -> int:
        raise OSError(98, "taken after all")

    assert demo(serve) == 1
    assert "taken after all" in capsys.readouterr().err


def test_a_port_out_of_range(demo: Demo) -> None:
    async def serve(settings: Settings, on_started: Callable[[str], None]) -> int:
        raise AssertionError

    with pytest.raises(SettingsError, match="65536 is out of range"):
        demo(serve, "--port", "65536")


def test_the_three_lines_are_commands(demo: Demo, capsys: pytest.CaptureFixture[str]) -> None:
    async def serve(settings: Settings, on_started: Callable[[str], None]) -> int:
        on_started("http://127.0.0.1:1")
        return 0

    assert demo(serve) == 0
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines() if line.startswith("  curl")]
    assert len(commands) == 3
    for command in commands:
        assert httpx.Response(200, text=command[-1]).json()

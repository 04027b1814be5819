"""``forebay relay`` as a process of its own: exit codes, last words, signals, and its status pages."""

import asyncio
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.conftest import TIME_SCALE
from tests.fakes.running import until
from tests.relay.fakes import fake_server
from tests.relay.nodes import info, source

# A process takes seconds to start where others are at work too.
LIFE_S = 60.0 * TIME_SCALE
START = "import sys; from gateway.cli import main; sys.exit(main(sys.argv[1:]))"
# The resolver knows numbers, and hangs for every name.
START_WITHOUT_RESOLVER = f"""
import ipaddress, socket, time
def look_up(host, *arguments, real=socket.getaddrinfo, **keywords):
    try:
        ipaddress.ip_address(host.decode() if isinstance(host, bytes) else host)
    except ValueError:
        time.sleep(60)
    return real(host, *arguments, **keywords)
socket.getaddrinfo = look_up
{START}
"""


@asynccontextmanager
async def process(arguments: Sequence[str], start: str = START) -> AsyncIterator[asyncio.subprocess.Process]:
    """A relay in a process of its own, which is gone at the end."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", start, "relay", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        # Reads what is left, and so lets the pipes end.
        await child.communicate()


async def run(*arguments: str, start: str = START) -> tuple[int | None, str, str]:
    """Run it to its end: exit code, stdout, stderr."""
    async with process(arguments, start) as child, asyncio.timeout(LIFE_S):
        out, err = await child.communicate()
        return child.returncode, out.decode(), err.decode()


async def line_with(stream: asyncio.StreamReader | None, pattern: str) -> str:
    """Read up to the line that matches, and give its first group."""
    assert stream is not None
    async with asyncio.timeout(LIFE_S):
        while line := (await stream.readline()).decode():
            if found := re.search(pattern, line):
                return found[1]
    raise AssertionError(f"no line with {pattern}")


async def test_a1_8_bad_arguments_are_2_and_nobody_is_asked() -> None:
    async with fake_server() as server:
        code, out, err = await run("--engine", server.url, "--gateway", server.url, "--startup-deadline-s", "x")
    assert (code, out) == (2, "")
    assert err.startswith("forebay: --startup-deadline-s: 'x' is out of range")
    assert not server.asked


async def test_a_key_pair_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "pair"
    code, out, _ = await run("--keygen", str(path))
    assert code == 0
    assert f"public-key = {out.strip()}\n" in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    code, _, err = await run("--keygen", str(path))
    assert code == 2
    assert err.startswith("forebay: --keygen: ")


async def test_what_cannot_go_on_is_1_with_the_reason_on_the_last_line() -> None:
    async with fake_server() as server:
        server.pages["GET /server_info"] = 200, info(kv_event_sources=None)
        code, _, err = await run("--engine", server.url, "--gateway", server.url)
    assert code == 1
    assert err.splitlines()[-1].startswith("forebay: kv_event_sources is null")


async def test_a_status_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = await run("--engine", "http://h:1", "--gateway", "http://h:2", "--health-port", str(port))
    assert code == 1
    assert "--health-port" in err.splitlines()[-1]


async def test_the_status_pages() -> None:
    async with fake_server() as server:
        server.pages["GET /server_info"] = 200, info(node_rank=0, kv_event_sources=[source(0)])
        arguments = ["--engine", server.url, "--gateway", server.url, "--health-port", "0"]
        async with process(arguments) as child:
            url = await line_with(child.stderr, r"status at (http://\S+)/ready")
            await line_with(child.stderr, r"relays ranks (0) of ")
            async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
                health = await client.get("/health")
                ready = await client.get("/ready")
                metrics = await client.get("/metrics")
                assert (await client.get("/other")).status_code == 404
                assert (await client.post("/ready")).status_code == 405
                assert (await client.head("/health")).content == b""
            assert (health.status_code, health.json()) == (200, {"state": "ok", "phase": "relay"})
            assert ready.status_code == 503
            assert ready.json()["reason"] == "not connected to the publisher of rank 0"
            assert "forebay_relay_ready 0.0" in metrics.text
            assert f'forebay_relay_gateway_acknowledged{{gateway="{server.url}"}} 0.0' in metrics.text
            child.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(child.wait(), LIFE_S) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("address", ["leader.example:5000", "10.0.0.1:5000"], ids=["group", "gateway"])
async def test_a1_7_a_signal_ends_it_while_every_look_up_hangs(number: signal.Signals, address: str) -> None:
    async with fake_server() as server:
        server.pages["GET /server_info"] = 200, info(dist_init_addr=address)
        arguments = ["--engine", server.url, "--gateway", "http://gateway.example:1"]
        async with process(arguments, START_WITHOUT_RESOLVER) as child:
            await until(lambda: server.asked["GET /server_info"] > 0, "the engine is asked", LIFE_S)
            await line_with(child.stderr, r"not ready: phase (group|leader)")
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            child.send_signal(number)
            assert await asyncio.wait_for(child.wait(), LIFE_S) == 0
            assert loop.time() - began_s < 5.0 * TIME_SCALE

"""TLS on both sides, and IPv6 on both sides."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.fakes.running import PATIENCE_S, running_gateway, until
from tests.fakes.script_engine import ScriptEngine, echo, script_engine
from tests.integration.test_dynamic_workers import UNARY, only

TLS = Path(__file__).parents[1] / "data" / "tls"
CERT, KEY = TLS / "localhost.crt", TLS / "localhost.key"


def has_ipv6() -> bool:
    """Whether ``::1`` can be bound here."""
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="there is no ::1 here")


@asynccontextmanager
async def engine_at(host: str, url: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[ScriptEngine]:
    """An engine that listens elsewhere than usual; ``url`` is completed with its port."""
    engine = ScriptEngine(echo)
    server = await asyncio.start_server(engine.serve, host, 0, limit=1 << 20, ssl=tls)
    engine.server = server
    engine.url = f"{url}:{server.sockets[0].getsockname()[1]}"
    try:
        yield engine
        await until(lambda: not engine.writers, "connections to the engine closed")
    finally:
        server.close()
        await server.wait_closed()


@pytest.fixture
async def secure() -> AsyncIterator[ScriptEngine]:
    """An engine behind https."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERT, KEY)
    async with engine_at("127.0.0.1", "https://localhost", context) as engine:
        yield engine


# Towards workers.


async def test_a_worker_whose_certificate_nobody_signed_is_refused_and_says_so(secure: ScriptEngine) -> None:
    async with running_gateway(secure.url, wait_ready=0) as gateway:
        await until(lambda: "certificate" in only(gateway).detail, "the reason told")
        entry = (await gateway.client.get("/workers")).json()["workers"][0]
        assert (entry["is_ready"], entry["id"].startswith("https:localhost:")) == (False, True)
        assert "CERTIFICATE_VERIFY_FAILED" in entry["detail"]
        assert (await gateway.client.post("/generate", json=UNARY)).status_code == 503
        assert not secure.requests


@pytest.mark.parametrize("client", ["httptools", "httpx"])
@pytest.mark.parametrize("is_added", [False, True])
async def test_authorities_of_the_environment_are_trusted(
    secure: ScriptEngine, monkeypatch: pytest.MonkeyPatch, client: str, is_added: bool
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(CERT))
    workers = [] if is_added else [secure.url]
    async with running_gateway(*workers, upstream_client=client) as gateway:
        if is_added:
            await gateway.client.post("/add_worker", params={"url": secure.url})
            await gateway.ready(1)
        answer = await gateway.client.post("/generate", json=UNARY)
        assert (answer.status_code, answer.json()["echo"]["text"]) == (200, "hi")


async def test_a_name_that_the_certificate_does_not_hold_is_refused(
    secure: ScriptEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(CERT))
    async with running_gateway(secure.url.replace("localhost", "127.0.0.1"), wait_ready=0) as gateway:
        await until(lambda: "CERTIFICATE_VERIFY_FAILED" in only(gateway).detail, "the reason told")


# Towards clients.


async def test_the_listener_speaks_tls() -> None:
    trusting = ssl.create_default_context(cafile=str(CERT))
    async with (
        script_engine() as engine,
        running_gateway(engine.url, host="localhost", tls_cert_file=CERT, tls_key_file=KEY) as gateway,
    ):
        assert gateway.url.startswith("https://")
        port = gateway.url.rpartition(":")[2]
        url = f"https://localhost:{port}"
        async with httpx.AsyncClient(base_url=url, verify=trusting, trust_env=False, timeout=PATIENCE_S) as client:
            for _ in range(3):
                assert (await client.post("/generate", json=UNARY)).status_code == 200
            assert (await client.get("/ready")).status_code == 200
        # Who does not speak it gets nothing, and disturbs nobody.
        async with httpx.AsyncClient(base_url=f"http://localhost:{port}", trust_env=False) as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get("/health")
        assert (await gateway.client.get("/health")).status_code == 200


async def test_clients_that_leave_are_noticed_under_tls() -> None:
    async with (
        script_engine() as engine,
        running_gateway(engine.url, tls_cert_file=CERT, tls_key_file=KEY, abort_delay_s=0) as gateway,
    ):
        arrived, left = asyncio.Event(), asyncio.Event()

        async def silent(request: object, reply: object) -> None:
            arrived.set()
            await reply.gone()  # type: ignore[attr-defined]
            left.set()

        engine.script = silent
        untrusting = ssl.create_default_context()
        untrusting.check_hostname, untrusting.verify_mode = False, ssl.CERT_NONE
        port = int(gateway.url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=untrusting)
        body = b'{"text":"a","stream":true}'
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        async with asyncio.timeout(PATIENCE_S):
            await arrived.wait()
            writer.close()
            await left.wait()
        assert (await gateway.record()).outcome == "client_closed"


# IPv6.


@needs_ipv6
async def test_workers_and_listener_on_ipv6() -> None:
    async with engine_at("::1", "http://[::1]") as engine, running_gateway(engine.url, host="::1") as gateway:
        assert gateway.url.startswith("http://[::1]:")
        answer = await gateway.client.post("/generate", json=UNARY)
        worker = f"ipv6:--1:{engine.url.rpartition(':')[2]}"
        assert (answer.status_code, answer.headers["x-forebay-worker"]) == (200, worker)
        # The loopback network of IPv6 may administer too.
        assert (await gateway.client.get(f"/workers/{worker}")).json()["url"] == engine.url
        assert (await gateway.client.delete(f"/workers/{worker}")).status_code == 202
        await until(lambda: not len(gateway.gateway.services.fleet), "the worker removed")

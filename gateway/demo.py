"""``forebay demo``: two simulated engines and the gateway in one process, to try things out."""

import asyncio
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Final

from backends.worker_spec import WorkerSpec
from gateway.options import LineParser
from gateway.server import run_async
from gateway.settings import Settings, SettingsError
from simulator.options import EngineOptions
from simulator.server import SimulatedEngine

MODEL: Final = "demo"
# Slow enough to watch tokens arrive.
_INTER_TOKEN_MS: Final = 20.0
_STOP_TIMEOUT_S: Final = 5.0
_JSON: Final = "-H 'content-type: application/json'"


def run(argv: Sequence[str]) -> int:
    """Run the demo until Ctrl-C or SIGTERM.

    Returns:
        0 when it was stopped, 1 when it could not start.

    Raises:
        SettingsError: An option is wrong.
    """
    parser = LineParser(
        prog="forebay demo",
        description="Run the gateway on two simulated engines, to try it out; every number and text is made up.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for any (default: %(default)s)")
    arguments = parser.read(argv)
    host, port = str(arguments.host), int(arguments.port)
    if not 0 <= port <= 65535:
        raise SettingsError(f"--port: {port} is out of range; ports are 0 to 65535")
    problem = _why_not_free(host, port)
    if problem is not None:
        sys.stderr.write(f"forebay: cannot listen on {host}:{port}: {problem}; try --port 0 for a free port\n")
        return 1
    # Before the gateway has its handlers and after it has given them up, SIGTERM acts as Ctrl-C. A shell's background
    # jobs begin with Ctrl-C ignored, and so would both be here.
    before_int = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    engines: list[SimulatedEngine] = []
    try:
        with asyncio.Runner() as runner:
            try:
                return runner.run(_serve(engines, host, port))
            except KeyboardInterrupt:
                return 0
            except OSError as exc:
                sys.stderr.write(f"forebay: cannot start: {exc}\n")
                return 1
            finally:
                # Its own run: the interrupt has cancelled the first one, clean-up included.
                runner.run(_stop(engines))
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, before_int)


_ANY_PORT = "tcp://127.0.0.1:0"


async def _serve(engines: list[SimulatedEngine], host: str, port: int) -> int:
    for _ in range(2):
        engine = SimulatedEngine(
            EngineOptions(model=MODEL, inter_token_ms=_INTER_TOKEN_MS, kv_events=_ANY_PORT, replay=_ANY_PORT)
        )
        await engine.start()
        engines.append(engine)
    workers = tuple(WorkerSpec(engine.url) for engine in engines)
    settings = Settings(host=host, port=port, workers=workers, log_level="warning")
    return await run_async(settings, on_started=_welcome)


async def _stop(engines: list[SimulatedEngine]) -> None:
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            for engine in engines:
                await engine.stop()
    except TimeoutError:
        sys.stderr.write(f"forebay: the engines did not stop within {_STOP_TIMEOUT_S:g} s\n")


def _welcome(base_url: str) -> None:
    sys.stdout.write(welcome_text(base_url))
    sys.stdout.flush()


def welcome_text(base_url: str) -> str:
    """Return what the demo prints once the gateway answers at ``base_url``."""
    token_ids = '{"input_ids": [11, 12, 13, 14], "sampling_params": {"max_new_tokens": 16}}'
    text = '{"text": "The water rises", "sampling_params": {"max_new_tokens": 64}, "stream": true}'
    chat = (
        f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "Hello"}}], '
        '"max_tokens": 64, "stream": true}'
    )
    return (
        f"\nForebay is at {base_url} with two simulated engines. Try:\n\n"
        f"  curl {base_url}/generate {_JSON} -d '{token_ids}'\n\n"
        f"  curl -N {base_url}/generate {_JSON} -d '{text}'\n\n"
        f"  curl -N {base_url}/v1/chat/completions {_JSON} -d '{chat}'\n\n"
        "Workers: forebay workers --url " + base_url + "\nCtrl-C stops everything.\n\n"
    )


def _why_not_free(host: str, port: int) -> str | None:
    """Say why the address cannot be listened on; ``None`` if it can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as exc:
        return exc.strerror or str(exc)
    return None

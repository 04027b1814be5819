"""``python -m benchmarks.pairs``: what a request over a prefill and a decode worker costs the gateway.

Four simulated engines, once as workers that serve alone and once as two pairs, each with a gateway of its own; the
setups take turns. Printed are the gateway's CPU time per request as a ratio to the first setup in the same round, and
the client's time to the first token.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks import procfs
from benchmarks.processes import BenchmarkFailed, Children, call, forebay_command, free_port, wait_until
from benchmarks.procfs import LOAD_CORE, TEST_CORE

_PROMPT_TOKENS: Final = 512
_OUTPUT_TOKENS: Final = 8
_CONCURRENT: Final = 16
_ANSWER_TIMEOUT_S: Final = 60.0
_ENGINE: Final = {"--prefill-tokens-per-s": 25_600, "--inter-token-ms": 2, "--log-limit": 1, "--vocab-size": 60_000}
_HEAD: Final = (
    b"POST %b HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
)


@dataclass(slots=True)
class Setup:
    """Four engines and a gateway.

    Attributes:
        name: For the table.
        engine: Engine kind.
        roles: Of the engines.
        options: Of the gateway.
        port: The gateway's, once it runs.
        pid: Of its process.
        cpu_us: CPU time per request, by round.
        ttft_s: Of all requests.
    """

    name: str
    engine: str
    roles: Sequence[str]
    options: Sequence[str] = ()
    port: int = 0
    pid: int = 0
    cpu_us: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The route that is asked."""
        return "/generate" if self.engine == "sglang" else "/v1/completions"

    def body(self, number: int) -> bytes:
        """One request; no two have a prompt in common."""
        ids = [(number * 7919 + at * 31) % 50_000 + 1 for at in range(_PROMPT_TOKENS)]
        if self.engine == "sglang":
            params = {"max_new_tokens": _OUTPUT_TOKENS, "ignore_eos": True}
            return json.dumps({"input_ids": ids, "sampling_params": params, "stream": True}).encode()
        fields = {"model": "model", "prompt": ids, "max_tokens": _OUTPUT_TOKENS, "ignore_eos": True, "stream": True}
        return json.dumps(fields).encode()


_ALONE: Final = ("regular",) * 4
_PAIRS: Final = ("prefill", "prefill", "decode", "decode")


def setups(engine: str) -> list[Setup]:
    """What is compared for one engine kind; the first is the measure."""
    found = [Setup("alone", engine, _ALONE), Setup("pairs", engine, _PAIRS)]
    if engine == "sglang":
        found[1].name = "pairs, headers"
        found.append(Setup("pairs, immediate", engine, _PAIRS, ("--prefill-overlap", "immediate")))
    return found


def start(children: Children, setup: Setup) -> None:
    """Start the engines and the gateway.

    Raises:
        BenchmarkFailed: They do not come up.
    """
    specs: list[str] = []
    for number, role in enumerate(setup.roles):
        port = free_port()
        words = [str(word) for pair in _ENGINE.items() for word in pair]
        command = [*forebay_command(), "simulate", "--port", str(port), "--engine", setup.engine, *words]
        if role != "regular":
            command += ["--role", role, "--bootstrap-port", "0"]
        children.start(f"engine-{number}", command, LOAD_CORE)
        wait_until(functools.partial(_answers, port), children.check, "an engine")
        specs += ["--worker", f"http://127.0.0.1:{port},role={role}"]
    setup.port = free_port()
    command = [*forebay_command(), "serve", "--port", str(setup.port), "--policy", "least-loaded"]
    process = children.start("gateway", [*command, *setup.options, *specs], TEST_CORE)
    setup.pid = process.pid

    def is_ready() -> bool:
        status, body = call(setup.port, "GET", "/workers")
        return status == 200 and [w["is_ready"] for w in json.loads(body)["workers"]] == [True] * len(setup.roles)

    wait_until(is_ready, children.check, "the gateway")


def _answers(port: int) -> bool:
    return call(port, "GET", "/health")[0] == 200


async def run(setup: Setup, requests: int, first: int) -> None:
    """Send requests and note what they cost."""
    numbers = iter(range(first, first + requests))

    async def send_some() -> None:
        for number in numbers:
            setup.ttft_s.append(await _send(setup.port, setup.path, setup.body(number)))

    before = procfs.cpu_time(setup.pid)
    async with asyncio.TaskGroup() as group:
        for _ in range(_CONCURRENT):
            group.create_task(send_some())
    used = procfs.cpu_time(setup.pid).since(before)
    setup.cpu_us.append(used.busy_s / requests * 1e6)


async def _send(port: int, path: str, body: bytes) -> float:
    async with asyncio.timeout(_ANSWER_TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = time.monotonic()
        writer.write(_HEAD % (path.encode(), len(body)) + body)
        try:
            answer = await reader.readuntil(b"data:")
            ttft_s = time.monotonic() - sent
            answer += await reader.read()
        except asyncio.IncompleteReadError as exc:
            raise BenchmarkFailed(f"no event came: {exc.partial[:300]!r}") from exc
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
    if b"[DONE]" not in answer or b'"error"' in answer:
        raise BenchmarkFailed(f"the answer is not whole: {answer[-200:]!r}")
    return ttft_s


async def measure(engine: str, rounds: int, requests: int) -> None:
    """Measure one engine kind and print its rows."""
    found = setups(engine)
    with tempfile.TemporaryDirectory() as temp, Children(Path(temp)) as children:
        for setup in found:
            start(children, setup)
            await run(setup, requests // 4, 0)  # imports and connections
            setup.cpu_us.clear()
            setup.ttft_s.clear()
        for number in range(1, rounds + 1):
            for setup in found:
                await run(setup, requests, number * requests)
        children.check()
    base = found[0].cpu_us
    for setup in found:
        ratios = [mine / alone for mine, alone in zip(setup.cpu_us, base, strict=True)]
        hundredths = statistics.quantiles(setup.ttft_s, n=100)
        p50, p99 = hundredths[49] * 1e3, hundredths[98] * 1e3
        print(
            f"| {engine} | {setup.name} | {min(setup.cpu_us):.0f} | {min(setup.cpu_us) / min(base):.2f} | "
            f"{statistics.median(ratios):.2f} | {p50:.1f} | {p99:.1f} |",
            flush=True,
        )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pairs", allow_abbrev=False, description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which the setups take turns (5)")
    parser.add_argument("--requests", type=int, default=400, help="requests in a round (400)")
    arguments = parser.parse_args()
    print(
        f"{_PROMPT_TOKENS} token ids in, {_OUTPUT_TOKENS} streamed tokens out, {_CONCURRENT} at once; four engines\n\n"
        "| engine | setup | CPU µs a request | ratio | median | TTFT p50 ms | TTFT p99 ms |\n"
        "| --- | --- | --- | --- | --- | --- | --- |"
    )
    for engine in ("sglang", "vllm"):
        asyncio.run(measure(engine, arguments.rounds, arguments.requests))


if __name__ == "__main__":
    main()

"""A small traffic through real processes, and the same on the virtual clock: whether the latter can be believed."""

import asyncio
import contextlib
import functools
import json
import random
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from benchmarks.processes import BenchmarkFailed, Children, call, forebay_command, free_port, wait_until
from benchmarks.procfs import LOAD_CORE, TEST_CORE
from benchmarks.routing_engine import Setup
from benchmarks.routing_sim import Figures
from benchmarks.routing_traffic import Traffic, sample_groups, token_ids

# As ``routing_quality`` names them.
_POLICIES: Final = ("kv-aware", "kv-aware/tuned", "least-loaded", "round-robin")
# How a policy fares on the virtual clock: its name, the traffic, the engines, and a seed.
Virtual = Callable[[str, Traffic, Setup, int], Figures]
_SETUP: Final = Setup(
    engines=3,
    page_tokens=16,
    cache_tokens=64_000,
    prefill_tokens_per_s=4_000.0,
    chunk_tokens=1024,
    decode_step_s=0.02,
    event_delay_s=0.01,
    grain=1,
    is_eager=True,
)
_ANSWER_TIMEOUT_S: Final = 60.0
# The gateway subscribes at once; what is published before the subscription stands is asked for again.
_SETTLE_S: Final = 1.0
_HEAD: Final = (
    b"POST /generate HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
_CACHED: Final = re.compile(rb'"cached_tokens": ?(\d+)')


def traffic(seed: int) -> Traffic:
    """Groups whose requests come one after the other, so that most could use what the first has left."""
    return sample_groups(
        random.Random(seed),
        groups=24,
        groups_per_s=1.0,
        samples=6,
        problem_tokens=1000,
        system_tokens=160,
        answer_tokens=40,
        spread_s=4.0,
    )


async def measure_over_http(seed: int, virtual: Virtual) -> None:
    """Print, for some policies, the figures of both ways.

    Raises:
        BenchmarkFailed: A process or an answer failed.
    """
    what = traffic(seed)
    print(f"{what.requests} requests; {what.about}; {_SETUP}\n")
    print("| policy | way | tokens hit | of prompts | TTFT p50 s | TTFT p99 s |\n| --- | --- | --- | --- | --- | --- |")
    for policy in _POLICIES:
        _print(policy, "virtual", virtual(policy, what, _SETUP, seed))
        with tempfile.TemporaryDirectory() as temp, Children(Path(temp)) as children:
            port = _start(children, policy, seed)
            await asyncio.sleep(_SETTLE_S)
            _print(policy, "processes", await _send_all(port, what))
            children.check()


def _print(policy: str, way: str, figures: Figures) -> None:
    p50, p99 = figures.ttft_quantile_s(0.5), figures.ttft_quantile_s(0.99)
    hits = f"{figures.hit_tokens:,} | {figures.hit_share:.1%}"
    print(f"| {policy} | {way} | {hits} | {p50:.3f} | {p99:.3f} |", flush=True)


def _start(children: Children, policy: str, seed: int) -> int:
    """Start engines and a gateway; returns the gateway's port."""
    engines = [free_port() for _ in range(_SETUP.engines)]
    options = {
        "--page-size": _SETUP.page_tokens,
        "--num-blocks": _SETUP.cache_blocks,
        "--prefill-tokens-per-s": _SETUP.prefill_tokens_per_s,
        "--chunked-prefill-tokens": _SETUP.chunk_tokens,
        "--inter-token-ms": _SETUP.decode_step_s * 1000,
        "--vocab-size": 60_000,
        "--log-limit": 1,
        "--kv-events": "tcp://127.0.0.1:0",
        "--replay": "tcp://127.0.0.1:0",
    }
    words = [str(word) for pair in options.items() for word in pair]
    for port in engines:
        command = [*forebay_command(), "simulate", "--port", str(port), *words]
        children.start(f"engine-{port}", command, LOAD_CORE)
    for port in engines:
        wait_until(functools.partial(_answers, port), children.check, "an engine")
    gateway = free_port()
    workers = [word for port in engines for word in ("--worker", f"http://127.0.0.1:{port}")]
    name, _, profile = policy.partition("/")
    command = [*forebay_command(), "serve", "--port", str(gateway), "--policy", name, *workers]
    command += ["--kv-profile", profile or "plain"]
    children.start("gateway", command, TEST_CORE)

    def is_ready() -> bool:
        status, body = call(gateway, "GET", "/workers")
        return status == 200 and [w["is_ready"] for w in json.loads(body)["workers"]] == [True] * len(engines)

    wait_until(is_ready, children.check, "the gateway")
    return gateway


def _answers(port: int) -> bool:
    return call(port, "GET", "/ping")[0] == 200


async def _send_all(port: int, what: Traffic) -> Figures:
    figures = Figures(busy=[0.0])
    bodies: Sequence[tuple[float, int, bytes]] = [
        (turn.after_s, len(ids := token_ids(turn.pieces)), _body(ids, turn.output_tokens)) for turn in what.turns
    ]
    begin = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for after_s, tokens, body in bodies:
            group.create_task(_send(port, begin + after_s, tokens, body, figures))
    return figures


def _body(ids: Sequence[int], output_tokens: int) -> bytes:
    params = {"max_new_tokens": output_tokens, "ignore_eos": True}
    return json.dumps({"input_ids": ids, "sampling_params": params, "stream": True}).encode()


async def _send(port: int, at: float, tokens: int, body: bytes, figures: Figures) -> None:
    await asyncio.sleep(max(0.0, at - time.monotonic()))
    async with asyncio.timeout(_ANSWER_TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = time.monotonic()
        writer.write(_HEAD % len(body) + body)
        try:
            answer = await reader.readuntil(b"data:")
            figures.ttft_s.append(time.monotonic() - sent)
            answer += await reader.read()
        except asyncio.IncompleteReadError as exc:
            raise BenchmarkFailed(f"no event came: {exc.partial[:300]!r}") from exc
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
    cached = _CACHED.findall(answer)
    if not cached or b"[DONE]" not in answer:
        raise BenchmarkFailed(f"the answer is not whole: {answer[-200:]!r}")
    figures.prompt_tokens += tokens
    figures.hit_tokens += int(cached[-1])

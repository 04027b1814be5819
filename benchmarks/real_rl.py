"""``python -m benchmarks.real_rl GATEWAY ENGINE...``: what trainers ask for, against real engines behind a gateway.

By hand, against engines that run already, SGLang or vLLM (with ``--enable-scale-out``, and ``VLLM_SERVER_DEV_MODE=1``
for the part ``control``), and a gateway with these as its only workers. Nothing else may use them.

``answers``: each request goes to the engine in its own words and through the gateway; ids, finish reasons, texts and
log-probabilities must be the same, these digit by digit as the engine wrote them, in Base64 as float32. ``aborts``:
from ``/abort_request`` or the client's close in mid-answer until the engine runs nothing, by its own count.
``control``: a pause, a flush, a version and a continue for all workers, with requests that run and that wait. Prints a
table in Markdown; exits with 1 if something differs.
"""

import argparse
import asyncio
import itertools
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.real_cancel import ending, times
from benchmarks.real_engines import PATIENCE_S, Answer, Call, count, fetch, is_sglang, state_of
from benchmarks.real_rl_cases import IDS, TOKEN_ROUTE, Body, Case, forms, native_cases, openai_cases, parsed

_POLL_S: Final = 0.002
_LONG: Final = 600
# Kinds of requests that are stopped, and the engine's own requests of each.
_KINDS: Final = {"one": 1, "batch of 3": 3, "n = 2": 2}


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine, and its name in the gateway.

    Attributes:
        model: Name of its model.
    """

    url: str
    is_sglang: bool
    model: str

    @property
    def worker_id(self) -> str:
        """What the gateway calls it."""
        return self.url.removeprefix("http://")

    @property
    def kind(self) -> str:
        """Its name in tables."""
        return "SGLang" if self.is_sglang else "vLLM"


class Bench:
    """The gateway, the engines, and what went wrong.

    Args:
        gateway: Its URL.
        engines: All its workers.
    """

    def __init__(self, gateway: str, engines: list[Engine], tries: int) -> None:
        self.gateway = gateway
        self.engines = engines
        self.tries = tries
        self.random = random.Random(0)
        self.wrong = 0

    def note(self, engine: Engine | None, name: str, problem: str, result: str = "the same") -> None:
        """Print one line of a table."""
        self.wrong += bool(problem)
        print(f"| {engine.kind if engine else 'all'} | {name} | {problem or result} |", flush=True)

    async def ask(self, engine: Engine, path: str, body: Body, **headers: str) -> Answer:
        """One request through the gateway to one of its workers."""
        pinned = {"x-forebay-worker": engine.worker_id, **headers}
        return await fetch(self.gateway, path, {"model": engine.model, **body}, pinned)

    async def send(
        self, engine: Engine, public_id: str, *, stream: bool, kind: str = "one", tokens: int = _LONG
    ) -> Call:
        """Begin a request, one of ``_KINDS``, and a long one if nothing else is said."""
        samples = 2 if kind == "n = 2" else 1
        prompts = [[*IDS, n] for n in range(3)] if kind == "batch of 3" else IDS
        sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": samples - 1, "n": samples}
        body = {"model": engine.model, "input_ids": prompts, "sampling_params": sampling, "stream": stream}
        headers = {"x-forebay-worker": engine.worker_id, "x-request-id": public_id}
        return await Call.send(self.gateway, "/generate", body, headers)

    async def counted(self, engine: Engine, wanted: int) -> None:
        """Wait until an engine runs so many requests.

        Raises:
            TimeoutError: It never does.
        """
        async with asyncio.timeout(PATIENCE_S):
            while await count(engine.url, sglang=engine.is_sglang) != wanted:  # noqa: ASYNC110 -- another process
                await asyncio.sleep(_POLL_S)


async def answers(bench: Bench) -> None:
    """Every kind of request, through the gateway and without it."""
    for engine in bench.engines:
        found = native_cases(sglang=engine.is_sglang, stops=await _stops(engine))
        for case in [*found, *openai_cases(sglang=engine.is_sglang, model=engine.model)]:
            direct_path = case.direct_path or case.path
            # What is cached is computed in another order, so the first answers are not looked at.
            for body in case.direct:
                await fetch(engine.url, direct_path, body)
            theirs = [await fetch(engine.url, direct_path, body) for body in case.direct]
            ours = await bench.ask(engine, case.path, case.body)
            bench.note(engine, case.name, _difference(case, ours, theirs))


async def _stops(engine: Engine) -> Body:
    """Conditions that end the greedy output of ``IDS`` in its middle."""
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}}
    if not engine.is_sglang:
        body = {"token_ids": IDS, "output_mode": "text", "sampling_params": {"max_tokens": 12, "temperature": 0}}
    item = (await fetch(engine.url, "/generate" if engine.is_sglang else TOKEN_ROUTE, body)).json()
    choice = item if engine.is_sglang else item["choices"][0]
    token = choice["output_ids" if engine.is_sglang else "token_ids"][7]
    text = choice["text"].strip()
    middle = text[len(text) // 2 :][:3]
    return {"a stop token": {"stop_token_ids": [token]}, "a stop string": {"stop": [middle]}}


def _difference(case: Case, ours: Answer, theirs: list[Answer]) -> str:
    """What is not the same; empty if nothing."""
    if bad := [one for one in (ours, *theirs) if one.status != 200]:
        return f"status {bad[0].status}: {bad[0].body!r}"
    found = forms(case, parsed(case, ours))
    wanted = [form for answer in theirs for form in forms(case, parsed(case, answer))]
    if len(found) != len(wanted):
        return f"{len(found)} items, not {len(wanted)}"
    pairs = zip(found, wanted, strict=True)
    return "; ".join(f"item {at}: {one}" for at, (mine, own) in enumerate(pairs) if (one := _first(mine, own)))


def _first(mine: Any, own: Any, where: str = "") -> str:
    """The first place where the two differ, empty if there is none."""
    if isinstance(own, dict) and isinstance(mine, dict):
        return next((one for name in own if (one := _first(mine.get(name), own[name], f"{where} {name}"))), "")
    if isinstance(own, list) and isinstance(mine, list) and len(own) == len(mine):
        return next((one for at in range(len(own)) if (one := _first(mine[at], own[at], f"{where}[{at}]"))), "")
    return "" if mine == own else f"{where} {mine!r:.200}, the engine {own!r:.200}"


async def aborts(bench: Bench) -> None:
    """Requests that are stopped in mid-answer; the engine is idle soon after."""
    for engine, kind, stream, closes in itertools.product(bench.engines, _KINDS, (False, True), (False, True)):
        idle_ms: list[float] = []
        told = Counter[str]()
        for _ in range(bench.tries):
            public_id = f"rl-{bench.random.getrandbits(48):012x}"
            call = await bench.send(engine, public_id, stream=stream, kind=kind)
            await bench.counted(engine, _KINDS[kind])
            await (call.wait_for(b"data: ", 6) if stream else asyncio.sleep(bench.random.uniform(0.1, 0.3)))
            since = time.monotonic()
            if closes:
                call.close()
            else:
                await fetch(bench.gateway, "/abort_request", {"rid": public_id})
            await bench.counted(engine, 0)
            idle_ms.append((time.monotonic() - since) * 1e3)
            if not closes:
                answer = await call.answer()
                told[f"{answer.status} {ending(answer, streamed=stream)}"] += 1
        left = await state_of(bench.gateway)
        # The latter of an engine that takes longer than a second.
        others = set(told) - {f"200 {_KINDS[kind]} abort", "499 1 aborted (499)"}
        wrong = f"left: {left}" if left else f"told {told}" if others else ""
        name = f"{kind}, {'stream' if stream else 'unary'}, {'client closes' if closes else '/abort_request'}"
        endings = "".join(f"; {number}x {text}" for text, number in told.items())
        bench.note(engine, name, wrong, f"idle after {times(idle_ms)} ms{endings}")


async def control(bench: Bench) -> None:
    """One update of a trainer: what runs is cut, what comes waits, and then has the new version."""
    version = str(bench.random.randrange(10**6, 10**9))
    running = [(engine, await bench.send(engine, f"run-{version}-{n}", stream=False))
               for n, engine in enumerate(bench.engines)]  # fmt: skip
    for engine in bench.engines:
        await bench.counted(engine, 1)
    await asyncio.sleep(0.3)
    await _told(bench, "/pause_generation", {"mode": "abort"})
    for engine, call in running:
        answer = await call.answer()
        found = ending(answer, streamed=False)
        bench.note(engine, "what ran at the pause", "" if found == "1 abort" else answer.body.decode(), found)
    states = {one["state"] for one in (await fetch(bench.gateway, "/workers")).json()["workers"]}
    bench.note(None, "GET /workers", "" if states == {"paused"} else f"{states}", "paused")
    waiting = [(engine, await bench.send(engine, f"wait-{version}-{n}", stream=False, tokens=4))
               for n, engine in enumerate(bench.engines)]  # fmt: skip
    await asyncio.sleep(1)
    for engine in bench.engines:
        number = await count(engine.url, sglang=engine.is_sglang)
        bench.note(engine, "requests in the paused engine", f"{number}" if number else "", "none")
    await _told(bench, "/flush_cache", {})
    await _told(bench, "/update_weight_version", {"new_version": version, "abort_all_requests": False})
    await _told(bench, "/continue_generation", {})
    for engine, call in waiting:
        answer = await call.answer()
        meta: Any = answer.json().get("meta_info", {})
        versions = {meta.get("weight_version"), answer.headers.get("x-forebay-weight-version")}
        problem = "" if (answer.status, versions) == (200, {version}) else answer.body.decode()
        bench.note(engine, "what waited: both versions told", problem, "the new one")
        bench.note(engine, "cached tokens after the flush", str(meta.get("cached_tokens") or ""), "none")
        newer = {"x-forebay-min-weight-version": str(int(version) + 1)}
        status = (await bench.ask(engine, "/generate", {"input_ids": IDS}, **newer)).status
        bench.note(engine, "a version that no worker has", "" if status == 503 else f"status {status}", "503")


async def _told(bench: Bench, path: str, body: Body) -> None:
    since = time.monotonic()
    answer = await fetch(bench.gateway, path, body)
    spent_ms = (time.monotonic() - since) * 1e3
    bench.note(
        None, f"POST {path}", "" if answer.status == 200 else answer.body.decode(), f"200 after {spent_ms:.0f} ms"
    )


_PARTS: Final = {"answers": answers, "aborts": aborts, "control": control}


async def run(arguments: argparse.Namespace) -> int:
    """Run all parts that were asked for."""
    engines = []
    for url in arguments.engines:
        model = (await fetch(url, "/v1/models")).json()["data"][0]["id"]
        engines.append(Engine(url, await is_sglang(url), model))
    bench = Bench(arguments.gateway, engines, arguments.tries)
    print("| engine | what | result |\n| --- | --- | --- |")
    for name, part in _PARTS.items():
        if not arguments.only or name == arguments.only:
            await part(bench)
    if left := await state_of(bench.gateway):
        bench.note(None, "what the gateway holds", f"{left}")
    return 1 if bench.wrong else 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_rl", description=__doc__)
    parser.add_argument("gateway", help="URL of the gateway")
    parser.add_argument("engines", nargs="+", help="URLs of its workers")
    parser.add_argument("--only", choices=tuple(_PARTS))
    parser.add_argument("--tries", type=int, default=5, help="of each abort (default: 5)")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())

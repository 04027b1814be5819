"""``python -m benchmarks.real_cancel GATEWAY_URL ENGINE_URL``: how long an engine works on after a cancelled request.

By hand, against engines that run already: an SGLang or vLLM with room for two requests at once
(``--max-running-requests 2 --load-snapshot-publish-interval 1``, or ``--max-num-seqs 2``; vLLM can be paused with
``VLLM_SERVER_DEV_MODE=1``), and a gateway with this engine as its only worker. Nothing else
may use the engine. The engine's own counts of running and waiting requests are polled; a try is over when they are what
they were before it and have stayed so. Prints a table in Markdown; exits with 1 if a try went wrong.

``--deadline``: the gateway runs with ``--request-timeout-s 1``; checks this alone.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.real_engines import Answer, Call, count, fetch, is_sglang, state_of

_SLOTS: Final = 2
_LENGTH: Final = 1500
_POLL_S: Final = 0.005
_STAYS_S: Final = 0.4
_GIVE_UP_S: Final = 8.0
# A request that is cancelled early is so this long after it was written, at most.
_EARLY_S: Final = 0.03


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of request.

    Attributes:
        samples: Requests that it is to an engine.
    """

    name: str
    path: str
    body: dict[str, Any]
    samples: int = 1

    @property
    def is_streamed(self) -> bool:
        """Whether it asks for events."""
        return bool(self.body.get("stream"))


@dataclass(slots=True)
class Row:
    """What the tries of one case gave, in milliseconds."""

    name: str
    idle_ms: list[float] = field(default_factory=list)
    answer_ms: list[float] = field(default_factory=list)
    endings: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """One line of the table."""
        endings = ", ".join(f"{number}x {ending}" for ending, number in self.endings.most_common())
        wrong = f"{len(self.wrong)}: {self.wrong[0]}" if self.wrong else "none"
        spent = f"{times(self.idle_ms)} | {times(self.answer_ms)}"
        return f"| {self.name} | {len(self.idle_ms)} | {spent} | {endings} | {wrong} |"


def times(values: list[float]) -> str:
    """Median and maximum."""
    return f"{statistics.median(values):.0f} / {max(values):.0f}" if values else "–"


def shapes(*, sglang: bool, model: str, length: int = _LENGTH) -> list[Shape]:
    """The kinds of requests that an engine gets here."""
    found = []
    for stream in (False, True):
        kind = "stream" if stream else "unary"
        if sglang:
            parameters: dict[str, Any] = {"max_new_tokens": length, "ignore_eos": True}
            native: dict[str, Any] = {"stream": stream, "sampling_params": parameters}
            several = {**native, "sampling_params": {**parameters, "n": 2}}
            found += [
                Shape(f"generate, {kind}", "/generate", {**native, "text": "one"}),
                Shape(f"generate, {kind}, n = 2", "/generate", {**several, "text": "two"}, 2),
                Shape(f"generate, {kind}, batch of 3", "/generate", {**native, "text": ["a", "b", "c"]}, 3),
            ]
        plain = {"model": model, "stream": stream, "max_tokens": length, "ignore_eos": True}
        chat = {**plain, "messages": [{"role": "user", "content": "Hello"}]}
        found.append(Shape(f"chat, {kind}", "/v1/chat/completions", chat))
        if not sglang:
            found += [
                Shape(f"completions, {kind}", "/v1/completions", {**plain, "prompt": "one"}),
                Shape(f"completions, {kind}, n = 2", "/v1/completions", {**plain, "prompt": "two", "n": 2}, 2),
                Shape(f"completions, {kind}, batch of 3", "/v1/completions", {**plain, "prompt": ["a", "b", "c"]}, 3),
            ]
    return found


def ending(answer: Answer, *, streamed: bool) -> str:
    """How an answer ended: finish reasons, or the error, with the status where that is not 200."""
    items = answer.events() if streamed and answer.status == 200 else [answer.json()]
    reasons: Counter[str] = Counter()
    for item in items:
        if isinstance(item, dict) and "error" in item:
            reasons[f"{item['error']['type']} ({answer.status})"] += 1
            continue
        for one in item if isinstance(item, list) else item.get("choices", [item]):
            reason = one["meta_info"]["finish_reason"] if "meta_info" in one else one.get("finish_reason")
            if reason:
                reasons[reason["type"] if isinstance(reason, dict) else reason] += 1
    return " + ".join(f"{number} {reason}" for reason, number in sorted(reasons.items())) or "[DONE] alone"


class Bench:
    """The engine, the gateway, and the tries.

    Args:
        gateway: Its URL.
        engine: Its URL.
        tries: Of each case.
        seed: Of the moments at which requests are cancelled.
        shape: Part of the names of the requests that are cancelled.
    """

    def __init__(self, gateway: str, engine: str, *, sglang: bool, tries: int, seed: int, shape: str = "") -> None:
        self.gateway = gateway
        self.engine = engine
        self.sglang = sglang
        self.tries = tries
        self.random = random.Random(seed)
        self.shape = shape
        self.rows: list[Row] = []

    async def busy(self, wanted: int) -> None:
        """Wait until the engine has so many requests, or more."""
        end = time.monotonic() + _GIVE_UP_S
        while (found := await count(self.engine, sglang=self.sglang)) < wanted:
            if time.monotonic() > end:
                raise TimeoutError(f"the engine has {found} requests, not {wanted}")
            await asyncio.sleep(_POLL_S)

    async def idle(self, wanted: int, since: float, stays_s: float = _STAYS_S) -> float:
        """When the engine had so many requests for good, milliseconds after ``since``; infinite for never."""
        first = None
        while (now := time.monotonic()) < since + _GIVE_UP_S:
            if await count(self.engine, sglang=self.sglang) > wanted:
                first = None
            elif first is None:
                first = time.monotonic()
            elif now - first > stays_s:
                return (first - since) * 1e3
            await asyncio.sleep(_POLL_S)
        return float("inf")

    async def row(self, name: str, one: Callable[[Row], Awaitable[None]], tries: int | None = None) -> None:
        """Run the tries of one case, and see that the gateway holds nothing after each."""
        row = Row(name)
        for _ in range(tries or self.tries):
            try:
                await one(row)
            except (TimeoutError, EOFError, OSError, ValueError, KeyError) as exc:
                row.wrong.append(repr(exc))
            if left := await state_of(self.gateway):
                row.wrong.append(f"left: {left}")
            if row.idle_ms and row.idle_ms[-1] == float("inf"):
                row.wrong.append("the engine went on")
            await self.idle(0, time.monotonic(), 0.0)
        print(row, flush=True)
        self.rows.append(row)

    async def fill(self) -> list[Call]:
        """Occupy the engine, past the gateway, with answers that are cheap to make."""
        shape = next(shape for shape in shapes(sglang=self.sglang, model=await self.model()))
        calls = [await Call.send(self.engine, shape.path, shape.body) for _ in range(_SLOTS)]
        await self.busy(_SLOTS)
        return calls

    async def empty(self, fillers: list[Call]) -> None:
        """End what ``fill`` has begun; unary calls of SGLang do not end by closing."""
        if fillers and self.sglang:
            await fetch(self.engine, "/abort_request", {"rid": "", "abort_all": True})
        for filler in fillers:
            filler.close()

    async def model(self) -> str:
        """The name of the engine's model."""
        return str((await fetch(self.engine, "/v1/models")).json()["data"][0]["id"])

    async def worker_id(self) -> str:
        """The gateway's name of the engine."""
        return str((await fetch(self.gateway, "/workers")).json()["workers"][0]["id"])

    def new_id(self) -> str:
        """A public id."""
        return f"cancel-{self.random.getrandbits(48):012x}"

    async def start(self, shape: Shape, public_id: str) -> Call:
        """Send one request through the gateway."""
        return await Call.send(self.gateway, shape.path, shape.body, {"x-request-id": public_id})

    async def abort(self, public_id: str, **more: bool) -> Answer:
        """Call ``/abort_request``."""
        return await fetch(self.gateway, "/abort_request", {"rid": public_id, **more})

    async def cancel(self, shape: Shape, phase: str, row: Row, *, closes: bool) -> None:
        """One try: send, wait for the phase, cancel, and time what follows."""
        fillers = await self.fill() if phase == "queued" else []
        public_id = self.new_id()
        try:
            call = await self.start(shape, public_id)
            if phase == "early":
                await asyncio.sleep(self.random.uniform(0, _EARLY_S))
            else:
                # SGLang lets the prompt of a native n = 2 run alone first.
                await self.busy(len(fillers) + (1 if fillers else shape.samples))
                if shape.is_streamed and not fillers:
                    await call.wait_for(b"data: ", 2)
                await asyncio.sleep(self.random.uniform(0, 0.2))
            since = time.monotonic()
            if closes:
                call.close()
            else:
                await self._abort_and_read(shape, public_id, call, row, since)
            row.idle_ms.append(await self.idle(len(fillers), since))
        finally:
            await self.empty(fillers)

    async def _abort_and_read(self, shape: Shape, public_id: str, call: Call, row: Row, since: float) -> None:
        report = await self.abort(public_id)
        answer = await call.answer()
        row.answer_ms.append((time.monotonic() - since) * 1e3)
        found = ending(answer, streamed=shape.is_streamed)
        row.endings[found] += 1
        if report.json()["aborted"] != [public_id]:
            row.wrong.append(f"reported {report.body.decode()}")


async def cancels(bench: Bench) -> None:
    """Every shape, cancelled early, running and queued, by leaving and by the route."""
    for shape in shapes(sglang=bench.sglang, model=await bench.model()):
        if bench.shape not in shape.name:
            continue
        for phase in ("early", "running", "queued"):
            for closes in (True, False):
                if phase == "early" and not closes:
                    continue  # the gateway may not know the id yet
                how = "client closes" if closes else "/abort_request"

                async def one(row: Row, shape: Shape = shape, phase: str = phase, closes: bool = closes) -> None:
                    await bench.cancel(shape, phase, row, closes=closes)

                await bench.row(f"{shape.name}, {phase}: {how}", one)


async def abort_all(bench: Bench) -> None:
    """Two requests of one stream mode each, and all aborted."""
    found = shapes(sglang=bench.sglang, model=await bench.model())
    unary, stream = (next(shape for shape in found if shape.is_streamed is wanted) for wanted in (False, True))

    async def one(row: Row) -> None:
        calls = [(shape, await bench.start(shape, bench.new_id())) for shape in (unary, stream)]
        await bench.busy(2)
        since = time.monotonic()
        await bench.abort("", abort_all=True)
        for shape, call in calls:
            row.endings[ending(await call.answer(), streamed=shape.is_streamed)] += 1
        row.answer_ms.append((time.monotonic() - since) * 1e3)
        row.idle_ms.append(await bench.idle(0, since))

    await bench.row("a unary request and a stream: abort_all", one)


async def one_of_several(bench: Bench) -> None:
    """One item or sample of a unary request is aborted; the others come whole."""
    for shape in shapes(sglang=bench.sglang, model=await bench.model(), length=60):
        has_no_ids = shape.body.get("n", 1) > 1  # vLLM's samples
        if shape.samples == 1 or shape.is_streamed or has_no_ids:
            continue

        async def one(row: Row, shape: Shape = shape) -> None:
            public_id = bench.new_id()
            call = await bench.start(shape, public_id)
            await bench.busy(shape.samples)
            since = time.monotonic()
            report = await bench.abort(f"{public_id}_1")
            row.idle_ms.append(await bench.idle(shape.samples - 1, since, 0.0))
            row.endings[ending(await call.answer(), streamed=False)] += 1
            if report.json()["not_found"]:
                row.wrong.append(f"reported {report.body.decode()}")

        await bench.row(f"{shape.name}, one of them: /abort_request", one)


async def paused(bench: Bench) -> None:
    """A running request's client leaves while the engine is paused; the time from its going on to idle."""
    worker_id, model = await bench.worker_id(), await bench.model()
    pause, go_on = ("pause_generation", "continue_generation") if bench.sglang else ("pause?mode=keep", "resume")
    mode = {"mode": "in_place"} if bench.sglang else {}
    for shape in shapes(sglang=bench.sglang, model=model):
        if shape.samples > 1:
            continue

        async def one(row: Row, shape: Shape = shape) -> None:
            call = await bench.start(shape, bench.new_id())
            await bench.busy(1)
            status = (await fetch(bench.gateway, f"/workers/{worker_id}/call/{pause}", mode)).status
            if status != 200:
                raise ValueError(f"the pause was answered with {status}")
            await asyncio.sleep(1.5)  # the gateway asks each second
            call.close()
            await asyncio.sleep(0.5)
            await fetch(bench.gateway, f"/workers/{worker_id}/call/{go_on}", {})
            row.idle_ms.append(await bench.idle(0, time.monotonic()))

        await bench.row(f"{shape.name}: pause, client closes, continue", one, tries=3)


async def deadline(bench: Bench) -> None:
    """The gateway's own time limit of 1 s; the times are from the request on."""
    for shape in shapes(sglang=bench.sglang, model=await bench.model()):

        async def one(row: Row, shape: Shape = shape) -> None:
            call = await bench.start(shape, bench.new_id())
            answer = await call.answer()
            row.answer_ms.append((time.monotonic() - call.sent_at) * 1e3)
            row.endings[ending(answer, streamed=shape.is_streamed).rpartition(" + ")[2]] += 1
            row.idle_ms.append(await bench.idle(0, call.sent_at))

        await bench.row(f"{shape.name}: --request-timeout-s 1", one, tries=3)


async def run(arguments: argparse.Namespace) -> int:
    """Run all cases that were asked for."""
    sglang = await is_sglang(arguments.engine)
    found = {name: getattr(arguments, name) for name in ("tries", "seed", "shape")}
    bench = Bench(arguments.gateway, arguments.engine, sglang=sglang, **found)
    print("| case | tries | engine idle after, ms (median / max) | caller answered after, ms | endings | wrong |")
    print("| --- | --- | --- | --- | --- | --- |")
    parts = [deadline] if arguments.deadline else [cancels, abort_all, one_of_several, paused]
    for part in parts:
        if not arguments.only or part.__name__ == arguments.only:
            await part(bench)
    return 1 if any(row.wrong for row in bench.rows) else 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_cancel", description=__doc__)
    parser.add_argument("gateway", help="URL of the gateway")
    parser.add_argument("engine", help="URL of its only worker")
    parser.add_argument("--tries", type=int, default=5, help="of each case (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of cancelling (default: 0)")
    parser.add_argument("--only", choices=("cancels", "abort_all", "one_of_several", "paused"))
    parser.add_argument("--shape", default="", help="only requests with this in their names, for --only cancels")
    parser.add_argument("--deadline", action="store_true", help="the gateway runs with --request-timeout-s 1")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())

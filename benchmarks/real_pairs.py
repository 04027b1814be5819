"""``python -m benchmarks.real_pairs GATEWAY PREFILL DECODE``: a real prefill and a real decode worker behind a gateway.

By hand, against engines that run already, SGLang or vLLM with NIXL, and a gateway with these two as its only workers.
Nothing else may use them. ``--alone`` is one engine of the same model that serves alone, or a gateway in front of one;
greedy answers must be the same as its answers.

After each try both engines must hold nothing: no request that runs, waits or is between queues, and no block in use (as
``/v1/loads`` and ``/metrics`` tell), and ``/internal/state`` of the gateway must be zero. Prints tables in Markdown;
exits with 1 if a try went wrong.

``--kill prefill --pid N`` (or ``decode``) only ends that worker's process group while requests run over it.
"""

import argparse
import asyncio
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from benchmarks.real_answers import Case, Legs, Request, cases, differs, first_output, legs
from benchmarks.real_cancel import ending, times
from benchmarks.real_engines import Answer, Call, Held, count, fetch, held, is_sglang, state_of

_POLL_S: Final = 0.005
_STAYS_S: Final = 1.0
# Above the 30 s for which vLLM keeps a prompt that nobody fetches.
_GIVE_UP_S: Final = 45.0
_MISSED_S: Final = 10.0
_EARLY_S: Final = 0.03
_LENGTH: Final = 400
_LONG_PROMPT: Final = 1500
_SHORT_PROMPT: Final = 200
_MIXED: Final = 100
_AT_A_TIME: Final = 4
_LEAVING: Final = 5
_STAYS_AT_MOST_S: Final = 0.6
_COUNTERS: Final = ("handoff_abandoned", "pair_failures", "hold_seconds_sum", "hold_seconds_count", "abort_unconfirmed")
_HOLD: Final = ("forebay_prefill_hold_seconds_sum", "forebay_prefill_hold_seconds_count")
_ENGINE_LABELS: Final = re.compile(r"\{engine=[^}]*\}")
_NIXL: Final = ("nixl_num_kv_expired_reqs_total", "nixl_num_notifications_after_expiry_total")


@dataclass(slots=True)
class Row:
    """What the tries of one case gave, in milliseconds."""

    name: str
    prefill_ms: list[float] = field(default_factory=list)
    decode_ms: list[float] = field(default_factory=list)
    answer_ms: list[float] = field(default_factory=list)
    endings: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """One line of the table."""
        endings = ", ".join(f"{number}x {ending}" for ending, number in self.endings.most_common())
        wrong = f"{len(self.wrong)}: {self.wrong[0]}" if self.wrong else "none"
        spent = " | ".join(times(values) for values in (self.prefill_ms, self.decode_ms, self.answer_ms))
        return f"| {self.name} | {spent} | {endings} | {wrong} |"


class Bench:
    """The pair, the gateway, and the tries.

    Args:
        arguments: The command line.
        sglang: The engines are SGLang, else vLLM.
        model: Their model.
    """

    def __init__(self, arguments: argparse.Namespace, *, sglang: bool, model: str) -> None:
        self.gateway: str = arguments.gateway
        self.prefill: str = arguments.prefill
        self.decode: str = arguments.decode
        self.alone: str = arguments.alone
        self.tries: int = arguments.tries
        self.sglang = sglang
        self.model = model
        self.random = random.Random(arguments.seed)
        self.cases = [one for one in cases(sglang=sglang, model=model) if arguments.case in one.name]
        self.is_wrong = False

    def new_id(self) -> str:
        """A public id."""
        return f"pair-{self.random.getrandbits(48):012x}"

    def fresh_ids(self, number: int) -> list[int]:
        """A prompt that no cache has."""
        return [self.random.randrange(20, 300) for _ in range(number)]

    def show(self, row: Row) -> None:
        """Print a line."""
        self.is_wrong = self.is_wrong or bool(row.wrong)
        print(row, flush=True)

    async def busy(self, url: str) -> None:
        """Wait until an engine holds something of a request."""
        end = time.monotonic() + _MISSED_S
        while await held(url, sglang=self.sglang) == Held():
            if time.monotonic() > end:
                raise TimeoutError("it was over before it was seen")
            await asyncio.sleep(_POLL_S)

    async def running(self, url: str) -> None:
        """Wait until an engine runs a request, past the queues of a pair."""
        end = time.monotonic() + _MISSED_S
        while not await count(url, sglang=self.sglang):
            if time.monotonic() > end:
                raise TimeoutError("it was over before it was seen")
            await asyncio.sleep(_POLL_S)

    async def idle(self, url: str, since: float) -> float:
        """When an engine held nothing for good, milliseconds after ``since``; infinite for never."""
        first, end = None, time.monotonic() + _GIVE_UP_S
        while (now := time.monotonic()) < end:
            if await held(url, sglang=self.sglang) != Held():
                first = None
            elif first is None:
                first = now
            elif now - first > _STAYS_S:
                return (first - since) * 1e3
            await asyncio.sleep(_POLL_S)
        return float("inf")

    async def settle(self, row: Row, since: float) -> None:
        """Wait until nothing is held, and note what is."""
        async with asyncio.TaskGroup() as group:
            prefill = group.create_task(self.idle(self.prefill, since))
            decode = group.create_task(self.idle(self.decode, since))
        row.prefill_ms.append(prefill.result())
        row.decode_ms.append(decode.result())
        if float("inf") in (prefill.result(), decode.result()):
            row.wrong.append(f"held: {await held(self.prefill, sglang=self.sglang)} at prefill")
        if left := await state_of(self.gateway):
            row.wrong.append(f"left: {left}")

    async def counters(self) -> dict[str, float]:
        """What the gateway and a vLLM prefill worker have counted that concerns pairs."""
        found: dict[str, float] = {}
        sources = [(self.gateway, _COUNTERS)] + ([] if self.sglang else [(self.prefill, _NIXL)])
        for url, names in sources:
            for line in (await fetch(url, "/metrics")).body.decode().splitlines():
                name, _, value = line.rpartition(" ")
                if not line.startswith("#") and any(one in name for one in names):
                    found[_ENGINE_LABELS.sub("", name)] = float(value)
        return found


async def answers(bench: Bench) -> None:
    """Every kind of request once, and whether it is answered as by one engine alone."""
    for case in bench.cases:
        row = Row(case.name)
        since = time.monotonic()
        answer = await fetch(bench.gateway, case.path, case.body)
        row.answer_ms.append((time.monotonic() - since) * 1e3)
        if "x-forebay-prefill-worker" not in answer.headers and not case.is_alone:
            row.wrong.append(f"{answer.status}, not served by a pair: {answer.body[:300]!r}")
        elif bench.alone and (fault := differs(case, answer, await fetch(bench.alone, case.path, case.body))):
            row.wrong.append(fault)
        row.endings[ending(answer, streamed=case.is_streamed)] += 1
        await bench.settle(row, time.monotonic())
        bench.show(row)


async def cancels(bench: Bench) -> None:
    """Requests cancelled early, while prefill computes, and while decode streams, by leaving and by the route."""
    for case in bench.cases:
        if not case.is_cancelled:
            continue
        for phase in ("early", "prefill", "running"):
            for closes in (True, False):
                if phase == "early" and not closes:
                    continue  # the gateway may not know the id yet
                row = Row(f"{case.name}, {phase}: {'client closes' if closes else '/abort_request'}")
                for _ in range(bench.tries):
                    try:
                        await _cancel(bench, case, phase, row, closes=closes)
                    except (TimeoutError, EOFError, OSError, ValueError, KeyError) as exc:
                        row.wrong.append(repr(exc))
                bench.show(row)


async def _cancel(bench: Bench, case: Case, phase: str, row: Row, *, closes: bool) -> None:
    prompt = bench.fresh_ids(_LONG_PROMPT if phase == "prefill" else 40)
    body, public_id = case.longer(_LENGTH, prompt), bench.new_id()
    call = await Call.send(bench.gateway, case.path, body, {"x-request-id": public_id})
    try:
        if phase == "early":
            await asyncio.sleep(bench.random.uniform(0, _EARLY_S))
        elif phase == "prefill":
            await bench.busy(bench.prefill)
        elif case.is_streamed:
            await call.wait_for(b"data: ", 3)
        else:
            await bench.running(bench.decode)
    except TimeoutError:
        call.close()
        row.endings["missed"] += 1
        await bench.settle(row, time.monotonic())
        return
    since = time.monotonic()
    if closes:
        call.close()
    else:
        report = await fetch(bench.gateway, "/abort_request", {"rid": public_id})
        answer = await call.answer()
        row.answer_ms.append((time.monotonic() - since) * 1e3)
        row.endings[ending(answer, streamed=case.is_streamed)] += 1
        if report.json()["aborted"] != [public_id]:
            row.wrong.append(f"reported {report.body.decode()}")
    await bench.settle(row, since)


async def mixed(bench: Bench) -> None:
    """Many requests, some of whose clients leave."""
    row, begun = Row(f"{_MIXED} requests, {_AT_A_TIME} at a time, one of {_LEAVING} leaves"), time.monotonic()
    expected = (
        {case.name: await fetch(bench.alone, case.path, case.body) for case in bench.cases} if bench.alone else {}
    )
    places = asyncio.Semaphore(_AT_A_TIME)

    async def one(case: Case, leaves_after_s: float | None) -> None:
        async with places:
            since = time.monotonic()
            call = await Call.send(bench.gateway, case.path, case.body)
            if leaves_after_s is not None:
                await asyncio.sleep(leaves_after_s)
                call.close()
                row.endings["left"] += 1
                return
            answer = await call.answer()
            row.answer_ms.append((time.monotonic() - since) * 1e3)
            row.endings[f"answered {answer.status}"] += 1
            if expected and (fault := differs(case, answer, expected[case.name])):
                row.wrong.append(f"{case.name}: {fault}")

    async with asyncio.TaskGroup() as group:
        for number in range(_MIXED):
            leaves_after_s = bench.random.uniform(0, _STAYS_AT_MOST_S) if number % _LEAVING == 0 else None
            group.create_task(one(bench.random.choice(bench.cases), leaves_after_s))
    await bench.settle(row, time.monotonic())
    bench.show(row)
    print(f"\nin {time.monotonic() - begun:.1f} s\n")


async def first_tokens(bench: Bench) -> None:
    """Time to the first output: by hand, through the gateway, and of one engine alone, in turns."""
    ways: dict[str, Callable[[Legs], Awaitable[float]]] = {
        "legs by hand": lambda chosen: _by_hand(bench, chosen),
        "gateway": lambda chosen: _first(bench.gateway, chosen.alone),
    }
    if bench.alone:
        ways["alone"] = lambda chosen: _first(bench.alone, chosen.alone)
    found: dict[str, list[float]] = {name: [] for name in ways}
    port = 0
    if bench.sglang:
        port = (await fetch(bench.prefill, "/server_info")).json()["disaggregation_bootstrap_port"]
    for _ in range(bench.tries * 5):
        for name, way in ways.items():
            ids, room = bench.fresh_ids(_SHORT_PROMPT), bench.random.getrandbits(62) + 1
            chosen = legs(ids, sglang=bench.sglang, model=bench.model, port=port, room=room)
            since = time.monotonic()
            found[name].append((await way(chosen) - since) * 1e3)
            await bench.settle(Row(name), time.monotonic())
    print(
        "\nfirst output, ms (median / max): " + "; ".join(f"{name} {times(values)}" for name, values in found.items())
    )


async def _first(url: str, request: Request) -> float:
    return await first_output(await Call.send(url, *request))


async def _by_hand(bench: Bench, chosen: Legs) -> float:
    prefill = await Call.send(bench.prefill, *chosen.prefill)
    if bench.sglang:
        at = await _first(bench.decode, chosen.decode(None))
        await prefill.answer()
        return at
    return await _first(bench.decode, chosen.decode((await prefill.answer()).json()["kv_transfer_params"]))


async def holds(bench: Bench) -> None:
    """Answers of one token, with which decode ends so soon that prefill may still be awaited."""
    row, before = Row("one token"), await bench.counters()
    for _ in range(bench.tries * 5):
        for case in bench.cases:
            if case.is_cancelled:
                since = time.monotonic()
                answer = await fetch(bench.gateway, case.path, case.longer(1, bench.fresh_ids(_SHORT_PROMPT)))
                row.answer_ms.append((time.monotonic() - since) * 1e3)
                row.endings[f"answered {answer.status}"] += 1
    await bench.settle(row, time.monotonic())
    bench.show(row)
    after = await bench.counters()
    held_s, number = (after.get(name, 0.0) - before.get(name, 0.0) for name in _HOLD)
    print(f"\n{number:.0f} of {len(row.answer_ms)} waited for prefill, {held_s * 1e3:.0f} ms in all\n")


async def kill(bench: Bench, part: str, pid: int, phase: str) -> None:
    """End one worker while requests run over it; the other one must be idle again, and the gateway."""
    row = Row(f"{part} killed, {phase}")
    chosen = [case for case in bench.cases if case.is_cancelled]
    prompt_tokens = _LONG_PROMPT if phase == "prefill" else 40
    calls = [
        (case, await Call.send(bench.gateway, case.path, case.longer(_LENGTH, bench.fresh_ids(prompt_tokens))))
        for case in chosen
    ]
    if phase == "prefill":
        await bench.busy(bench.prefill)
    else:
        for case, call in calls:
            if case.is_streamed:
                await call.wait_for(b"data: ", 2)
    since = time.monotonic()
    os.killpg(pid, signal.SIGKILL)

    async def told(case: Case, call: Call) -> None:
        answer = await call.answer()
        row.answer_ms.append((time.monotonic() - since) * 1e3)
        row.endings[f"{case.name}: {_short(case, answer)} after {row.answer_ms[-1]:.0f} ms"] += 1

    async with asyncio.TaskGroup() as group:
        for case, call in calls:
            group.create_task(told(case, call))
    survivor, spent = (bench.decode, row.decode_ms) if part == "prefill" else (bench.prefill, row.prefill_ms)
    spent.append(await bench.idle(survivor, since))
    if left := await state_of(bench.gateway):
        row.wrong.append(f"left: {left}")
    after = await fetch(bench.gateway, chosen[0].path, chosen[0].body)
    row.endings[f"next request: {_short(chosen[0], after)}"] += 1
    bench.show(row)


def _short(case: Case, answer: Answer) -> str:
    text = ending(answer, streamed=case.is_streamed)
    return f"{answer.status} {text}"


_PARTS: Final[dict[str, Callable[[Bench], Awaitable[None]]]] = {
    "answers": answers,
    "cancels": cancels,
    "mixed": mixed,
    "holds": holds,
    "first_tokens": first_tokens,
}


async def run(arguments: argparse.Namespace) -> int:
    """Run all parts that were asked for."""
    sglang = await is_sglang(arguments.decode)
    model = (await fetch(arguments.decode, "/v1/models")).json()["data"][0]["id"]
    bench = Bench(arguments, sglang=sglang, model=model)
    print(f"held before: {await held(bench.prefill, sglang=sglang)}; counted: {await bench.counters()}\n")
    print("| case | prefill idle after, ms (median / max) | decode idle | answered after | endings | wrong |")
    print("| --- | --- | --- | --- | --- | --- |")
    if arguments.kill:
        await kill(bench, arguments.kill, arguments.pid, arguments.phase)
        return 1 if bench.is_wrong else 0
    for name, part in _PARTS.items():
        if not arguments.only or name == arguments.only:
            await part(bench)
    print(f"\nheld after: {await held(bench.prefill, sglang=sglang)}; counted: {await bench.counters()}")
    return 1 if bench.is_wrong else 0


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_pairs", description=__doc__)
    parser.add_argument("gateway", help="URL of the gateway")
    parser.add_argument("prefill", help="URL of its only prefill worker")
    parser.add_argument("decode", help="URL of its only decode worker")
    parser.add_argument("--alone", default="", help="URL of one that serves alone")
    parser.add_argument("--tries", type=int, default=3, help="of each case (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and moments (default: 0)")
    parser.add_argument("--only", choices=tuple(_PARTS))
    parser.add_argument("--case", default="", help="only requests with this in their names")
    parser.add_argument("--kill", choices=("prefill", "decode"), help="only this: kill that worker")
    parser.add_argument("--pid", type=int, help="its process group")
    parser.add_argument("--phase", choices=("prefill", "running"), default="running", help="when (default: running)")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())

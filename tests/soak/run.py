"""One soak: processes, clients, trouble, and the reckoning."""

import asyncio
import contextlib
import json
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.procfs import rss_bytes
from tests.fakes.running import TIME_SCALE
from tests.soak import audit, pair_audit, pairs
from tests.soak.bodies import ASKS, GENERATING
from tests.soak.client import Client, Story
from tests.soak.plan import Asks, plan
from tests.soak.processes import Engine, Gateway
from tests.soak.saboteur import TROUBLE, Saboteur, Trouble

CLIENTS = 32
SETTLE_S = 30.0 * TIME_SCALE
# Who is refused since no worker is left waits before the next request, else one death would use up hundreds of them.
REFUSED_S = 0.25 * TIME_SCALE
# Probes keep connections, and one of each may be on its way.
IDLE_SOCKETS_PER_ENGINE = 3
_SAMPLES = 40
# What allocators keep back; 1 KiB left by each request would be more from so many requests on.
MAX_GROWTH_BYTES = 6 * 2**20
JUDGED_FROM = 15_000


@dataclass(frozen=True, slots=True)
class Scene:
    """What a soak is about.

    Attributes:
        engines: Names in ``tests.soak.processes.ENGINES``.
        asks: What the clients ask for.
        often: Routes that most of it is asked of.
        trouble: What goes wrong.
        options: Of the gateway.
    """

    engines: Collection[str]
    asks: Asks = field(default_factory=lambda: ASKS)
    often: Sequence[str] = GENERATING
    trouble: Trouble = TROUBLE
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Report:
    """What came out of a soak.

    Attributes:
        problems: What must not be, each with its history.
        duration_s: Of the load.
        outcomes: Requests by outcome, as the access log says.
        kinds: Answers by what the clients saw.
        acts: What was done to the engines.
        paired: Requests over pairs.
        pairs: Numbers of the requests over pairs; empty without any.
        rss: Resident bytes of the gateway by the number of requests that had ended, after that of the load's end.
    """

    problems: list[str] = field(default_factory=list)
    duration_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    acts: list[str] = field(default_factory=list)
    paired: int = 0
    pairs: str = ""
    rss: list[tuple[int, int]] = field(default_factory=list)

    @property
    def growth_bytes(self) -> int:
        """Growth from the second to the last quarter of the requests; large answers make peaks, so the least counts."""
        total = self.rss[-1][0]
        early = [size for ended, size in self.rss if total / 4 <= ended < total / 2]
        return min(size for ended, size in self.rss if ended >= total * 3 / 4) - min(early)

    def __str__(self) -> str:
        """A few lines for people."""
        sizes = ", ".join(f"{ended}: {size / 2**20:.1f}" for ended, size in self.rss[:: max(len(self.rss) // 10, 1)])
        return (
            f"{self.duration_s:.1f} s, outcomes {dict(self.outcomes)}, seen {dict(self.kinds)}, {len(self.acts)} acts;"
            f" {self.pairs or 'no pairs'};"
            f" RSS in MiB after requests {sizes}; {self.growth_bytes / 2**20:+.2f} MiB from quarter 2 to 4"
        )


async def soak(requests: int, seed: int, scene: Scene, directory: Path) -> Report:
    """Run a soak.

    Args:
        requests: How many.
        seed: Decides what they are.
        scene: What it is about.
        directory: For what the processes print.
    """
    async with _processes(scene, seed, directory) as (gateway, started):
        report = Report()
        # The first request to each worker makes what stays.
        sockets, files = gateway.sockets(), gateway.files()
        began = time.monotonic()
        stories = await _load(requests, seed, scene, gateway, started, report, directory)
        report.duration_s = time.monotonic() - began
        report.problems += await _left_over(gateway, sockets, files, IDLE_SOCKETS_PER_ENGINE * len(started))
        report.rss.append((len(stories), rss_bytes(gateway.pid)))
        metrics = await gateway.text("/metrics")
        halves = [engine for engine in started if engine.role != "regular"]
        report.problems += await pairs.left_over(halves)
        report.problems += await pairs.compare(stories, started) if halves else []
        gateway.send(signal.SIGTERM)
        if (code := await gateway.ended()) != 0:
            report.problems.append(f"the gateway ended with {code}")
        lines = [json.loads(line) for line in gateway.stdout.read_text().splitlines()]
        report.outcomes = Counter(str(line["outcome"]) for line in lines)
        report.kinds = Counter(story.kind.value if story.kind else "left" for story in stories)
        report.problems += audit.complaints(stories)
        report.problems += audit.audit_access(stories, lines)
        report.problems += audit.audit_metrics(metrics, lines)
        report.problems += audit.audit_texts(stories)
        if halves:
            logs = {engine.worker_id: [json.loads(log) for log in engine.logs] for engine in halves}
            report.problems += pair_audit.audit_pairs(lines, logs)
            report.problems += pair_audit.audit_handoffs(lines, logs, metrics)
            report.paired = sum(line.get("prefill_worker") is not None for line in lines)
            report.pairs = pair_audit.figures(lines, logs, metrics)
        report.problems += audit.audit_log(gateway.stderr.read_text())
        return report


@asynccontextmanager
async def _processes(scene: Scene, seed: int, directory: Path) -> AsyncIterator[tuple[Gateway, list[Engine]]]:
    started = [Engine(name, seed, directory) for name in scene.engines]
    gateway = Gateway(started, directory, scene.options)
    try:
        for engine in started:
            engine.start()
        for engine in started:
            await engine.serve()
        gateway.start()
        await gateway.ready()
        yield gateway, started
    finally:
        for child in (gateway, *started):
            child.kill()


async def _load(
    requests: int,
    seed: int,
    scene: Scene,
    gateway: Gateway,
    engines: Sequence[Engine],
    report: Report,
    directory: Path,
) -> list[Story]:
    """Let the clients do their requests while the saboteur does its work; returns when all have ended."""
    saboteur = Saboteur(engines, gateway, seed, scene.trouble)
    stories: list[Story] = []
    numbers = count()

    async def clients() -> None:
        client = Client(gateway.address)
        for number in numbers:
            if number >= requests:
                break
            stories.append(await client.carry_out(plan(seed, number, scene.asks, scene.often)))
            saboteur.request_ended()
            if stories[-1].status == 503:
                await asyncio.sleep(REFUSED_S)
            if len(stories) % max(requests // _SAMPLES, 1) == 0:
                report.rss.append((len(stories), rss_bytes(gateway.pid)))
        client.close()

    async with asyncio.TaskGroup() as group:
        sabotage = [group.create_task(saboteur.script_faults()), group.create_task(saboteur.disturb())]
        async with asyncio.TaskGroup() as load:
            for _ in range(CLIENTS):
                load.create_task(clients())
        for task in sabotage:
            task.cancel()
    await saboteur.make_peace()
    report.acts = saboteur.acts
    (directory / "acts.txt").write_text("\n".join(report.acts))
    return stories


async def _left_over(gateway: Gateway, sockets: int, files: int, idle: int) -> list[str]:
    """Wait until nothing is left of any request; what is left after that."""
    busy: dict[str, Any] = {}
    held = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_S):
            while True:
                busy = {name: value for name, value in (await gateway.get("/internal/state")).items() if value}
                held = gateway.sockets() - sockets
                if not busy and held <= idle:
                    break
                await asyncio.sleep(0.1)
    problems = [f"left in the counters: {busy}"] if busy else []
    if held > idle or gateway.files() - files > idle:
        problems.append(f"{held} sockets and {gateway.files() - files} files more than before")
    return problems

"""A rollout fleet under load whose trainer pauses, flushes and changes weights all the time, and the audit of it."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

from simulator.log import RequestEntry
from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.kv_fleet import ANY_PORT, Fleet
from tests.fakes.running import TIME_SCALE, RunningGateway, running_gateway, until
from tests.fakes.wire import Answer, call
from tests.soak.rl_clients import BLOCK, GROUPS, MAX_TOKENS, SGLANG, VLLM, Dialect, Sampler, Story

ENGINES = 3
SAMPLERS = 16
BETWEEN_S = 1.0
KINDS: dict[str, Dialect] = {"sglang": SGLANG, "vllm": VLLM}


@dataclass
class Report:
    """What came of it.

    Attributes:
        finishes: Answers by the reason of their end.
        hits: Answers to requests whose prompt was taken for cached.
        firsts: Requests that were the first with their prompt on an engine after a flush.
        held: Requests that were held back for what others computed.
        actions: What the trainer did.
        problems: What must not be.
    """

    finishes: Counter[str] = field(default_factory=Counter)
    hits: int = 0
    firsts: int = 0
    held: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class Trainer:
    """Does to the fleet what trainers do.

    Args:
        fleet: Engines and gateway.
        dialect: How the engines are asked.
        samplers: Told of the version that all workers have.
        rng: Draws what is done.
        report: Takes what is done, and what goes wrong.
    """

    def __init__(
        self, fleet: Fleet, dialect: Dialect, samplers: list[Sampler], rng: random.Random, report: Report
    ) -> None:
        self._fleet = fleet
        self._dialect = dialect
        self._samplers = samplers
        self._rng = rng
        self._report = report
        self._version = 0
        self._flushed: dict[SimulatedEngine, tuple[int, set[bytes]]] = {}
        self.aborting: list[tuple[float, float]] = []
        self.firsts: set[str] = set()
        self.is_over = False
        native = [self._update, self._retract]
        self._actions: list[Callable[[], Awaitable[None]]] = [
            self._step, self._keep, self._flush, self._past, *(native if dialect is SGLANG else []),
        ]  # fmt: skip

    async def run(self) -> None:
        """One thing after the other, a second each; begins and ends with a whole step."""
        await self._step()
        while not self.is_over:
            action = self._rng.choice(self._actions)
            self._report.actions[action.__name__.strip("_")] += 1
            await action()
            await asyncio.sleep(BETWEEN_S * TIME_SCALE * self._rng.uniform(0.5, 1.0))
        await self._step()
        self._collect_firsts()

    async def _step(self) -> None:
        """The usual: stop everything, new weights, an empty cache, go on."""
        self._collect_firsts()
        began = asyncio.get_running_loop().time()
        await self._all("/pause_generation", {"mode": "abort"})
        self.aborting.append((began, asyncio.get_running_loop().time()))
        gateway, engines = self._fleet.gateway, self._fleet.engines
        # A request that came to an engine that somebody else had paused may be kept there until it goes on.
        await until(lambda: not any(one.running or one.waiting for one in engines), "the partial answers")
        # Nothing runs and nothing comes, so that the flush works, and what follows it is new.
        await self._all("/flush_cache", {})
        await self._fleet.settled()
        for engine in engines:
            worker = engine.url.removeprefix("http://")
            if blocks := gateway.gateway.kv.blocks(worker, 0):
                self._report.problems.append(f"{blocks} blocks of {worker} are known after its flush")
            kept = {self._prompt(entry) for entry in engine.log.requests if entry.ended is None}
            self._flushed[engine] = engine.log.requests[-1].number, kept
        await self._new_version("/update_weight_version")
        await self._all("/continue_generation", {})

    async def _update(self) -> None:
        """New weights in the middle of everything."""
        began = asyncio.get_running_loop().time()
        await self._new_version("/update_weights_from_disk")
        self.aborting.append((began, asyncio.get_running_loop().time()))

    async def _keep(self) -> None:
        await self._paused("in_place")

    async def _retract(self) -> None:
        await self._paused("retract")

    async def _paused(self, mode: str) -> None:
        await self._all("/pause_generation", {"mode": mode})
        await asyncio.sleep(self._rng.uniform(0.0, 0.3) * TIME_SCALE)
        await self._new_version("/update_weight_version")
        await self._all("/continue_generation", {})

    async def _flush(self) -> None:
        """Engines that are busy refuse it."""
        answer = await call(self._fleet.gateway.address, "/flush_cache", {})
        if answer.status not in (200, 207):
            self._report.problems.append(f"/flush_cache: {answer.status} {answer.body!r}")

    async def _past(self) -> None:
        """One engine is paused and updated by somebody else; the gateway finds out."""
        engine = self._rng.choice(self._fleet.engines)
        is_vllm = self._dialect is VLLM
        self._version += 1
        for path in (
            "/pause?mode=keep" if is_vllm else "/pause_generation",
            "/update_weight_version",
            "/resume" if is_vllm else "/continue_generation",
        ):
            body = {"mode": "in_place", "new_version": str(self._version), "abort_all_requests": False}
            answer = await call(("127.0.0.1", engine.port), path, body)
            assert answer.status == 200, (path, answer)
            await asyncio.sleep(0.15 * TIME_SCALE)

    async def _new_version(self, path: str) -> None:
        self._version += 1
        version = str(self._version)
        body: dict[str, Any] = {"new_version": version, "abort_all_requests": False}
        if path != "/update_weight_version":
            body = {"model_path": "x", "weight_version": version, "abort_all_requests": True}
        await self._all(path, body)
        for sampler in self._samplers:
            sampler.committed = self._version

    async def _all(self, path: str, body: Any) -> Answer:
        answer = await call(self._fleet.gateway.address, path, body)
        if answer.status != 200:
            self._report.problems.append(f"{path}: {answer.status} {answer.body!r}")
        return answer

    def _collect_firsts(self) -> None:
        """Note the requests that were the first with their prompt on an engine since it was flushed."""
        for engine, (mark, seen) in self._flushed.items():
            for entry in engine.log.requests:
                if entry.number > mark and entry.path == self._dialect.path:
                    prompt = self._prompt(entry)
                    if prompt not in seen:
                        seen.add(prompt)
                        self.firsts.add(
                            entry.rids[0] if self._dialect is SGLANG else entry.header("x-request-id") or ""
                        )
        self._flushed.clear()

    def _prompt(self, entry: RequestEntry) -> bytes:
        """What tells a request's group; empty for other requests."""
        return (entry.body or b"").partition(b'"%b": [' % self._dialect.prompt.encode())[2].split(b",")[0]


def check(stories: Iterator[Story], trainer: Trainer, texts: dict[int, str], ids: dict[str, str]) -> Iterator[str]:
    """What is wrong with the answers.

    Args:
        stories: All requests.
        trainer: What was done to them.
        texts: By group, what its prompt is answered with at most.
        ids: Engine ids by public id.
    """
    for story in stories:
        if problem := story.complaint or _problem(story, trainer, texts, ids):
            yield f"{problem}: {story}"


def _problem(story: Story, trainer: Trainer, texts: dict[int, str], ids: dict[str, str]) -> str:
    sampled = story.sampled
    if story.status != 200 or sampled is None:
        return "it was not answered"
    # The last token may end within a character.
    if not texts[story.group].startswith(sampled.text.rstrip("\ufffd")):
        return "the text is another one's"
    if sampled.finish == "abort":
        if not any(began <= story.ended and story.began <= ended for began, ended in trainer.aborting):
            return "nobody aborted it"
    elif (sampled.finish, sampled.tokens) != ("length", story.wanted):
        return "it is not whole"
    if story.minimum is not None and story.version < story.minimum:
        return "its weights are older than was asked for"
    if sampled.version is not None and sampled.version < story.version:
        return "the header tells newer weights than the engine"
    if ids.get(story.rid) in trainer.firsts and story.overlap:
        return "a hit on blocks that are gone"
    return ""


async def soak(kind: Literal["sglang", "vllm"], seconds: float, seed: int) -> Report:
    """Sample for so long.

    Args:
        kind: Of all engines.
        seconds: Of load; a step of the trainer follows.
        seed: Of everything that is drawn here.
    """
    rng, report, dialect = random.Random(seed), Report(), KINDS[kind]
    async with AsyncExitStack() as stack:
        engines = []
        for _ in range(ENGINES + 1):
            engine = SimulatedEngine(
                EngineOptions(
                    engine=kind, model="model", page_size=BLOCK, kv_events=ANY_PORT, replay=ANY_PORT,
                    inter_token_ms=8.0, weight_version="0", dev_mode=True,
                )
            )  # fmt: skip
            await engine.start()
            stack.push_async_callback(engine.stop)
            engines.append(engine)
        alone = engines.pop()
        texts = await _texts(alone, dialect)
        gateway = await stack.enter_async_context(
            running_gateway(*(one.url for one in engines), seed=seed, kv_profile="tuned", kv_coalesce_tokens=BLOCK)
        )
        samplers = [Sampler(f"s{n}", gateway.address, dialect, random.Random(rng.random())) for n in range(SAMPLERS)]
        trainer = Trainer(Fleet(engines, gateway), dialect, samplers, rng, report)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(sampler.run()) for sampler in samplers]
            training = group.create_task(trainer.run())
            await asyncio.sleep(seconds)
            trainer.is_over = True
            await training
            for sampler in samplers:
                sampler.is_over = True
            await asyncio.wait(tasks)
        await gateway.settle()
        report.held = gateway.gateway.services.coalescer.held_total
        await until(lambda: not any(one.running or one.waiting or one.held for one in engines), "idle engines")
        _audit(report, trainer, samplers, gateway, texts)
    return report


async def _texts(alone: SimulatedEngine, dialect: Dialect) -> dict[int, str]:
    texts = {}
    for group in range(GROUPS):
        body = dialect.body(group, MAX_TOKENS, stream=False)
        texts[group] = dialect.read(await call(("127.0.0.1", alone.port), dialect.path, body)).text
    return texts


def _audit(
    report: Report, trainer: Trainer, samplers: list[Sampler], gateway: RunningGateway, texts: dict[int, str]
) -> None:
    stories = [story for sampler in samplers for story in sampler.stories]
    ids = {record.request_id or "": record.engine_ids[-1] for record in gateway.records if record.engine_ids}
    report.problems += check(iter(stories), trainer, texts, ids)
    if (records := Counter(record.request_id for record in gateway.records)) != Counter(one.rid for one in stories):
        report.problems.append(f"{len(stories)} requests, and records of {records.total()}")
    report.finishes.update(story.sampled.finish for story in stories if story.sampled is not None)
    report.hits = sum(story.overlap > 0 for story in stories)
    report.firsts = sum(ids.get(story.rid) in trainer.firsts for story in stories)

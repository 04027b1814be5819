"""What is asked of the engines of a soak over pairs when it is over: nothing is left, and alone they say the same."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from tests.fakes.running import TIME_SCALE
from tests.fakes.wire import call
from tests.soak.answers import read_alone
from tests.soak.bodies import VLLM_MODEL
from tests.soak.client import Story
from tests.soak.processes import LEASE_S, Engine

# What nobody fetches is gone by then, and whoever waits for another half has given up.
_GONE_S = LEASE_S + 10.0 * TIME_SCALE
_ASKING = 8


async def left_over(engines: Sequence[Engine]) -> list[str]:
    """Wait until no engine has anything of a request; what some have after that. Their logs are kept then."""
    problems = []
    for engine in engines:
        busy = {}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GONE_S):
                while busy := await engine.left_over():  # noqa: ASYNC110 -- another process
                    await asyncio.sleep(0.1)
        if busy:
            problems.append(f"left at {engine.name}: {busy}")
        await engine.keep_log()
    return problems


async def compare(stories: Sequence[Story], engines: Sequence[Engine]) -> list[str]:
    """What the clients were told is what one engine alone says to the same request."""
    problems: list[str] = []
    by_key = {story.plan.key: story for story in stories if story.texts}
    left = iter(by_key.values())
    alone = {engine.model: engine for engine in engines if engine.role == "regular"}
    # Not told of any prefill, it computes the prompt itself.
    alone[VLLM_MODEL] = next(one for one in engines if one.model == VLLM_MODEL and one.role == "decode")

    async def ask(left: Iterator[Story]) -> None:
        for story in left:
            plan = story.plan
            engine = alone[plan.ask.body["model"]]
            if engine.model == VLLM_MODEL and plan.route.path == "/generate":
                continue  # it has no such route; equal requests were compared with each other
            answer = await call(("127.0.0.1", engine.port), plan.route.path, plan.ask.body, patience_s=_GONE_S)
            told = read_alone(plan, answer)
            if told.texts != story.texts or (story.prompts and told.prompts != story.prompts):
                problems.append(f"alone {engine.name} says {told.texts} {told.prompts}\n  {story.prompts} {story}")

    async with asyncio.TaskGroup() as group:
        for _ in range(_ASKING):
            group.create_task(ask(left))
    return problems

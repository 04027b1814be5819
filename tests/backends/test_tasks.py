"""Owned tasks: counted, named, seen when they fail, and gone after ``aclose``."""

import asyncio
import logging

import pytest

from backends.tasks import OwnedTasks
from tests.fakes.running import PATIENCE_S, until


async def test_tasks_are_counted_and_named() -> None:
    tasks = OwnedTasks("abort")
    may_end = asyncio.Event()

    async def work() -> None:
        await may_end.wait()

    task = tasks.spawn(work(), "r1")
    assert (len(tasks), task.get_name()) == (1, "abort:r1")
    may_end.set()
    await until(lambda: len(tasks) == 0, "the task is forgotten")


async def test_failures_are_logged_with_their_name(caplog: pytest.LogCaptureFixture) -> None:
    tasks = OwnedTasks("abort")

    async def fail() -> None:
        raise ValueError("no")

    with caplog.at_level(logging.ERROR, "forebay.tasks"):
        tasks.spawn(fail(), "r1")
        await until(lambda: bool(caplog.records), "the failure is logged")
    assert "abort:r1" in caplog.text
    assert "ValueError: no" in caplog.text
    await tasks.aclose()


async def test_aclose_gives_grace_then_cancels(caplog: pytest.LogCaptureFixture) -> None:
    tasks = OwnedTasks("x")
    ended: list[str] = []

    async def quick() -> None:
        await asyncio.sleep(0)
        ended.append("quick")

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("endless")

    tasks.spawn(quick(), "q")
    tasks.spawn(endless(), "e")
    async with asyncio.timeout(PATIENCE_S):
        await tasks.aclose(0.02)
    assert ended == ["quick", "endless"]
    assert len(tasks) == 0
    assert not caplog.records


async def test_aclose_ends_tasks_that_resist_once_and_those_that_come_meanwhile() -> None:
    tasks = OwnedTasks("x")
    ended: list[str] = []

    async def late() -> None:
        ended.append("late")

    async def resisting() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            tasks.spawn(late(), "late")
            await asyncio.sleep(0.01)
            ended.append("resisting")

    tasks.spawn(resisting(), "r")
    await asyncio.sleep(0)
    async with asyncio.timeout(PATIENCE_S):
        await tasks.aclose()
    assert sorted(ended) == ["late", "resisting"]
    assert len(tasks) == 0


async def test_aclose_of_nothing() -> None:
    await OwnedTasks("x").aclose(grace_s=1.0)

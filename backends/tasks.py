"""Ownership of background tasks: the one place that starts any.

A task that nobody holds can be collected in mid-flight, and one that nobody awaits loses its exception. Every task
here has an owner, a name, and an end that somebody sees.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger("forebay.tasks")


class OwnedTasks:
    """A set of tasks with one owner, which must call ``aclose`` before it goes.

    Attributes:
        name: Prefix of the tasks' names, for diagnostics.
    """

    __slots__ = ("_tasks", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Number of tasks that have not ended."""
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[Any, Any, None], label: str) -> asyncio.Task[None]:
        """Start ``coroutine`` under this owner; an exception that it leaks is logged with the task's name."""
        task = asyncio.get_running_loop().create_task(coroutine, name=f"{self.name}:{label}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("task %s failed", task.get_name(), exc_info=error)

    async def aclose(self, grace_s: float = 0.0) -> None:
        """Let tasks end by themselves for ``grace_s``, cancel what is left, and wait until all of it has ended."""
        if self._tasks and grace_s > 0:
            await asyncio.wait(list(self._tasks), timeout=grace_s)
        while self._tasks:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.wait(list(self._tasks))

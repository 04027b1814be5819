"""Service loops: started by name, restarted when they fail for expected reasons, fatal when not."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from backends.errors import BackendError
from backends.tasks import OwnedTasks

__all__ = ["OwnedTasks", "supervise"]

logger = logging.getLogger("forebay.tasks")

RESTART_DELAYS_S = (0.1, 0.5, 2.0, 5.0)


async def supervise(name: str, loop_once: Callable[[], Awaitable[None]], on_fatal: Callable[[str], None]) -> None:
    """Run a service loop until it is cancelled.

    Args:
        name: For the log.
        loop_once: The loop; it may end only by an exception. ``BackendError`` and ``OSError`` restart it.
        on_fatal: Told when it ends in any other way; the gateway must not go on without it.
    """
    failures = 0
    while True:
        try:
            await loop_once()
        except (BackendError, OSError) as exc:
            delay_s = RESTART_DELAYS_S[min(failures, len(RESTART_DELAYS_S) - 1)]
            failures += 1
            logger.warning("%s failed and starts again in %.1f s: %s", name, delay_s, exc)
            await asyncio.sleep(delay_s)
        except Exception:
            logger.exception("%s failed for a reason that nobody expected", name)
            on_fatal(name)
            return
        else:
            logger.error("%s ended by itself", name)
            on_fatal(name)
            return

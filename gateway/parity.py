"""Checks that engines announce the blocks that were hashed here for the same prompts.

A wrong tokenizer, template, block size or seed shows in nothing else than in hits that never come.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from gateway.kv_view import KvView
from kv_events.types import Namespace
from routers.types import RankKey

logger = logging.getLogger("forebay.kv_events")

# An engine announces a prompt's blocks with the step that computed them.
CHECK_AFTER_S = 2.0
# So many prompts in a row of which nothing was announced are no accident of eviction.
MISMATCHES_IN_A_ROW = 3
MAX_PENDING_PER_WORKER = 4
# The first block alone may have been there, or have been given up, for other reasons.
MIN_BLOCKS = 2


class Parity:
    """Compares prompts of each worker with its events, until the first that agrees, or until that says nothing.

    Args:
        kv: The view of the caches.
        on_mismatch: Told of each prompt of which an engine has announced nothing.
        check_after_s: From a prompt's end to the comparison.
    """

    def __init__(self, kv: KvView, on_mismatch: Callable[[str], None], *, check_after_s: float = CHECK_AFTER_S) -> None:
        self._kv = kv
        self._on_mismatch = on_mismatch
        self._check_after_s = check_after_s
        self._agreed: set[str] = set()
        self._in_a_row: dict[str, int] = {}
        self._timers: dict[str, set[asyncio.TimerHandle]] = {}

    @property
    def has_doubts(self) -> bool:
        """Some worker's last prompts were not announced, be it for good reasons."""
        return bool(self._in_a_row)

    def has_agreed(self, worker_id: str) -> bool:
        """Nothing more is to be found out about this worker."""
        return worker_id in self._agreed

    def is_mismatched(self, worker_id: str) -> bool:
        """What this worker announces is not what is hashed here: overlaps say nothing of it."""
        return self._in_a_row.get(worker_id, 0) >= MISMATCHES_IN_A_ROW

    def finished(self, key: RankKey, hashes: Sequence[int], namespace: Namespace) -> None:
        """A request with a prompt of these blocks has been answered by that rank."""
        worker_id = key.worker_id
        if self.has_agreed(worker_id) or len(hashes) < MIN_BLOCKS or not self._kv.is_trusted(key):
            return
        timers = self._timers.setdefault(worker_id, set())
        if len(timers) >= MAX_PENDING_PER_WORKER or self.is_mismatched(worker_id):
            return

        def check() -> None:
            timers.discard(timer)
            if clears == self._kv.clears[worker_id]:  # else the cache that was filled is gone
                self._check(key, hashes, namespace, epoch)

        epoch, clears = self._kv.position(*key)[0], self._kv.clears[worker_id]
        timer = asyncio.get_running_loop().call_later(self._check_after_s, check)
        timers.add(timer)

    def _check(self, key: RankKey, hashes: Sequence[int], namespace: Namespace, epoch: str | None) -> None:
        worker_id = key.worker_id
        if epoch != self._kv.position(*key)[0] or not self._kv.is_trusted(key) or not self._kv.blocks(*key):
            return  # the cache is another one, or none: nothing can be said
        if self._kv.index.overlap(hashes, namespace).device.get(key, 0):
            self._agreed.add(worker_id)
            self._in_a_row.pop(worker_id, None)
            return
        self._on_mismatch(worker_id)
        self._in_a_row[worker_id] = self._in_a_row.get(worker_id, 0) + 1
        if self.is_mismatched(worker_id):
            logger.error(
                "worker %s announces other blocks than were hashed here for the last %d prompts: its KV events are not "
                "used until it restarts. Check the tokenizer, the chat template and the page size",
                worker_id,
                MISMATCHES_IN_A_ROW,
            )

    def lost_track(self, worker_id: str) -> None:
        """What is known of the worker's cache was given up, which may still hold it, and would not announce it again.

        So nothing can be said of prompts that are not announced, until it restarts.
        """
        if not self.is_mismatched(worker_id):
            self.forget(worker_id)
            self._agreed.add(worker_id)

    def forget(self, worker_id: str) -> None:
        """The worker is gone, or another process: begin anew."""
        self._agreed.discard(worker_id)
        self._in_a_row.pop(worker_id, None)
        for timer in self._timers.pop(worker_id, ()):
            timer.cancel()

    def close(self) -> None:
        """End all checks that are due."""
        for worker_id in list(self._timers):
            self.forget(worker_id)

"""Tells a quiet source of KV events, which is normal, from one that is missing. Pure.

A source that never says anything looks like an engine that caches nothing. What gives it away are answers to prompts
that were not cached: each of them has filled blocks, and should have been announced.
"""

from dataclasses import dataclass
from typing import Final

from routers.types import RankKey

SILENCE_S: Final = 30.0
# One answer alone may have been a prompt that was cached after all.
MIN_ANSWERS: Final = 3

# Epoch and last number of a source, as ``KvView.position`` has it.
Position = tuple[str | None, int | None]


@dataclass(slots=True)
class _Quiet:
    position: Position
    since: float
    answers: int = 0
    is_told: bool = False


class SilenceWatch:
    """Counts, by rank, the answers that should have been followed by events.

    Args:
        after_s: Silence of which is told.
    """

    def __init__(self, after_s: float = SILENCE_S) -> None:
        self._after_s = after_s
        self._quiet: dict[RankKey, _Quiet] = {}

    def answered(self, key: RankKey, position: Position, now: float) -> int:
        """Note that a rank has answered a prompt that it had not cached.

        Returns:
            Answers without an event, once it is time to tell of them; 0 otherwise.
        """
        quiet = self._quiet.get(key)
        if quiet is None or quiet.position != position:
            quiet = self._quiet[key] = _Quiet(position, now)
        quiet.answers += 1
        if quiet.is_told or quiet.answers < MIN_ANSWERS or now - quiet.since < self._after_s:
            return 0
        quiet.is_told = True
        return quiet.answers

    def forget(self, worker_id: str) -> None:
        """The worker is gone."""
        for key in [key for key in self._quiet if key.worker_id == worker_id]:
            del self._quiet[key]

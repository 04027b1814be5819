"""How far a rank has come with the prefill that is booked there, by the pace of what it has prefilled before. Pure."""

from collections.abc import Callable, Hashable
from typing import Final

# What earlier prefills weigh against the newest: the last ten or so make the pace.
KEPT: Final = 0.9


class PrefillPace:
    """Estimates what is done of the oldest prefill, since engines tell of none before its first token.

    An engine computes prompts in the order in which they came, so that the one whose turn it is has been computed
    since it was sent, or since the one before it ended. One prompt of 100,000 tokens otherwise counts in full until
    its last second, which is long.

    Args:
        clock: Monotonic seconds.
    """

    __slots__ = ("_clock", "_ended_at", "_live", "_seconds", "_tokens")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._live: dict[Hashable, tuple[float, int]] = {}
        self._ended_at = float("-inf")
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens that the rank has lately computed per second of prefill; 0 while nothing is known."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    def begin(self, booking: Hashable, tokens: int) -> None:
        """So many tokens are to be computed for a booking; behind those of earlier ones."""
        self._live[booking] = (self._clock(), tokens)

    def end(self, booking: Hashable, *, is_computed: bool) -> None:
        """A prefill is over; nothing happens if it has ended before.

        Args:
            booking: As it was begun.
            is_computed: Its first token has come; otherwise it was given up, and tells nothing of the pace.
        """
        begun = self._live.pop(booking, None)
        if begun is not None and is_computed:
            sent_at, tokens = begun
            now = self._clock()
            self._tokens = self._tokens * KEPT + tokens
            self._seconds = self._seconds * KEPT + now - max(sent_at, self._ended_at)
            self._ended_at = now

    def done_tokens(self) -> int:
        """Tokens of the oldest prefill that should be computed by now, at most all."""
        if not self._live:
            return 0
        sent_at, tokens = next(iter(self._live.values()))
        return min(tokens, int(self.tokens_per_s * (self._clock() - max(sent_at, self._ended_at))))

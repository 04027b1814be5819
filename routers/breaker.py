"""Circuit breaker of one worker: opens after failures in a row, lets one request through after a while. Pure."""

import enum


class BreakerState(enum.StrEnum):
    """Whether requests may go to the worker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Counts a worker's failures; what a client did wrong never counts.

    Args:
        threshold: Failures in a row that open it, ``>= 1``.
        open_s: Time after which one request is let through as a trial.
    """

    __slots__ = ("_failures", "_open_s", "_opened_at", "_state", "_threshold", "_trial_at")

    def __init__(self, *, threshold: int = 5, open_s: float = 5.0) -> None:
        self._threshold = threshold
        self._open_s = open_s
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._opened_at = 0.0
        self._trial_at: float | None = None

    @property
    def state(self) -> BreakerState:
        """The state as of the last event."""
        return self._state

    def allows(self, now: float) -> bool:
        """Whether a request may be sent now; does not take the trial's place, see ``sent``."""
        if self._state is BreakerState.CLOSED:
            return True
        if self._state is BreakerState.OPEN:
            return now - self._opened_at >= self._open_s
        # A trial whose end nobody reported does not keep the breaker half open for ever.
        return self._trial_at is None or now - self._trial_at >= self._open_s

    def sent(self, now: float) -> None:
        """A request goes out; while not closed it is the trial."""
        if self._state is not BreakerState.CLOSED:
            self._state = BreakerState.HALF_OPEN
            self._trial_at = now

    def succeeded(self) -> None:
        """The worker answered, if only with a 4xx."""
        self._state = BreakerState.CLOSED
        self._failures = 0
        self._trial_at = None

    def answering(self) -> None:
        """The trial has begun to answer: that lets other requests through, but one more failure opens it again."""
        if self._state is BreakerState.HALF_OPEN:
            self._state = BreakerState.CLOSED
            self._failures = self._threshold - 1
            self._trial_at = None

    def failed(self, now: float) -> None:
        """The worker failed: a reset, a time-out, a 5xx."""
        self._failures += 1
        self._trial_at = None
        if self._state is BreakerState.HALF_OPEN or self._failures >= self._threshold:
            self._state = BreakerState.OPEN
            self._opened_at = now

    def released(self) -> None:
        """A request ended in a way that says nothing of the worker: its client left."""
        self._trial_at = None

    def reset(self) -> None:
        """The worker has been found to be well by other means."""
        self.succeeded()

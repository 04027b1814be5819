"""How a request ended, as metrics and the access log say it. Pure."""

import enum

from backends.quick_enum import quick


@quick
class Outcome(enum.StrEnum):
    """Every request ends with exactly one of these."""

    COMPLETE = "complete"
    """The engine's own terminal was passed on, whatever its finish reason."""
    ENGINE_ERROR = "engine_error"
    """Retries are exhausted, or a 5xx, an error event, or an abort finish with a status of 500 or above."""
    TRUNCATED = "truncated"
    """The engine's answer ended without a terminal, or passed the cap after bytes had been sent."""
    ABORTED = "aborted"
    """Stopped on request: an abort finish without a status, or ``[DONE]`` alone after our own abort."""
    CLIENT_CLOSED = "client_closed"
    """The client left first, half-closes included; the access log's status is 499."""
    REJECTED = "rejected"
    """A 4xx of the gateway or of the engine, other than 429."""
    TIMEOUT = "timeout"
    """A deadline passed, of any kind."""
    OVERLOADED = "overloaded"
    """429, no worker is ready, or the queue is full."""
    SHUTDOWN = "shutdown"
    """The gateway is stopping: not admitted while draining, or cut at the drain's deadline."""
    PREFILL_FAILED = "prefill_failed"
    """The prefill leg of a disaggregated pair failed, so decode could not go on."""

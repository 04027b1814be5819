"""The legs of a request that was taken apart into its samples: read side by side, and told when one of them fails."""

import asyncio
from collections.abc import Callable

from backends.errors import AnswerMalformed, AnswerTooLarge, BackendError, CallEnded
from backends.leg_events import Cause
from backends.upstream.base import AnswerHead
from gateway.errors import GatewayError
from gateway.placement import Placed
from gateway.unary import read_whole, refusal_of

JSON = "application/json"


class _Reading:
    """Reads the answers of all legs of one request.

    Attributes:
        heads: Their heads, in the order in which they were complete.
        answers: Their bodies with public ids, by leg.
        failures: Why legs failed, the first first.
    """

    def __init__(self, placed: Placed, limit_bytes: int, clock: Callable[[], float]) -> None:
        self._placed = placed
        self._limit_bytes = self._left_bytes = limit_bytes
        self._clock = clock
        self.heads: list[AnswerHead] = []
        self.answers = [b""] * len(placed.legs)
        self.failures: list[BackendError | GatewayError] = []

    async def read(self, number: int) -> None:
        """Read the answer of one leg; when that fails, cancel the others, each in the way of its policy."""
        try:
            self.answers[number] = await self._body(number)
        except (BackendError, GatewayError) as exc:
            self.failures.append(exc)
            for other in self._placed.legs:
                if other is not self._placed.legs[number]:
                    other.cancel(Cause.SIBLING_FAILED, is_paused=self._placed.member.is_paused)

    async def _body(self, number: int) -> bytes:
        leg, ids = self._placed.legs[number], self._placed.ids_of_legs[number]
        head = await leg.call.head()
        self._placed.member.last_byte_at = self._clock()
        if not 200 <= head.status < 300:
            raise await refusal_of(leg.call, ids, head, self._limit_bytes)
        if head.content_type != JSON:
            raise AnswerMalformed(f"content type {head.content_type!r} with status {head.status}")
        body = await read_whole(leg.call, head, self._left_bytes)
        self._left_bytes -= len(body)
        if self._left_bytes < 0:
            raise AnswerTooLarge(self._limit_bytes)
        leg.first_token()
        self.heads.append(head)
        return ids.apply(body)


async def read_samples(placed: Placed, limit_bytes: int, clock: Callable[[], float]) -> tuple[AnswerHead, list[bytes]]:
    """Read the answers of all legs at once; they have one bound in all.

    Returns:
        A head, and the answers in the order of the legs, with public ids.

    Raises:
        UpstreamError: The first failure, whichever leg had it; what the others end with then is of no interest.
        GatewayError: The same.
        CallEnded: This side stopped the legs.
    """
    reading = _Reading(placed, limit_bytes, clock)
    async with asyncio.TaskGroup() as group:
        for number in range(len(placed.legs)):
            group.create_task(reading.read(number), name=f"sample {number}")
    if reading.failures:
        raise next((exc for exc in reading.failures if not isinstance(exc, CallEnded)), reading.failures[0])
    return reading.heads[0], reading.answers

"""A gateway in front of an engine that answers as it was captured, and what its clients then get."""

from dataclasses import dataclass

from tests.fakes.replay_engine import CapturedAnswer, Cut, ReplayEngine
from tests.fakes.running import RunningGateway
from tests.fakes.wire import Answer, wire
from tests.simulator.wire import Capture


@dataclass(frozen=True, slots=True)
class Differs:
    """An answer that is not the engine's.

    Attributes:
        status: Status that the client gets.
        type: The error's type, ``None`` where the engine's words pass under another status.
        rule: Why.
        is_sent: The engine saw the request.
    """

    status: int
    type: str | None
    rule: str
    is_sent: bool = False


@dataclass
class Setup:
    """A gateway in front of a replaying engine.

    Attributes:
        engine: What answers.
        gateway: What is tested.
        outcome: How the last request ended, by its access record.
    """

    engine: ReplayEngine
    gateway: RunningGateway
    outcome: str = ""

    async def replay(
        self, capture: Capture, answer: CapturedAnswer | None, cut: Cut, body: bytes | None = None
    ) -> Answer:
        """Send the captured request, with another ``body`` if given, the engine answering ``answer``."""
        self.engine.answer = answer
        self.engine.cut = cut
        self.engine.bodies.clear()
        self.engine.heads.clear()
        request = capture.request
        if body is not None:
            head = request.partition(b"\r\n\r\n")[0].split(b"\r\n")
            lines = [line for line in head if not line.lower().startswith(b"content-length")]
            request = b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body])
        async with wire(self.gateway.address) as connection:
            await connection.send(request)
            got = await connection.answer()
        await self.gateway.settle()
        assert len(self.gateway.records) == 1, "one request, one record"
        self.outcome = str(self.gateway.records.pop().outcome)
        return got

"""Clients: each carries out plans one after another, over one connection while that lasts."""

import asyncio
import time
from dataclasses import dataclass, field

from tests.fakes.running import TIME_SCALE
from tests.fakes.wire import Answer, Wire, call
from tests.soak.answers import Kind, read_answer
from tests.soak.patience import patience
from tests.soak.plan import Leave, Manner, Plan

# From the first byte of a request to the last of its answer; an engine that hangs is killed much sooner.
LIMIT_S = 30.0 * TIME_SCALE
_DELAY_S = 0.05
# What the last events of generated sequences hold.
_ENDS = (b'"finish_reason":"', b'"finish_reason":{', b'"message_delta"', b'"response.output_text.done"')


@dataclass(slots=True)
class Story:
    """What happened to one request, as its client saw it.

    Attributes:
        plan: What was to be done.
        history: Lines, each with the seconds since the request began.
        status: Status of the answer, 0 if none came.
        kind: How the answer ended; ``None`` for a client that left.
        texts: Generated texts that can be compared.
        prompts: What was told of the prompts, likewise.
        has_left: The client went as planned.
        complaints: What must not be.
    """

    plan: Plan
    history: list[str] = field(default_factory=list)
    status: int = 0
    kind: Kind | None = None
    texts: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    has_left: bool = False
    complaints: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    def note(self, text: str) -> None:
        """Add a line to the history."""
        self.history.append(f"{time.monotonic() - self._began:8.3f} {text}")

    def __str__(self) -> str:
        """The whole story."""
        return "\n    ".join([str(self.plan), *self.history, *(f"COMPLAINT: {one}" for one in self.complaints)])


class _Left(Exception):
    """The client is gone, as planned."""


class Client:
    """One client at a time.

    Args:
        address: The gateway's.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._wire: Wire | None = None

    async def carry_out(self, plan: Plan) -> Story:
        """Do what the plan says; never raises for what the gateway does."""
        story = Story(plan)
        try:
            async with patience(LIMIT_S):
                await self._carry_out(story)
        except _Left:
            story.has_left = True
        except TimeoutError:
            story.complaints.append("no end of it within the limit")
            self.close()
        except (OSError, EOFError, ValueError) as exc:
            story.complaints.append(f"the connection ended without an answer: {exc!r}")
            self.close()
        return story

    def close(self) -> None:
        """Let go of the connection."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    async def _carry_out(self, story: Story) -> None:
        plan = story.plan
        if self._wire is None:
            self._wire = Wire(*await asyncio.open_connection(*self._address), patience_s=None)
            story.note("connected")
        wire = self._wire
        await self._send(story, wire)
        if plan.leave is Leave.BEFORE_ANSWER:
            await asyncio.sleep(plan.share * _DELAY_S)
            await self._leave(story, wire)
        if plan.aborts is not None and not plan.is_stream:
            await asyncio.sleep(plan.share * _DELAY_S)
            await self._abort(story)
        answer = await self._answer(story, wire)
        reading = read_answer(plan, answer)
        story.kind, story.texts, story.prompts = reading.kind, reading.texts, reading.prompts
        story.complaints += reading.complaints
        story.note(f"{reading.kind.value}, {len(answer.body)} bytes")
        if not answer.is_whole or answer.headers.get("connection") == "close":
            self.close()

    async def _send(self, story: Story, wire: Wire) -> None:
        plan = story.plan
        if plan.leave is Leave.IN_HEAD:
            await wire.send(plan.raw[: int(plan.share * (plan.head_bytes - 1))])
            await self._leave(story, wire)
        if plan.leave is Leave.IN_BODY:
            body_bytes = len(plan.raw) - plan.head_bytes
            await wire.send(plan.raw[: plan.head_bytes + int(plan.share * body_bytes)])
            # One that goes at once would not be seen to have begun.
            await asyncio.sleep(plan.share * _DELAY_S)
            await self._leave(story, wire)
        await wire.send(plan.raw)
        story.note("sent")

    async def _answer(self, story: Story, wire: Wire) -> Answer:
        plan = story.plan
        story.status, headers = await wire.head()
        story.note(f"{story.status} from {headers.get('x-forebay-worker')}")
        if plan.leave is Leave.AFTER_HEAD:
            await self._leave(story, wire)
        if headers.get("transfer-encoding") != "chunked":
            if plan.leave in (Leave.MIDWAY, Leave.LAST_EVENT):
                await wire.reader.readexactly(int(plan.share * int(headers["content-length"])))
                await self._leave(story, wire)
            return await wire.body(story.status, headers)
        answer = Answer(story.status, headers, b"", [])
        try:
            await self._chunks(story, wire, answer.chunks)
        except (asyncio.IncompleteReadError, ConnectionResetError, ValueError) as exc:
            answer.is_whole = False
            story.note(f"breaks off: {exc!r}")
        answer.body = b"".join(answer.chunks)
        return answer

    async def _chunks(self, story: Story, wire: Wire, chunks: list[bytes]) -> None:
        plan = story.plan
        stops_at = 1 + int(plan.share * 10)
        while data := await wire.chunk():
            chunks.append(data)
            is_end = any(end in data for end in _ENDS)
            if plan.leave is Leave.MIDWAY and (len(chunks) == stops_at or is_end):
                await self._leave(story, wire)
            if plan.leave is Leave.LAST_EVENT and is_end:
                await self._leave(story, wire)
            if plan.aborts is not None and plan.is_stream and len(chunks) == stops_at:
                await self._abort(story)
        if plan.leave is not Leave.NEVER:  # the answer was shorter than thought
            await self._leave(story, wire)

    async def _leave(self, story: Story, wire: Wire) -> None:
        """Go, and raise that.

        Raises:
            _Left: Always.
        """
        story.note(f"leaves: {story.plan.manner.value}")
        self._wire = None
        if story.plan.manner is Manner.RESET:
            wire.reset()
        elif story.plan.manner is Manner.HALF_CLOSE and wire.writer.can_write_eof():
            wire.writer.write_eof()
            try:
                while await wire.reader.read(65536):
                    pass
            except ConnectionError:
                pass
            story.note("the gateway has closed as well")
        wire.close()
        raise _Left

    async def _abort(self, story: Story) -> None:
        rid = story.plan.aborts
        assert rid is not None
        answer = await call(self._address, "/abort_request", {"rid": rid}, patience_s=None)
        said = answer.json()
        story.note(f"abort: {answer.status} {said}")
        if answer.status != 200 or [rid] not in (said["aborted"], said["not_found"]):
            story.complaints.append(f"the abort was answered with {answer.status} {said}")

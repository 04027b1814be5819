"""Samplers of a rollout: what they ask for, and what they make of the answers."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fakes.running import TIME_SCALE
from tests.fakes.wire import Answer, Wire, request_bytes, wire

GROUPS = 12
BLOCK = 16
MAX_TOKENS = 60
# From the first byte of a request to the last of its answer, pauses included.
LIMIT_S = 20.0 * TIME_SCALE
MIN_VERSION = "x-forebay-min-weight-version"
VERSION = "x-forebay-weight-version"


@dataclass(frozen=True, slots=True)
class Dialect:
    """How an engine kind is asked for tokens.

    Attributes:
        path: The route.
        prompt: Name of the field with the prompt's ids.
    """

    path: str
    prompt: str

    def body(self, group: int, tokens: int, *, stream: bool) -> dict[str, Any]:
        """A request for so many tokens after the prompt of a group."""
        asked: dict[str, Any] = {self.prompt: prompt_of(group), "stream": stream}
        if self.path == "/generate":
            return {**asked, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}}
        options = {"stream_options": {"include_usage": True}} if stream else {}
        return {**asked, "model": "model", "max_tokens": tokens, "ignore_eos": True, "temperature": 0, **options}

    def read(self, answer: Answer) -> "Sampled":
        """What an answer says.

        Raises:
            ValueError: It is not one of this route's, or breaks off.
            LookupError: The same.
        """
        if answer.headers["content-type"].startswith("text/event-stream"):
            events = answer.events()
            if events[-1] != b"[DONE]":
                raise ValueError("the stream has no end")
            parts = [json.loads(event) for event in events[:-1]]
        else:
            parts = [answer.json()]
        if any("error" in part for part in parts):
            raise ValueError(f"an error: {parts[-1]}")
        return _native(parts[-1]) if self.path == "/generate" else _completion(parts)


SGLANG = Dialect("/generate", "input_ids")
VLLM = Dialect("/v1/completions", "prompt")


@dataclass(frozen=True, slots=True)
class Sampled:
    """An answer.

    Attributes:
        text: What was generated.
        tokens: How many tokens that is.
        finish: Why it ended: ``length`` or ``abort``.
        version: Of the weights, ``None`` where the route does not tell.
    """

    text: str
    tokens: int
    finish: str
    version: int | None = None


def _native(last: dict[str, Any]) -> Sampled:
    meta = last["meta_info"]
    version = meta["weight_version"]
    return Sampled(last["text"], meta["completion_tokens"], meta["finish_reason"]["type"], int(version))


def _completion(parts: Sequence[dict[str, Any]]) -> Sampled:
    choices = [choice for part in parts for choice in part["choices"]]
    finishes = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    (usage,) = [part["usage"] for part in parts if part.get("usage")]
    tokens = usage["completion_tokens"]
    # Of a stream that is aborted before its first token vLLM sends the usage alone.
    (finish,) = finishes or (["abort"] if tokens == 0 else [])
    return Sampled("".join(choice["text"] for choice in choices), tokens, finish)


def prompt_of(group: int) -> list[int]:
    """The ids of a group's prompt, which tell the group; of some blocks, and not of the same number in each."""
    return [10 + group] * BLOCK * (4 + group % 3) + [7]


@dataclass(slots=True)
class Story:
    """One request, as its client saw it.

    Attributes:
        rid: Its public id.
        group: Whose prompt it has.
        wanted: Tokens that it asks for.
        minimum: Version that it asks for, ``None`` for any.
        began: Monotonic seconds.
        ended: The same.
        status: Of the answer, 0 if there was none.
        sampled: The answer.
        version: Of the weights, by the answer's header.
        overlap: Blocks that the gateway took for cached.
        complaint: What must not be, empty if all is well.
    """

    rid: str
    group: int
    wanted: int
    minimum: int | None
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    status: int = 0
    sampled: Sampled | None = None
    version: int = -1
    overlap: int = -1
    complaint: str = ""


class Sampler:
    """Sends one request after the other until it is told to stop.

    Args:
        name: Begins its ids.
        address: The gateway's.
        dialect: How to ask.
        rng: Draws the requests.
    """

    def __init__(self, name: str, address: tuple[str, int], dialect: Dialect, rng: random.Random) -> None:
        self._name = name
        self._address = address
        self._dialect = dialect
        self._rng = rng
        self.stories: list[Story] = []
        self.committed = 0
        self.is_over = False

    async def run(self) -> None:
        """Sample."""
        async with wire(self._address) as connection:
            while not self.is_over:
                minimum = self.committed if self._rng.random() < 0.3 else None
                rid = f"{self._name}-{len(self.stories)}"
                story = Story(rid, self._rng.randrange(GROUPS), self._rng.randint(1, MAX_TOKENS), minimum)
                self.stories.append(story)
                await self._ask(connection, story)
                story.ended = time.monotonic()
                if story.complaint:
                    return

    async def _ask(self, connection: Wire, story: Story) -> None:
        headers = {"x-request-id": story.rid}
        if story.minimum is not None:
            headers[MIN_VERSION] = str(story.minimum)
        body = self._dialect.body(story.group, story.wanted, stream=self._rng.random() < 0.5)
        try:
            async with asyncio.timeout(LIMIT_S):
                await connection.send(request_bytes(self._dialect.path, body, headers=headers))
                answer = await connection.answer()
            story.status = answer.status
            story.sampled = self._dialect.read(answer)
            story.version = int(answer.headers[VERSION])
            story.overlap = int(answer.headers["x-forebay-overlap-blocks"])
        except (OSError, EOFError, TimeoutError, ValueError, LookupError) as exc:
            story.complaint = f"no answer that is one: {exc!r}"

"""One sequence on its way through a scheduler: what it wants, what it has produced, how it ended.

Pure: times are given by the caller, in seconds of one clock.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from simulator.cache import BASE, Lease, Namespace
from simulator.text import TextDecoder, TokenSource, decode


class SequenceState(enum.Enum):
    """Where a sequence is."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishKind(enum.Enum):
    """Why a sequence ended, in SGLang's words."""

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended.

    ``is_short`` marks the ends that never reached the model runner's answer (waiting queue, queue
    full): their ``meta_info`` lacks most fields.
    """

    kind: FinishKind
    matched: int | str | None = None
    message: str = ""
    status_code: int | None = None
    err_type: str | None = None
    length: int | None = None
    """The length that answers show; ``None``: the tokens produced."""
    is_short: bool = False


ABORTED = Finish(FinishKind.ABORT, message="Aborted")
ABORTED_WAITING = Finish(FinishKind.ABORT, message="Abort in waiting queue", is_short=True)
QUEUE_FULL = Finish(FinishKind.ABORT, message="The request queue is full.", status_code=503, is_short=True)


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends a sequence before its length."""

    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    min_new_tokens: int = 0
    keep_text: bool = False
    """Leave the matched text in the answer (``no_stop_trim``)."""


NO_STOP = StopRule()


@dataclass(slots=True)
class Times:
    """Moments of one sequence; ``0.0`` means not yet."""

    received: float = 0.0
    dispatched: float = 0.0
    queued: float = 0.0
    started: float = 0.0
    prefilled: float = 0.0
    first_token: float = 0.0
    first_sent: float = 0.0
    finished: float = 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and the answer to it.

    ``owner`` is whatever the wire shell needs to find the caller again; the scheduler never looks
    at it. ``match_limit`` bounds the cached prefix: prompt log-probabilities need their tokens computed.
    """

    rid: str
    prompt: Seq[int]
    max_new_tokens: int
    source: TokenSource
    owner: Any
    namespace: Namespace = BASE
    session_id: str | None = None
    """Named in KV events only."""
    stop: StopRule = NO_STOP
    match_limit: int | None = None
    is_streamed: bool = False
    keeps_output_when_retracted: bool = True
    first_finish: Finish | None = None
    """An end decided in advance, reported with the first token (a grammar that does not compile)."""
    name: str = ""
    """The id that clients abort it by, on engines where that is not ``rid``."""
    state: SequenceState = SequenceState.NEW
    output: list[int] = field(default_factory=list)
    hidden_tokens: int = 0
    """Output tokens at the end that have no part in the text (a trimmed stop token)."""
    text: str = ""
    """Text so far; of a unary sequence without stop strings only at the end."""
    decoder: TextDecoder = field(default_factory=TextDecoder)
    rank: int | None = None
    transfer: Any = None
    """What the engine's role has to know of the other half of a pair; ``None``: there is none."""
    transfer_result: dict[str, Any] | None = None
    """What a vLLM answer tells about the blocks that wait for the other half."""
    remote_cached_tokens: int | None = None
    """Tokens that the engine which computed the prompt had cached; ``None``: it is computed here."""
    keeps_lease: bool = False
    """Leave the lease to the engine's role at the end, unless that is an abort."""
    cached_tokens: int = 0
    computed_tokens: int = 0
    """Leading tokens of prompt and output whose cache entries exist."""
    retractions: int = 0
    is_aborting: bool = False
    finish: Finish | None = None
    lease: Lease | None = None
    times: Times = field(default_factory=Times)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output so far."""
        return [*self.prompt, *self.output]

    def append(self, token: int) -> None:
        """Take one more output token and look for a reason to stop."""
        self.output.append(token)
        stop = self.stop
        may_stop = stop is not NO_STOP and len(self.output) > stop.min_new_tokens
        if may_stop and token in stop.token_ids:
            if stop.keep_text:
                self.text += self.decoder.feed(token)
            else:
                self.hidden_tokens = 1
            self._end(Finish(FinishKind.STOP, matched=token))
            return
        if not self.is_streamed and not stop.strings:
            # Nobody looks at the text before the end.
            if len(self.output) >= self.max_new_tokens:
                self._end(Finish(FinishKind.LENGTH))
            return
        piece = self.decoder.feed(token)
        self.text += piece
        if may_stop and piece and stop.strings and self._stops_at_string(len(piece)):
            return
        if len(self.output) >= self.max_new_tokens:
            self._end(Finish(FinishKind.LENGTH))

    def _stops_at_string(self, new_characters: int) -> bool:
        text = self.text
        for string in self.stop.strings:
            # A new match ends inside the new characters, so only the tail can hold it.
            found = text.find(string, max(0, len(text) - new_characters - len(string) + 1))
            if found >= 0:
                if not self.stop.keep_text:
                    self.text = text[:found]
                self._end(Finish(FinishKind.STOP, matched=string))
                return True
        return False

    def _end(self, finish: Finish) -> None:
        self.finish = finish
        if self.is_streamed or self.stop.strings:
            self.text += self.decoder.flush()
        else:
            self.text = decode(self.output[: len(self.output) - self.hidden_tokens])

    def end_with(self, token: int, finish: Finish) -> None:
        """Take a last token, whatever it is; one that comes with an abort has no text."""
        self.output.append(token)
        if finish.kind is not FinishKind.ABORT and (self.is_streamed or self.stop.strings):
            self.text += self.decoder.feed(token)
        self._end(finish)

    def end(self, finish: Finish) -> None:
        """End from outside, for instance by an abort."""
        if self.finish is None:
            self._end(finish)

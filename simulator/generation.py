"""Callers of the core: a unary answer, an event stream, a warm-up."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from simulator.core import Core, DuplicateRequest
from simulator.exchange import Exchange
from simulator.faulting import EventWriter
from simulator.sequence import Finish, Sequence


def _submit(core: Core, generation: UnaryGeneration | StreamGeneration, rank: int | None) -> None:
    try:
        core.submit(generation, rank)
    except DuplicateRequest:
        generation.sequences = ()  # they know it: no cycle is left for the collector
        raise


class UnaryGeneration:
    """Collects all sequences of a request, then calls ``on_done`` with them."""

    is_stream = False

    def __init__(self, core: Core, exchange: Exchange, on_done: Callable[[Seq[Sequence]], None]) -> None:
        self.sequences: Seq[Sequence] = ()
        self._core = core
        self._exchange = exchange
        self._on_done = on_done
        self._open = 0

    def start(self, sequences: Seq[Sequence], rank: int | None) -> None:
        """Submit ``sequences``.

        Raises:
            DuplicateRequest: If an id is live.
        """
        self.sequences = sequences
        self._open = len(sequences)
        _submit(self._core, self, rank)
        self._exchange.on_disconnect = lambda: self._core.client_left(self)
        if self._exchange.starts_aborted:
            self._core.abort_generation(self)

    def on_progress(self, sequence: Sequence) -> None:
        """Do nothing: a unary answer waits for the end."""

    def on_finished(self, sequence: Sequence) -> None:
        """Count; answer after the last one."""
        self._exchange.entry.tokens += len(sequence.output)
        self._open -= 1
        if not self._open and not self._exchange.is_over:
            self._on_done(self.sequences)


class Renderer(Protocol):
    """Turns sequences into events."""

    def events(self, index: int, sequence: Sequence) -> Seq[bytes]:
        """Return what is new of sequence number ``index``."""

    def ending(self) -> Seq[bytes]:
        """Return the events after the last sequence has ended, without the final one."""


class StreamGeneration:
    """Writes events as sequences progress.

    While the client reads too slowly nothing is written; then one event tells all that is new, as
    the real front end does.
    """

    is_stream = True

    def __init__(self, core: Core, exchange: Exchange, writer: EventWriter, renderer: Renderer) -> None:
        self.sequences: Seq[Sequence] = ()
        self._core = core
        self._exchange = exchange
        self._writer = writer
        self._renderer = renderer
        self._index: dict[int, int] = {}
        self._open = 0
        self._behind: dict[int, Sequence] = {}
        self.last: bytes | None = b"data: [DONE]\n\n"
        self.on_first: Callable[[Sequence], bool] | None = None
        """Called with the first news before anything is written; ``False`` ends the generation's part in the answer."""

    def start(self, sequences: Seq[Sequence], rank: int | None) -> None:
        """Submit ``sequences``.

        Raises:
            DuplicateRequest: If an id is live.
        """
        self.sequences = sequences
        self._index = {id(sequence): index for index, sequence in enumerate(sequences)}
        self._open = len(sequences)
        _submit(self._core, self, rank)
        self._exchange.on_disconnect = self._client_left
        self._exchange.on_writable = self._catch_up
        if self._exchange.facts is not None:
            self._exchange.on_abort_finish = lambda: self._core.abort_generation(self)
        if self._exchange.starts_aborted:
            self._core.abort_generation(self)

    def on_progress(self, sequence: Sequence) -> None:
        """Write what is new, unless the client is behind."""
        if self._exchange.is_over:
            return
        if self.on_first is not None and not self._is_begun(sequence):
            return
        if not self._exchange.is_writable:
            self._behind[self._index[id(sequence)]] = sequence
            return
        for event in self._renderer.events(self._index[id(sequence)], sequence):
            self._writer.send(event)

    def on_finished(self, sequence: Sequence) -> None:
        """Write the last event of ``sequence``, and the stream's end after the last one."""
        self._exchange.entry.tokens += len(sequence.output)
        self._open -= 1
        self.on_progress(sequence)
        if not self._behind:
            self._end_if_done()

    def _is_begun(self, sequence: Sequence) -> bool:
        on_first, self.on_first = self.on_first, None
        assert on_first is not None
        return on_first(sequence)

    def _catch_up(self) -> None:
        behind, self._behind = self._behind, {}
        for sequence in behind.values():
            self.on_progress(sequence)
        if not self._behind:
            self._end_if_done()

    def _end_if_done(self) -> None:
        if self._open or self._exchange.is_over:
            return
        self._exchange.on_writable = None
        ending = [*self._renderer.ending(), *([self.last] if self.last else ())]
        for event in ending[:-1]:
            self._writer.send(event)
        self._writer.end(ending[-1] if ending else None)
        self._core.stream_over(self)

    def _client_left(self) -> None:
        self._core.client_left(self)
        self._core.stream_over(self)


class WarmUp:
    """Runs prompts for nothing but the cache, as SGLang does before several samples of one prompt."""

    is_stream = False

    def __init__(
        self, core: Core, exchange: Exchange, proceed: Callable[[], None], failed: Callable[[Finish], None]
    ) -> None:
        self.sequences: Seq[Sequence] = ()
        self._core = core
        self._exchange = exchange
        self._proceed = proceed
        self._failed = failed
        self._failure: Finish | None = None
        self._open = 0

    def start(self, sequences: Seq[Sequence], rank: int | None) -> None:
        """Run ``sequences``; none of them can be named by a client."""
        self.sequences = sequences
        self._open = len(sequences)
        self._exchange.on_disconnect = lambda: self._core.abort_generation(self)
        for sequence in sequences:
            self._core.run_aside(self, sequence, rank)

    def on_progress(self, sequence: Sequence) -> None:
        """Do nothing."""

    def on_finished(self, sequence: Sequence) -> None:
        """Go on after the last one if the client is still there, or tell it why not."""
        self._open -= 1
        if sequence.finish is not None and sequence.finish.status_code is not None:
            self._failure = sequence.finish
        if self._open or self._exchange.is_over:
            return
        if self._failure is None:
            self._proceed()
        else:
            self._failed(self._failure)

"""Continuous batching on one rank, in simulated time.

Pure: no asyncio and no clock. The shell drives it in steps::

    duration_s = scheduler.begin(now)        # None: nothing to do
    ...                                      # the shell lets duration_s pass
    for sequence in scheduler.finish(now):   # sequences with news
        ...

A step computes at most ``chunked_prefill_tokens`` prompt tokens and one token of every sequence
that is decoding. Sequences that end outside a step (aborted while waiting, queue full) are
returned by the call that ended them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from simulator.cache import PrefixCache
from simulator.sequence import ABORTED, ABORTED_WAITING, QUEUE_FULL, Finish, FinishKind, Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes and speeds of one rank; durations are simulated seconds, ``0`` means no time."""

    max_running: int
    max_queued: int
    chunked_prefill_tokens: int
    prefill_tokens_per_s: float
    decode_step_s: float
    stores_while_decoding: bool = False
    """Store blocks of the answer as they fill up, like vLLM; otherwise at its end, like SGLang."""


@dataclass(slots=True)
class Totals:
    """Counters since the start."""

    prefill_tokens: int = 0
    prefill_busy_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    transferred_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    decode_steps: int = 0


class Scheduler:
    """The sequences of one rank.

    ``on_computed`` is called in every step when its blocks are stored, before the next sequences are let in
    and before anybody hears of the step's tokens.
    """

    def __init__(
        self, rank: int, cache: PrefixCache, limits: Limits, on_computed: Callable[[], None] = lambda: None
    ) -> None:
        self.rank = rank
        self.cache = cache
        self.totals = Totals()
        self.is_paused = False
        self._limits = limits
        self.on_computed = on_computed
        self._waiting: deque[Sequence] = deque()
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._plan: list[tuple[Sequence, int]] | None = None
        self._planned_decodes: list[Sequence] = []

    @property
    def running(self) -> int:
        """Sequences being prefilled or decoded."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    @property
    def waiting_sequences(self) -> list[Sequence]:
        """The queue, the next one first."""
        return list(self._waiting)

    @property
    def running_tokens(self) -> int:
        """Tokens of the running sequences, cached ones included."""
        return sum(len(s.prompt) + len(s.output) for s in (*self._prefilling, *self._decoding))

    def add(self, sequence: Sequence, now: float) -> bool:
        """Queue ``sequence``; ``False`` means that the queue was full and the sequence has ended."""
        limit = self._limits.max_queued
        if limit and len(self._waiting) >= limit:
            self._close(sequence, QUEUE_FULL, now)
            return False
        sequence.state = SequenceState.WAITING
        sequence.times.queued = now
        self._waiting.append(sequence)
        self._admit(now)
        return True

    def begin(self, now: float) -> float | None:
        """Start the next step.

        Returns:
            Its duration in seconds, or ``None`` if there is nothing to do.

        Raises:
            RuntimeError: If a step is already going on.
        """
        if self._plan is not None:
            raise RuntimeError("the step before has not been finished")
        if self.is_paused:
            return None
        self._admit(now)
        if not self._prefilling and not self._decoding:
            return None
        budget = self._limits.chunked_prefill_tokens
        plan: list[tuple[Sequence, int]] = []
        for sequence in self._prefilling:
            chunk = min(budget, len(sequence.prompt) + len(sequence.output) - sequence.computed_tokens)
            plan.append((sequence, chunk))
            budget -= chunk
            if budget <= 0:
                break
        self._plan = plan
        self._planned_decodes = list(self._decoding)
        computed = self._limits.chunked_prefill_tokens - budget
        duration = self._limits.decode_step_s if self._planned_decodes else 0.0
        if computed and self._limits.prefill_tokens_per_s:
            prefill_s = computed / self._limits.prefill_tokens_per_s
            self.totals.prefill_busy_s += prefill_s
            duration += prefill_s
        self.totals.prefill_tokens += computed
        return duration

    def finish(self, now: float) -> list[Sequence]:
        """End the step that ``begin`` started; returns the sequences that got a token or ended."""
        plan, self._plan = self._plan, None
        decodes, self._planned_decodes = self._planned_decodes, []
        news: list[Sequence] = []
        if plan:
            self._finish_prefill(plan, news, now)
        if decodes:
            self.totals.decode_steps += 1
            for sequence in decodes:
                if sequence.state is SequenceState.RUNNING and sequence.lease is not None:
                    sequence.computed_tokens += 1
                    if self._limits.stores_while_decoding and not sequence.computed_tokens % self.cache.page_size:
                        self.cache.fill(sequence.lease, self._computed(sequence))
                    self._next_token(sequence, now)
                    news.append(sequence)
        ended = False
        for sequence in news:
            if sequence.finish is not None:
                ended = True
                self._close(sequence, sequence.finish, now)
        self.on_computed()
        if ended:
            self._decoding = [s for s in self._decoding if s.finish is None]
            self._admit(now)
        return news

    def abort(
        self, matches: Callable[[Sequence], bool], now: float, *, at_once: Finish | None = None
    ) -> tuple[list[Sequence], list[Sequence]]:
        """Abort every sequence that ``matches``.

        Args:
            matches: Tells which.
            now: The time.
            at_once: Everything ends now and with this, without the token of the step that is under way.

        Returns:
            The ones that ended at once (they were waiting), and the ones that end with their next step.
        """
        ended = [s for s in self._waiting if matches(s)]
        if ended:
            self._waiting = deque(s for s in self._waiting if not matches(s))
            for sequence in ended:
                if sequence.retractions and not sequence.keeps_output_when_retracted:
                    sequence.output.clear()
                    sequence.text = ""
                self._close(sequence, at_once or ABORTED_WAITING, now)
        marked = [s for s in (*self._prefilling, *self._decoding) if matches(s)]
        if at_once is not None:
            self._prefilling = [s for s in self._prefilling if not matches(s)]
            self._decoding = [s for s in self._decoding if not matches(s)]
            for sequence in marked:
                self._close(sequence, at_once, now)
            return [*ended, *marked], []
        for sequence in marked:
            sequence.is_aborting = True
        return ended, marked

    def retract_all(self, now: float) -> None:
        """Put every running sequence back into the queue, in front; its output stays known."""
        running = [*self._prefilling, *self._decoding]
        self._prefilling = []
        self._decoding = []
        for sequence in reversed(running):
            if sequence.lease is not None:
                self.cache.release(sequence.lease, self._computed(sequence))
            sequence.lease = None
            sequence.computed_tokens = 0
            sequence.retractions += 1
            sequence.state = SequenceState.WAITING
            sequence.times.queued = now
            self._waiting.appendleft(sequence)

    def _admit(self, now: float) -> None:
        while self._waiting and not self.is_paused and self.running < self._limits.max_running:
            sequence = self._waiting[0]
            tokens = sequence.tokens if sequence.output else sequence.prompt
            # The last token is always computed: its output is what the first step needs.
            match = min(len(tokens) - 1, len(tokens) if sequence.match_limit is None else sequence.match_limit)
            lease = self.cache.lease(
                tokens,
                sequence.namespace,
                match_tokens=match,
                total_tokens=len(sequence.prompt) + max(1, sequence.max_new_tokens),
                session_id=sequence.session_id,
            )
            if lease is None:
                return
            self._waiting.popleft()
            sequence.lease = lease
            sequence.computed_tokens = lease.cached_tokens
            if not sequence.retractions:
                sequence.cached_tokens = lease.cached_tokens
                if sequence.remote_cached_tokens is not None:
                    self._take_over(sequence, sequence.remote_cached_tokens)
                self.totals.prompt_tokens += len(tokens)
                self.totals.cached_tokens += lease.cached_tokens
                sequence.times.started = now
            sequence.state = SequenceState.RUNNING
            self._prefilling.append(sequence)

    def _take_over(self, sequence: Sequence, remote_cached_tokens: int) -> None:
        # Another engine has computed the prompt; the step for its last token makes the first output token.
        sequence.cached_tokens = remote_cached_tokens
        sequence.computed_tokens = max(sequence.computed_tokens, len(sequence.prompt) - 1)
        self.totals.transferred_tokens += len(sequence.prompt) - (sequence.lease.cached_tokens if sequence.lease else 0)

    def _finish_prefill(self, plan: list[tuple[Sequence, int]], news: list[Sequence], now: float) -> None:
        changed = False
        for sequence, chunk in plan:
            if sequence.state is not SequenceState.RUNNING or sequence.lease is None:
                continue
            sequence.computed_tokens += chunk
            self.cache.fill(sequence.lease, self._computed(sequence))
            is_done = sequence.computed_tokens >= len(sequence.prompt) + len(sequence.output)
            if not is_done and not sequence.is_aborting:
                continue
            changed = True
            if is_done:
                self._decoding.append(sequence)
                if not sequence.times.prefilled:
                    sequence.times.prefilled = now
            self._next_token(sequence, now)
            news.append(sequence)
        if changed:
            gone = {id(s) for s in news}
            self._prefilling = [s for s in self._prefilling if id(s) not in gone]

    def _next_token(self, sequence: Sequence, now: float) -> None:
        if not sequence.times.first_token:
            sequence.times.first_token = now
        if sequence.first_finish is not None:
            was_fine = sequence.first_finish.kind is not FinishKind.ABORT
            finish = ABORTED if sequence.is_aborting and was_fine else sequence.first_finish
            sequence.end_with(sequence.source.token(0), finish)
            return
        if not sequence.max_new_tokens:
            sequence.end(Finish(FinishKind.LENGTH))
            return
        sequence.append(sequence.source.token(len(sequence.output)))
        self.totals.generated_tokens += 1
        if sequence.is_aborting and sequence.finish is None:
            sequence.end(ABORTED)

    def _close(self, sequence: Sequence, finish: Finish, now: float) -> None:
        sequence.end(finish)
        sequence.state = SequenceState.FINISHED
        sequence.times.finished = now
        self.totals.finished += 1
        if finish.kind is FinishKind.ABORT:
            self.totals.aborted += 1
        if sequence.lease is not None and sequence.keeps_lease and finish.kind is not FinishKind.ABORT:
            self.cache.keep(sequence.lease, self._computed(sequence))
        else:
            self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Give back what ``sequence``, which has ended, holds of the cache."""
        if sequence.lease is not None:
            self.cache.release(sequence.lease, self._computed(sequence))
            sequence.lease = None

    @staticmethod
    def _computed(sequence: Sequence) -> list[int]:
        return sequence.tokens[: sequence.computed_tokens]

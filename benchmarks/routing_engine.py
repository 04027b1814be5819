"""One simulated rank on a virtual clock: its cache, its scheduler and its events; for ``benchmarks.routing_sim``."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from simulator.cache import PrefixCache
from simulator.kv_encoding import SGLangFormat, pack_batch
from simulator.kv_journal import KvJournal
from simulator.scheduler import Limits, Scheduler
from simulator.sequence import Sequence as EngineSequence
from simulator.sequence import SequenceState
from simulator.text import TokenSource

_FORM: Final = SGLangFormat("0.5.23")


@dataclass(frozen=True, slots=True)
class Setup:
    """Engines, all alike.

    Attributes:
        engines: How many.
        page_tokens: Tokens of a block.
        cache_tokens: Tokens that one engine's KV cache holds.
        prefill_tokens_per_s: Prompt tokens that one engine computes per second.
        chunk_tokens: Prompt tokens of one step at most.
        decode_step_s: What decoding adds to a step.
        context_ns: What each token of a running request, prompt included, adds to a step: decoding reads its KV cache.
        max_running: Requests that one engine computes at once.
        event_delay_s: From the end of a step until the gateway has applied what it tells of the cache.
        grain: Tokens that one simulated token stands for, to save time; a step decodes as many at once, in as many
            times the time of a step. Divides the sizes.
        is_eager: Prompts are looked up in the cache as soon as they come, as the simulated server does it, rather than
            when a step has room for them, as real engines do.
    """

    engines: int = 8
    page_tokens: int = 64
    cache_tokens: int = 1_000_000
    prefill_tokens_per_s: float = 10_000.0
    chunk_tokens: int = 4096
    decode_step_s: float = 0.025
    context_ns: float = 0.0
    max_running: int = 128
    event_delay_s: float = 0.01
    grain: int = 4
    is_eager: bool = False

    @property
    def cache_blocks(self) -> int:
        """Blocks that one engine's cache holds."""
        return self.cache_tokens // self.page_tokens

    @property
    def page_size(self) -> int:
        """Simulated tokens of a block."""
        return self.page_tokens // self.grain


class Clock:
    """Virtual time, and what is to happen in it, in an order that does not change."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call when so much time has passed; calls for one moment happen in the order in which they were asked for."""
        self._count += 1
        heapq.heappush(self._due, (self.now + delay_s, self._count, call))

    def run(self) -> None:
        """Let time pass until nothing is left to happen."""
        while self._due:
            self.now, _, call = heapq.heappop(self._due)
            call()


class Answer(TokenSource):
    """Tokens of an answer, which must differ between requests and cost little."""

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        self._number = number

    def token(self, position: int) -> int:
        """One of the 256 that are bytes."""
        return 3 + (self._number >> (position % 4) * 8 & 0xFF)


class VirtualEngine:
    """One rank's cache and scheduler on the virtual clock.

    Prompts wait in front of the scheduler until a step has room for their first tokens, and are looked up in the cache
    then, as real engines do it; the scheduler alone would look as soon as they come.

    Args:
        clock: The time.
        setup: Sizes and speeds.
        on_batch: Gets each batch of events as its publisher would send it; ``None`` if nobody listens.
        on_news: Told of a sequence that has its first token or has ended.
    """

    def __init__(
        self,
        clock: Clock,
        setup: Setup,
        on_batch: Callable[[bytes], None] | None,
        on_news: Callable[[EngineSequence], None],
    ) -> None:
        self._clock = clock
        self._chunk_tokens = setup.chunk_tokens // setup.grain
        # A simulated token stands for several, and a simulated step for as many.
        self._context_s = setup.context_ns * 1e-9 * setup.grain**2
        self._is_eager = setup.is_eager
        self._on_batch = on_batch
        self._on_news = on_news
        self._journal = KvJournal(_FORM, setup.page_size) if on_batch is not None else None
        self.cache = PrefixCache(setup.cache_blocks, setup.page_size, self._journal)
        rate, step_s = setup.prefill_tokens_per_s / setup.grain, setup.decode_step_s * setup.grain
        limits = Limits(setup.max_running, 0, self._chunk_tokens, rate, step_s)
        self._scheduler = Scheduler(0, self.cache, limits, self._publish)
        self._waiting: deque[EngineSequence] = deque()
        self._prefilling: list[EngineSequence] = []
        self._is_in_step = False

    def submit(self, sequence: EngineSequence) -> None:
        """Take a request."""
        if self._is_eager:
            self._scheduler.add(sequence, self._clock.now)
        else:
            self._waiting.append(sequence)
        if not self._is_in_step:
            self._begin()

    def _begin(self) -> None:
        now = self._clock.now
        self._prefilling = [s for s in self._prefilling if not s.times.first_token and s.finish is None]
        ahead = sum(len(s.prompt) - s.computed_tokens for s in self._prefilling)
        while self._waiting and ahead < self._chunk_tokens:
            sequence = self._waiting.popleft()
            self._scheduler.add(sequence, now)
            self._prefilling.append(sequence)
            ahead += len(sequence.prompt) - sequence.computed_tokens
        duration_s = self._scheduler.begin(now)
        self._is_in_step = duration_s is not None
        if duration_s is not None:
            self._clock.after(duration_s + self._scheduler.running_tokens * self._context_s, self._finish)

    def _finish(self) -> None:
        for sequence in self._scheduler.finish(self._clock.now):
            if len(sequence.output) == 1 or sequence.state is SequenceState.FINISHED:
                self._on_news(sequence)
        self._is_in_step = False
        self._begin()

    def _publish(self) -> None:
        if self._journal is not None and self._on_batch is not None:
            events = self._journal.drain()
            if events:
                self._on_batch(pack_batch(_FORM, self._clock.now, events, 0))

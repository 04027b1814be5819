"""Simulated engines and the real routing code on one virtual clock; for ``benchmarks.routing_quality``.

What is real: the policies, fleet and bookings of ``routers``, the combination of events, prediction and guess of
``gateway.prefixes``, hashing, codec and index of ``kv_events``, cache, scheduler and event encoding of the simulator.
What is left out: sockets, HTTP, and all time that the gateway itself takes.
"""

import math
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from backends.json_body import JsonBody
from backends.types import EngineFacts, EngineKind, Worker
from backends.upstream.base import Origin, UpstreamClient
from benchmarks.routing_engine import Answer, Clock, Setup, VirtualEngine
from benchmarks.routing_traffic import Piece, Traffic, Turn, token_ids
from gateway.kv_view import KvView
from gateway.prefixes import Prefixes
from gateway.prompts import Prompt
from gateway.tokens.service import PromptTokenizers
from kv_events.codec import decode_batch
from kv_events.hashing import pack_tokens
from kv_events.index import PrefixIndex
from kv_events.index_intake import RankIntake
from kv_events.index_types import ApplyReport, Overlap, RankId
from kv_events.types import BASE, Namespace
from routers.base import Router
from routers.coalescing import Coalescing, Prefill
from routers.fleet import Fleet, Member
from routers.load import RankBooking
from routers.types import Candidate, Placement, RankKey, RouteRequest
from simulator.cache import PrefixCache
from simulator.sequence import Sequence as EngineSequence
from simulator.sequence import SequenceState

_MODEL: Final = "model"
_BODY: Final = JsonBody.parse(b"{}")


@dataclass(slots=True)
class Figures:
    """What came of one run.

    Attributes:
        ttft_s: From sending to the first token, of each request.
        prompt_tokens: Of all requests.
        hit_tokens: Of these, those that engines had in their caches.
        foreseen_tokens: Those that the policy expected there.
        busy: For each engine the requests there, as an integral over time.
        route_cpu_s: CPU time of all choices, bookings and predictions.
        span_s: Virtual time of the run.
        sent_to: Where each prompt that began a session went, as often as it was sent.
    """

    ttft_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    hit_tokens: int = 0
    foreseen_tokens: int = 0
    busy: list[float] = field(default_factory=list)
    route_cpu_s: float = 0.0
    span_s: float = 0.0
    sent_to: dict[tuple[Piece, ...], list[int]] = field(default_factory=dict)

    def ttft_quantile_s(self, share: float) -> float:
        """The time that so large a share of the requests was within."""
        ordered = sorted(self.ttft_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def hit_share(self) -> float:
        """Part of the prompt tokens that was cached."""
        return self.hit_tokens / max(1, self.prompt_tokens)

    @property
    def engines_per_group(self) -> float | None:
        """Mean number of engines to which a prompt went that was sent several times; ``None`` if none was."""
        groups = [len(set(engines)) for engines in self.sent_to.values() if len(engines) > 1]
        return sum(groups) / len(groups) if groups else None

    @property
    def imbalance(self) -> float:
        """Mean number of requests on the busiest engine over that on all."""
        return max(self.busy) * len(self.busy) / (sum(self.busy) or math.inf)


class Caches:
    """Takes the place of the gateway's view of the caches, without sockets: one index, always trusted.

    Args:
        clock: The time.
        delay_s: After which a batch is applied.
        index: Where to.
    """

    follows_any = True

    def __init__(self, clock: Clock, delay_s: float, index: PrefixIndex) -> None:
        self._clock = clock
        self._delay_s = delay_s
        self.index = index
        self.report = ApplyReport()

    def add(self, key: RankKey, capacity_blocks: int) -> Callable[[bytes], None]:
        """Follow a rank; what is returned takes its batches."""
        self.index.add_rank(key, capacity_blocks=capacity_blocks)
        intake = RankIntake(self.index, key)

        def apply(payload: bytes) -> None:
            for event in decode_batch(payload).events:
                for _ in intake.apply(event, self._clock.now, self.report):
                    pass

        return lambda payload: self._clock.after(self._delay_s, lambda: apply(payload))

    def is_trusted(self, key: RankKey) -> bool:
        """Nothing is ever lost here."""
        del key
        return True

    is_whole = is_trusted

    def trusts_all(self, keys: Iterable[RankId]) -> bool:
        """The same."""
        del keys
        return True


class SeenCaches(PrefixIndex):
    """What the oracle has in place of an index: the caches themselves, looked at in the moment of the choice.

    Attributes:
        caches: By rank.
        prompt: Tokens of the prompt that is about to be placed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.caches: dict[RankKey, PrefixCache] = {}
        self.prompt: Sequence[int] = ()

    def overlap(self, sequence_hashes: Sequence[int], namespace: Namespace = BASE) -> Overlap:
        """Leading blocks of the prompt that engines have; its hashes say nothing that it does not."""
        del sequence_hashes, namespace
        return Overlap({key: cache.overlap_blocks(self.prompt) for key, cache in self.caches.items()})


@dataclass(slots=True)
class _Sent:
    turn: Turn
    at_s: float
    booking: RankBooking
    engine: int
    prefill: Prefill | None = None
    has_answered: bool = False


class Run:
    """One policy in front of the engines.

    Args:
        policy: The real one.
        setup: The engines.
        is_oracle: It sees the caches themselves.
        predicts: Blocks are assumed to be where a request with them was just sent.
        observes: Prefill counts less by the time that it takes, as with ``--kv-prefill-load-model observed``.
        coalesce_tokens: As ``--kv-coalesce-tokens``; requests that wait go at the first token of the one ahead.

    Attributes:
        caches: What the router knows by events.
        engines: Those that it sends to.
        figures: Of what was sent so far.
    """

    def __init__(
        self,
        policy: Router,
        setup: Setup,
        *,
        is_oracle: bool = False,
        predicts: bool = True,
        observes: bool = False,
        coalesce_tokens: int = 0,
    ) -> None:
        self._policy = policy
        self._setup = setup
        self._clock = Clock()
        self._seen = SeenCaches() if is_oracle else None
        self.caches = Caches(self._clock, setup.event_delay_s, self._seen or PrefixIndex())
        self._fleet = Fleet(prefill_clock=(lambda: self._clock.now) if observes else None)
        self._prefixes = Prefixes(
            policy.name,
            cast(KvView, self.caches),
            self._fleet,
            cast(PromptTokenizers, None),
            cast(UpstreamClient, None),
            lambda: self._clock.now,
            lambda worker: None,
            predicts=predicts,
        )
        self._coalescing = Coalescing(coalesce_tokens) if coalesce_tokens else None
        self.engines: list[VirtualEngine] = []
        self._number_of: dict[RankKey, int] = {}
        self._last_s = [0.0] * setup.engines
        self._in_flight = [0] * setup.engines
        self._sent = 0
        self.figures = Figures(busy=[0.0] * setup.engines)
        for number in range(setup.engines):
            self._add_engine(f"engine-{number}", number)

    def _add_engine(self, worker_id: str, number: int) -> None:
        setup = self._setup
        blocks = setup.cache_blocks
        key = RankKey(worker_id, 0)
        listens = self._seen is None and self._policy.name == "kv-aware"
        engine = VirtualEngine(self._clock, setup, self.caches.add(key, blocks) if listens else None, self._news)
        if self._seen is not None:
            self._seen.caches[key] = engine.cache
        url = f"http://{worker_id}"
        member = Member(Worker(worker_id, url, Origin.from_url(url)))
        member.identified(
            EngineFacts(EngineKind.SGLANG, (0, 5, 23), "0.5.23", _MODEL, page_size=setup.page_size, kv_blocks=blocks)
        )
        self._fleet.add(member)
        self.engines.append(engine)
        self._number_of[key] = number

    @property
    def candidates(self) -> Sequence[Candidate]:
        """The ranks, with what is booked on them."""
        return self._fleet.candidates(_MODEL)

    def go(self, traffic: Traffic) -> Figures:
        """Send all of it, and let time pass until the last answer has ended."""
        for turn in traffic.turns:
            self._clock.after(turn.after_s, lambda turn=turn: self._send(turn, []))  # type: ignore[misc]
        self._clock.run()
        for number in range(len(self.engines)):
            self._count(number, 0)
        self.figures.span_s = self._clock.now
        return self.figures

    def _send(self, turn: Turn, context: list[int]) -> None:
        """Place one request: the same steps as ``gateway.placement``, which wants an upstream client besides."""
        tokens = [*context, *token_ids(turn.pieces, self._setup.grain)]
        if self._seen is not None:
            self._seen.prompt = tokens
        packed = pack_tokens(array("I", tokens))
        candidates = self.candidates
        started = time.thread_time()
        prompt = Prompt({EngineKind.SGLANG: packed}, len(tokens), _BODY, _MODEL) if self._prefixes.are_wanted else None
        choice, booking = self._place(turn, prompt, len(tokens), candidates)
        figures = self.figures
        figures.route_cpu_s += time.thread_time() - started
        figures.prompt_tokens += len(tokens) * self._setup.grain
        figures.foreseen_tokens += (choice.overlap_blocks or 0) * self._setup.page_tokens
        number = self._number_of[choice.candidate.key]
        if not context:
            figures.sent_to.setdefault(turn.pieces, []).append(number)
        self._count(number, 1)
        self._sent += 1
        output = -(-turn.output_tokens // self._setup.grain)
        sent = _Sent(turn, self._clock.now, booking, number)
        sequence = EngineSequence(f"r{self._sent}", tokens, output, Answer(self._sent), sent)
        self._submit(prompt, choice, sent, lambda: self.engines[number].submit(sequence))

    def _submit(self, prompt: Prompt | None, choice: Placement, sent: _Sent, submit: Callable[[], None]) -> None:
        """Give it to its engine, at once or when what it shares is there; the same as ``gateway.coalescing``."""
        coalescing, blocks, key = self._coalescing, choice.prompt, choice.candidate.key
        if coalescing is not None and prompt is not None and blocks is not None:
            hashes, size = blocks.sequence_hashes, blocks.block_size
            ahead = coalescing.shared_with(key, hashes, size, lambda: self._prefixes.announced_blocks(prompt, choice))
            if ahead is not None:
                coalescing.wait(ahead, hashes, size, submit)
                return
            sent.prefill = coalescing.begin(key, hashes, size, choice.overlap_blocks or 0)
        submit()

    def _place(
        self, turn: Turn, prompt: Prompt | None, tokens: int, candidates: Sequence[Candidate]
    ) -> tuple[Placement, RankBooking]:
        if prompt is None:
            request = RouteRequest(tokens, turn.session)
        else:
            request = self._prefixes.request(prompt, turn.session, candidates)
        choice = self._policy.select(request, candidates)
        blocks, load = choice.prompt, choice.candidate.load
        if blocks is None:
            booking = load.book(requests=1, blocks=-(-tokens // self._setup.page_size), prefill_tokens=tokens)
        else:
            booking = load.book(
                requests=1,
                blocks=blocks.capacity_blocks,
                prefill_tokens=blocks.uncached_tokens(choice.overlap_blocks or 0),
                block_hashes=blocks.sequence_hashes,
            )
        if prompt is not None:
            self._prefixes.sent(prompt, choice)
        return choice, booking

    def _news(self, sequence: EngineSequence) -> None:
        sent: _Sent = sequence.owner
        if not sent.has_answered:
            sent.has_answered = True
            sent.booking.first_token()
            if sent.prefill is not None and self._coalescing is not None:
                self._coalescing.end(sent.prefill)
            self.figures.ttft_s.append(self._clock.now - sent.at_s)
            self.figures.hit_tokens += sequence.cached_tokens * self._setup.grain
        if sequence.state is SequenceState.FINISHED:
            sent.booking.release()
            self._count(sent.engine, -1)
            following = sent.turn.then
            if following is not None:
                context = sequence.tokens
                self._clock.after(following.after_s, lambda: self._send(following, context))

    def _count(self, number: int, change: int) -> None:
        now = self._clock.now
        self.figures.busy[number] += self._in_flight[number] * (now - self._last_s[number])
        self._last_s[number] = now
        self._in_flight[number] += change

"""The set of workers, what is known of each, and who may be given a request now.

Only the loop's thread touches a fleet. Policies get immutable tuples of candidates, made again when a worker's
state changes and not for each request.
"""

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from backends.types import EngineFacts, EngineKind, ProbeResult, Role, Worker
from routers.breaker import Breaker, BreakerState
from routers.errors import ModelRequired, NoReadyWorker, NoSuchRank, UnknownModel
from routers.load import RankLoad
from routers.types import BlockGroup, Candidate, RankKey


class WorkerState(enum.StrEnum):
    """Whether a worker may be given requests, and if not, why."""

    UNIDENTIFIED = "unidentified"
    READY = "ready"
    PAUSED = "paused"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"


class Member:
    """One worker of the fleet.

    Attributes:
        worker: Address and credentials.
        engine: Engine kind given by the operator, ``None`` to ask.
        pinned_model: Model name given by the operator, which wins over the engine's.
        pinned_role: Role given by the operator, which wins over the engine's.
        facts: What the engine said of itself; kept over failures, so that its model stays known.
        detail: The last reason for not being ready, for people.
        breaker: Opens when its requests fail one after the other.
        last_byte_at: Monotonic time of the last byte that it sent on the data plane.
    """

    __slots__ = (
        "_failures",
        "_healthy_after",
        "_is_draining",
        "_loads",
        "_names",
        "_successes",
        "_unhealthy_after",
        "breaker",
        "detail",
        "engine",
        "facts",
        "is_identified",
        "is_paused",
        "is_up",
        "last_byte_at",
        "on_change",
        "pinned_model",
        "pinned_role",
        "worker",
    )

    def __init__(
        self,
        worker: Worker,
        *,
        engine: EngineKind | None = None,
        pinned_model: str | None = None,
        pinned_role: Role | None = None,
        unhealthy_after: int = 3,
        healthy_after: int = 2,
        breaker: Breaker | None = None,
    ) -> None:
        self.worker: Final = worker
        self.engine: Final = engine
        self.breaker = breaker or Breaker()
        self.pinned_model = pinned_model
        self.pinned_role = pinned_role
        self.facts: EngineFacts | None = None
        self.detail = "not reached yet"
        self.is_identified = False
        self.is_up = False
        self.is_paused = False
        self._is_draining = False
        self.last_byte_at = float("-inf")
        self.on_change: Callable[[Member], None] = lambda member: None
        self._loads: list[RankLoad] = []
        self._names: tuple[str, ...] = (pinned_model,) if pinned_model else ()
        self._failures = 0
        self._successes = 0
        self._unhealthy_after = unhealthy_after
        self._healthy_after = healthy_after

    @property
    def state(self) -> WorkerState:
        """The one word for it; the first reason in the way of requests counts."""
        if self.is_draining:
            return WorkerState.DRAINING
        if not self.is_identified:
            return WorkerState.UNIDENTIFIED if self.facts is None else WorkerState.UNHEALTHY
        if not self.is_up:
            return WorkerState.UNHEALTHY
        return WorkerState.PAUSED if self.is_paused else WorkerState.READY

    @property
    def is_draining(self) -> bool:
        """It is on its way out: no new requests."""
        return self._is_draining

    @is_draining.setter
    def is_draining(self, value: bool) -> None:
        if value is not self._is_draining:
            self._is_draining = value
            self.on_change(self)

    @property
    def model_id(self) -> str | None:
        """Name of the model, ``None`` while it is unknown."""
        return self.pinned_model or (self.facts.model_id if self.facts else None)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that requests may use for what it serves, aliases and adapters included."""
        return self._names

    @property
    def role(self) -> Role:
        """Part in disaggregation."""
        return self.pinned_role or (self.facts.role if self.facts else Role.REGULAR)

    @property
    def dp_size(self) -> int:
        """Number of ranks, 0 while it is unknown."""
        return self.facts.dp_size if self.facts else 0

    @property
    def loads(self) -> tuple[RankLoad, ...]:
        """Booked load by rank."""
        return tuple(self._loads)

    @property
    def in_flight(self) -> int:
        """Requests booked on all ranks."""
        return sum(load.in_flight for load in self._loads)

    def load_of(self, dp_rank: int) -> RankLoad:
        """Booked load of one rank."""
        return self._loads[dp_rank]

    def identified(self, facts: EngineFacts) -> None:
        """The engine has told what it is, and so is up. Loads of ranks stay: their requests may still be live."""
        self.facts = facts
        self._names = tuple(dict.fromkeys((self.pinned_model or facts.model_id, *facts.models)))
        while len(self._loads) < facts.dp_size:
            self._loads.append(RankLoad())
        self.is_identified = True
        self.is_up = True
        self.detail = ""
        self._failures = 0
        self._successes = 0
        self.on_change(self)

    def identify_failed(self, reason: str) -> None:
        """The engine did not tell what it is."""
        self.detail = reason

    def probed(self, result: ProbeResult, *, is_busy: bool) -> None:
        """Take one probe into account, with hysteresis both ways.

        Args:
            result: Outcome of the probe.
            is_busy: The worker has sent bytes since the last probe: then a failed probe is no evidence of death.
        """
        if result is ProbeResult.FAILED:
            self._successes = 0
            if is_busy:
                return
            self._failures += 1
            if self.is_up and self._failures >= self._unhealthy_after:
                self.is_up = False
                self.detail = f"{self._failures} health checks in a row failed"
                self.on_change(self)
            return
        self._failures = 0
        self._successes += 1
        was = self.state
        if not self.is_up and self._successes >= self._healthy_after:
            self.is_identified = False  # what comes back may be another process: it is read again before it is used
        self.is_paused = result is ProbeResult.PAUSED
        if self.state is not was:
            self.on_change(self)

    def lost_contact(self, reason: str) -> None:
        """The data plane could not reach the worker at all: out of rotation at once, the probes bring it back."""
        self._failures = max(self._failures, self._unhealthy_after)
        self._successes = 0
        if self.is_up:
            self.is_up = False
            self.detail = reason
            self.on_change(self)


class Fleet:
    """All workers by id.

    Args:
        on_change: Told of every worker whose state or facts have changed, and of removed ones.

    Attributes:
        tripped: Workers whose breaker is not closed.
        has_vllm: Some worker runs vLLM.
    """

    def __init__(self, on_change: Callable[[Member], None] = lambda member: None) -> None:
        self._members: dict[str, Member] = {}
        self._on_change = on_change
        self._ready: dict[str, tuple[Candidate, ...]] = {}
        self._models: tuple[str, ...] = ()
        self._engines: dict[str, list[EngineKind | None]] = {}
        self._is_one_model = True  # like what is above, asked for with every request
        self.tripped: set[str] = set()
        self.has_vllm = False

    def __iter__(self) -> Iterator[Member]:
        """The members in the order in which they were added."""
        return iter(self._members.values())

    def __len__(self) -> int:
        """Number of members."""
        return len(self._members)

    def get(self, worker_id: str) -> Member | None:
        """The member with that id."""
        return self._members.get(worker_id)

    def add(self, member: Member) -> None:
        """Add a worker; it gets requests once it is identified."""
        self._members[member.worker.id] = member
        member.on_change = self._changed
        self._changed(member)

    def remove(self, worker_id: str) -> None:
        """Forget a worker."""
        member = self._members.pop(worker_id)
        member.is_paused = False  # nobody waits for it any more
        self.tripped.discard(worker_id)
        self._changed(member)

    def engine_of(self, worker_id: str) -> EngineKind | None:
        """Engine kind of a worker, ``None`` while it is unknown."""
        member = self._members.get(worker_id)
        return member.facts.engine if member is not None and member.facts is not None else None

    def sent(self, member: Member, now: float) -> None:
        """A request goes to ``member``; while its breaker is not closed, it is the trial."""
        member.breaker.sent(now)

    def answering(self, member: Member) -> None:
        """The trial that went to ``member`` is being answered; its end may be minutes away."""
        member.breaker.answering()
        if member.breaker.state is BreakerState.CLOSED:
            self.tripped.discard(member.worker.id)

    def restarted(self, member: Member) -> None:
        """``member`` is another process than before, whose failures are not its own."""
        self.succeeded(member)

    def succeeded(self, member: Member) -> None:
        """``member`` has answered a request."""
        member.breaker.succeeded()
        self.tripped.discard(member.worker.id)

    def failed(self, member: Member, now: float) -> None:
        """``member`` has failed a request, through no fault of the request's."""
        member.breaker.failed(now)
        if member.breaker.state is not BreakerState.CLOSED and self._members.get(member.worker.id) is member:
            self.tripped.add(member.worker.id)

    def not_tripped(self, candidates: tuple[Candidate, ...], now: float) -> tuple[Candidate, ...]:
        """Those of ``candidates`` whose breakers let a request through now.

        Raises:
            NoReadyWorker: There are none.
        """
        allowed = tuple(
            candidate
            for candidate in candidates
            if candidate.key.worker_id not in self.tripped or self._members[candidate.key.worker_id].breaker.allows(now)
        )
        if not allowed:
            raise NoReadyWorker("every ready worker has failed its last requests and is left alone for a moment")
        return allowed

    def _changed(self, member: Member) -> None:
        ready: dict[str, list[Candidate]] = {}
        self._engines = {}
        for other in self:
            facts = other.facts
            for name in other.names:
                self._engines.setdefault(name, []).append(facts.engine if facts else other.engine)
            if facts is None or other.state is not WorkerState.READY or other.role is not Role.REGULAR:
                continue
            group = BlockGroup(facts.engine, facts.page_size)
            ranks = [Candidate(RankKey(other.worker.id, r), other.load_of(r), group) for r in range(facts.dp_size)]
            for name in other.names:
                ready.setdefault(name, []).extend(ranks)
        self.has_vllm = any(other.facts is not None and other.facts.engine is EngineKind.VLLM for other in self)
        self._ready = {model: tuple(candidates) for model, candidates in ready.items()}
        self._models = tuple(self._engines)
        self._is_one_model = len({other.model_id for other in self if other.model_id is not None}) <= 1
        self._on_change(member)

    @property
    def models(self) -> tuple[str, ...]:
        """Names of all models that any worker serves or has served, aliases and adapters included."""
        return self._models

    def model_of(self, requested: str | None) -> str:
        """The pool that serves a request.

        Args:
            requested: The request's ``model``; of ``base:adapter`` the workers that have the adapter, else the base.

        Raises:
            ModelRequired: None given, and there are several.
            UnknownModel: Not served here.
            NoReadyWorker: No worker has told its model yet.
        """
        models = self._models
        if not models:
            raise NoReadyWorker("no worker has been reached yet" if len(self) else "there are no workers")
        if requested is None:
            if not self._is_one_model:
                raise ModelRequired("several models are served here, so the request must name one in 'model'")
            return models[0]
        if requested in models:
            return requested
        base = requested
        while ":" in base:  # the names of models may hold colons too, so the longest one that is served counts
            base = base.rpartition(":")[0]
            if base in models:
                adapter = requested[len(base) + 1 :]
                return adapter if adapter in models else base
        raise UnknownModel(f"the model {requested!r} is not served here")

    def candidates(self, model: str) -> tuple[Candidate, ...]:
        """Ranks that can take a request for ``model`` now.

        Raises:
            NoReadyWorker: There are none; the message says why.
        """
        ready = self._ready.get(model)
        if ready:
            return ready
        states = sorted({self.reason(member) for member in self if model in member.names})
        raise NoReadyWorker(f"no worker for the model {model!r} is ready ({', '.join(states) or 'none left'})")

    def engines_serving(self, model: str) -> Sequence[EngineKind | None]:
        """Engine kind, ``None`` while it is unknown, of each worker that serves ``model``, ready or not."""
        return self._engines.get(model, ())

    def has_ready(self, model: str) -> bool:
        """Whether a request for ``model`` can be placed now."""
        return bool(self._ready.get(model))

    def reason(self, member: Member) -> str:
        """Why a member gets no requests, in a word or two."""
        if member.state is WorkerState.READY and member.role is not Role.REGULAR:
            return f"{member.role} worker, which this release cannot pair"
        return str(member.state)

    def valid_ranks(self, model: str) -> int:
        """Largest number of ranks that any worker of ``model`` has."""
        return max((member.dp_size for member in self if model in member.names), default=0)

    def pinned(
        self, candidates: tuple[Candidate, ...], model: str, dp_rank: int | None, worker_id: str | None
    ) -> tuple[Candidate, ...]:
        """Narrow ``candidates`` down to a rank, a worker, or both.

        Raises:
            NoSuchRank: The worker, or no worker of the model, has that rank, or there is no such worker.
            NoReadyWorker: It exists and is not ready.
        """
        ranks = self.valid_ranks(model)
        if worker_id is not None:
            member = self._members.get(worker_id)
            if member is None:
                raise NoSuchRank(f"there is no worker {worker_id!r}", "x-forebay-worker")
            if member.names and model not in member.names:
                raise NoSuchRank(f"the worker {worker_id!r} does not serve {model!r}", "x-forebay-worker")
            ranks = member.dp_size
            candidates = tuple(c for c in candidates if c.key.worker_id == worker_id)
        if dp_rank is not None:
            if dp_rank >= ranks > 0:
                message = f"there is no data-parallel rank {dp_rank}, valid ranks are 0 to {ranks - 1}"
                raise NoSuchRank(message, "x-data-parallel-rank")
            candidates = tuple(c for c in candidates if c.key.dp_rank == dp_rank)
        if not candidates:
            raise NoReadyWorker("the worker or rank that the request is pinned to is not ready")
        return candidates

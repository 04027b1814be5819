"""The set of workers, what is known of each, and who may be given a request now.

Only the loop's thread touches a fleet. Policies get immutable tuples of candidates, made again when a worker's
state changes and not for each request.
"""

from collections.abc import Callable, Iterator, Sequence

from backends.types import EngineKind, Role
from routers.breaker import BreakerState
from routers.errors import ModelRequired, NoReadyWorker, NoRoom, NoSuchRank, UnknownModel
from routers.load import RankLoad
from routers.member import Member, WorkerState
from routers.types import BlockGroup, Candidate, RankKey

__all__ = ["Fleet", "Member", "WorkerState"]


class Fleet:
    """All workers by id.

    Args:
        on_change: Told of every worker whose state or facts have changed, and of removed ones.
        on_room: Told when there may be room where there was none, all else being as it was.

    Attributes:
        full: Ranks that have as many requests as they are given at once.
        tripped: Workers whose breaker is not closed.
        has_vllm: Some worker runs vLLM.
    """

    def __init__(
        self, on_change: Callable[[Member], None] = lambda member: None, on_room: Callable[[], None] = lambda: None
    ) -> None:
        self._members: dict[str, Member] = {}
        self._on_change = on_change
        self._on_room = on_room
        self._ready: dict[str, tuple[Candidate, ...]] = {}
        self._models: tuple[str, ...] = ()
        self._engines: dict[str, list[EngineKind | None]] = {}
        self._is_one_model = True  # like what is above, asked for with every request
        self.full: set[RankLoad] = set()
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
        member.on_fullness = self._fullness_changed
        self.full.update(load for load in member.loads if load.is_full)
        self._changed(member)

    def remove(self, worker_id: str) -> None:
        """Forget a worker."""
        member = self._members.pop(worker_id)
        member.is_paused = False  # nobody waits for it any more
        self.tripped.discard(worker_id)
        member.on_fullness = lambda load: None
        self.full.difference_update(member.loads)
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
            self._untrip(member)

    def restarted(self, member: Member) -> None:
        """``member`` is another process than before, whose failures are not its own."""
        self.succeeded(member)

    def succeeded(self, member: Member) -> None:
        """``member`` has answered a request."""
        member.breaker.succeeded()
        self._untrip(member)

    def _untrip(self, member: Member) -> None:
        if member.worker.id in self.tripped:
            self.tripped.discard(member.worker.id)
            self._on_room()

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

    def with_room(self, candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        """Those of ``candidates`` that are not full.

        Raises:
            NoRoom: All are.
        """
        roomy = tuple(candidate for candidate in candidates if not candidate.load.is_full)
        if not roomy:
            raise NoRoom("every worker that may take the request has as many as it is given at once")
        return roomy

    def _fullness_changed(self, load: RankLoad) -> None:
        if load.is_full:
            self.full.add(load)
        else:
            self.full.discard(load)
            self._on_room()

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

    def is_paused_for(self, model: str, can_take: Callable[[Member], bool]) -> bool:
        """Whether a paused worker of ``model`` could take a request if it were not paused.

        Args:
            model: The pool.
            can_take: Whether the request could go to a member at all.
        """
        return any(
            member.state is WorkerState.PAUSED and member.role is Role.REGULAR and can_take(member)
            for member in self
            if model in member.names
        )

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

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
from routers.pair import Pools, can_serve
from routers.types import BlockGroup, Candidate, RankKey

__all__ = ["Fleet", "Member", "WorkerState"]

_NOBODY = Pools()


class Fleet:
    """All workers by id.

    Args:
        on_change: Told of every worker whose state or facts have changed, and of removed ones.
        on_room: Told when there may be room where there was none, all else being as it was.
        prefill_clock: Monotonic seconds, by which to tell how much of a rank's prefill is done; ``None`` counts each
            in full until its first token.

    Attributes:
        full: Ranks that have as many requests as they are given at once.
        tripped: Workers whose breaker is not closed.
        has_vllm: Some worker runs vLLM.
    """

    def __init__(
        self,
        on_change: Callable[[Member], None] = lambda member: None,
        on_room: Callable[[], None] = lambda: None,
        prefill_clock: Callable[[], float] | None = None,
    ) -> None:
        self._members: dict[str, Member] = {}
        self._on_change = on_change
        self._on_room = on_room
        self._prefill_clock = prefill_clock
        self._ready: dict[str, tuple[Candidate, ...]] = {}
        self._pools: dict[str, Pools] = {}
        self._paired: frozenset[str] = frozenset()
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
        if self._prefill_clock is not None:
            member.time_prefills(self._prefill_clock)
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
        allowed = tuple(candidate for candidate in candidates if self.is_let_through(candidate.key.worker_id, now))
        if not allowed:
            raise NoReadyWorker("every ready worker has failed its last requests and is left alone for a moment")
        return allowed

    def is_let_through(self, worker_id: str, now: float) -> bool:
        """Whether a worker's breaker lets a request through now."""
        return worker_id not in self.tripped or self._members[worker_id].breaker.allows(now)

    def has_weights(self, worker_id: str, at_least: int) -> bool:
        """Whether a worker's weights are known to be of a version or a later one."""
        member = self._members.get(worker_id)
        number = member.weight_number if member is not None else None
        return number is not None and number >= at_least

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
        self._engines = {}
        for other in self:
            kind = other.facts.engine if other.facts else other.engine
            for name in other.names:
                self._engines.setdefault(name, []).append(kind)
        self.has_vllm = any(other.facts is not None and other.facts.engine is EngineKind.VLLM for other in self)
        self._pools = self._ranks_by_role(WorkerState.READY)
        self._ready = {model: tuple(pools.regular) for model, pools in self._pools.items() if pools.regular}
        self._paired = frozenset(name for other in self if other.role is not Role.REGULAR for name in other.names)
        self._models = tuple(self._engines)
        self._is_one_model = len({other.model_id for other in self if other.model_id is not None}) <= 1
        self._on_change(member)

    def _ranks_by_role(self, state: WorkerState) -> dict[str, Pools]:
        """The ranks of all workers that are in one state, by model."""
        found: dict[str, dict[Role, list[Candidate]]] = {}
        groups: dict[BlockGroup, BlockGroup] = {}
        for member in self:
            facts = member.facts
            if facts is None or member.state is not state:
                continue
            group = BlockGroup(facts.engine, facts.page_size)
            group = groups.setdefault(group, group)  # one object for all, which is known at a glance
            ranks = [Candidate(RankKey(member.worker.id, r), member.load_of(r), group) for r in range(facts.dp_size)]
            for name in member.names:
                found.setdefault(name, {}).setdefault(member.role, []).extend(ranks)
        return {
            name: Pools(**{str(role): tuple(ranks) for role, ranks in by_role.items()})
            for name, by_role in found.items()
        }

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
        raise self.none_ready(model)

    def none_ready(self, model: str) -> NoReadyWorker:
        """Why no worker of ``model`` gets requests."""
        found = [member for member in self if model in member.names]
        states = sorted({f"{m.role} alone" if m.state is WorkerState.READY else self.reason(m) for m in found})
        return NoReadyWorker(f"no worker for the model {model!r} is ready ({', '.join(states) or 'none left'})")

    def has_pairs(self, model: str) -> bool:
        """Whether a prefill or decode worker, ready or not, serves ``model``."""
        return model in self._paired

    def pools(self, model: str) -> Pools:
        """Ranks of ready workers of ``model``, whatever their role; all pools may be empty."""
        return self._pools.get(model, _NOBODY)

    def paused(self, model: str) -> Pools:
        """Ranks of paused workers of ``model``."""
        return self._ranks_by_role(WorkerState.PAUSED).get(model, _NOBODY)

    def engines_serving(self, model: str) -> Sequence[EngineKind | None]:
        """Engine kind, ``None`` while it is unknown, of each worker that serves ``model``, ready or not."""
        return self._engines.get(model, ())

    def has_ready(self, model: str) -> bool:
        """Whether a request for ``model`` can be placed now."""
        return can_serve(self.pools(model))

    def reason(self, member: Member) -> str:
        """Why a member gets no requests, in a word or two; ``ready`` if it gets some."""
        if member.state is not WorkerState.READY or member.role is Role.REGULAR or member.facts is None:
            return str(member.state)
        engine = member.facts.engine
        if member.role is Role.DECODE and engine is EngineKind.VLLM:
            return str(member.state)  # it can serve alone
        other = Role.DECODE if member.role is Role.PREFILL else Role.PREFILL
        for name in member.names:
            pools = self.pools(name)
            partners = pools.decode if other is Role.DECODE else pools.prefill
            if any(one.group is not None and one.group.engine is engine for one in partners):
                return str(member.state)
        return f"{member.role} worker without a ready {other} worker"

    def valid_ranks(self, model: str) -> int:
        """Largest number of ranks that any worker of ``model`` has that answers requests; prefill workers do not."""
        found = (member.dp_size for member in self if model in member.names and member.role is not Role.PREFILL)
        return max(found, default=0)

    def pinned(
        self, candidates: tuple[Candidate, ...], model: str, dp_rank: int | None, worker_id: str | None
    ) -> tuple[Candidate, ...]:
        """Narrow ``candidates`` down to a rank, a worker, or both.

        Raises:
            NoSuchRank: The worker, or no worker of the model, has that rank, or there is no such worker.
            NoReadyWorker: It exists and is not ready.
        """
        self.check_pins(model, dp_rank, worker_id)
        if worker_id is not None:
            candidates = tuple(c for c in candidates if c.key.worker_id == worker_id)
        if dp_rank is not None:
            candidates = tuple(c for c in candidates if c.key.dp_rank == dp_rank)
        if not candidates:
            raise NoReadyWorker("the worker or rank that the request is pinned to is not ready")
        return candidates

    def check_pins(self, model: str, dp_rank: int | None, worker_id: str | None) -> None:
        """See that what a request is pinned to exists, ready or not.

        Raises:
            NoSuchRank: The worker, or no worker of the model, has that rank, or there is no such worker.
        """
        ranks = self.valid_ranks(model)
        if worker_id is not None:
            member = self._members.get(worker_id)
            if member is None:
                raise NoSuchRank(f"there is no worker {worker_id!r}", "x-forebay-worker")
            if member.names and model not in member.names:
                raise NoSuchRank(f"the worker {worker_id!r} does not serve {model!r}", "x-forebay-worker")
            if member.role is not Role.PREFILL:  # beside which any decode worker may answer
                ranks = member.dp_size
        if dp_rank is not None and dp_rank >= ranks > 0:
            message = f"there is no data-parallel rank {dp_rank}, valid ranks are 0 to {ranks - 1}"
            raise NoSuchRank(message, "x-data-parallel-rank")

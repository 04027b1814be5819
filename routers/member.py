"""One worker of the fleet: its state as probes and requests show it, and what is booked on its ranks. Pure."""

import enum
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from backends.types import EngineFacts, EngineKind, ProbeResult, Role, Worker
from routers.breaker import Breaker
from routers.load import RankLoad
from routers.prefill_pace import PrefillPace

# More digits are no version that anybody counts up.
MAX_VERSION_DIGITS = 64

# What a worker gets at once, in requests that its engine runs at once: what is above 1 waits in the engine, so that
# a place that becomes free there is filled before the news of it is here.
IN_FLIGHT_PER_RUNNING = 1.25


def version_number(text: str | None) -> int | None:
    """A label of weights as a decimal integer, ``None`` if it is not one; then it is not comparable with any."""
    if text is None or len(text) > MAX_VERSION_DIGITS or not (text.isascii() and text.isdigit()):
        return None
    return int(text)


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
        max_in_flight: Requests that it gets at once, given by the operator; ``None`` to go by the engine's own limit.
        pauses_told: Answers to our own pauses and continues; a probe that was under way when it grew is out of date.
        last_byte_at: Monotonic time of the last byte that it sent on the data plane.
    """

    __slots__ = (
        "_clock",
        "_failures",
        "_healthy_after",
        "_is_draining",
        "_loads",
        "_names",
        "_pauses_due",
        "_successes",
        "_unhealthy_after",
        "_weights_asked",
        "_weights_told",
        "breaker",
        "detail",
        "engine",
        "facts",
        "is_identified",
        "is_paused",
        "is_up",
        "last_byte_at",
        "max_in_flight",
        "on_change",
        "on_fullness",
        "pauses_told",
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
        max_in_flight: int | None = None,
    ) -> None:
        self.worker: Final = worker
        self.engine: Final = engine
        self.breaker = breaker or Breaker()
        self.max_in_flight: Final = max_in_flight
        self.pinned_model = pinned_model
        self.pinned_role = pinned_role
        self.facts: EngineFacts | None = None
        self.detail = "not reached yet"
        self.is_identified = False
        self.is_up = False
        self.is_paused = False
        self.pauses_told = 0
        self._is_draining = False
        self.last_byte_at = float("-inf")
        self.on_change: Callable[[Member], None] = lambda member: None
        self.on_fullness: Callable[[RankLoad], None] = lambda load: None
        self._loads: list[RankLoad] = []
        self._clock: Callable[[], float] | None = None
        self._names: tuple[str, ...] = (pinned_model,) if pinned_model else ()
        self._failures = 0
        self._successes = 0
        self._unhealthy_after = unhealthy_after
        self._healthy_after = healthy_after
        self._weights_asked = 0
        self._weights_told = 0
        self._pauses_due = 0

    @property
    def state(self) -> WorkerState:
        """The one word for it; the first reason in the way of requests counts."""
        if self.is_draining:
            return WorkerState.DRAINING
        if not self.is_identified:
            return WorkerState.UNIDENTIFIED if self.facts is None else WorkerState.UNHEALTHY
        if not self.is_up:
            return WorkerState.UNHEALTHY
        return WorkerState.PAUSED if self.is_paused or self._pauses_due else WorkerState.READY

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
    def weight_number(self) -> int | None:
        """The version of its weights, ``None`` if that is unknown or no decimal integer."""
        return version_number(self.facts.weight_version) if self.facts else None

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
    def role_conflict(self) -> str:
        """What the engine says against the role that was given, for people; empty if nothing. vLLM tells no role."""
        told = self.facts.role if self.facts is not None and self.facts.engine is EngineKind.SGLANG else None
        if self.pinned_role is None or told in (None, self.pinned_role):
            return ""
        return f"given as {self.pinned_role}, but its engine says {told}"

    @property
    def bootstrap_port(self) -> int | None:
        """Where it hands prompts over if it is a prefill worker of SGLang's, ``None`` if nobody says."""
        return self.worker.bootstrap_port or (self.facts.bootstrap_port if self.facts else None)

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

    @property
    def max_in_flight_per_rank(self) -> float:
        """Requests that one rank gets at once, ``math.inf`` where no limit is known."""
        running = self.facts.max_running_requests if self.facts else None
        if self.max_in_flight is None and running is None:
            return math.inf
        limit = self.max_in_flight or IN_FLIGHT_PER_RUNNING * (running or 0)
        return max(math.ceil(limit / max(self.dp_size, 1)), 1)

    def time_prefills(self, clock: Callable[[], float]) -> None:
        """Estimate from now on how much of each rank's prefill is done."""
        self._clock = clock
        for load in self._loads:
            self._pace(load)

    def _pace(self, load: RankLoad) -> None:
        if self._clock is not None:
            load.pace = PrefillPace(self._clock)

    def load_of(self, dp_rank: int) -> RankLoad:
        """Booked load of one rank."""
        return self._loads[dp_rank]

    def identified(self, facts: EngineFacts) -> None:
        """The engine has told what it is, and so is up. Loads of ranks stay: their requests may still be live."""
        self.facts = facts
        self._names = tuple(dict.fromkeys((self.pinned_model or facts.model_id, *facts.models)))
        while len(self._loads) < facts.dp_size:
            self._loads.append(RankLoad(lambda load: self.on_fullness(load)))
            self._pace(self._loads[-1])
        for load in self._loads:
            load.set_limit(self.max_in_flight_per_rank)
        self.is_identified = True
        self.is_up = True
        self.detail = ""
        self._failures = 0
        self._successes = 0
        self.on_change(self)

    def asks_weights(self) -> int:
        """The engine is about to be asked for the version of its weights; the number goes with its answer."""
        self._weights_asked += 1
        return self._weights_asked

    def with_weights(self, facts: EngineFacts, asked: int) -> EngineFacts:
        """``facts`` with the newest version that is known: an answer may be overtaken by that to a later question."""
        if asked < self._weights_told and self.facts is not None:
            return replace(facts, weight_version=self.facts.weight_version)
        self._weights_told = asked
        return facts

    def weights_are(self, version: str | None, asked: int) -> None:
        """The engine has told the version of its weights; one that was asked for earlier than the last is dropped."""
        if self.facts is None or asked < self._weights_told:
            return
        self._weights_told = asked
        if version != self.facts.weight_version:
            self.facts = replace(self.facts, weight_version=version)
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

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """While we ask the engine to pause it gets nothing: what comes to it after that is kept until the continue."""
        self._pauses_due += 1
        if self._pauses_due == 1:
            self.on_change(self)
        try:
            yield
        finally:
            self._pauses_due -= 1
            if not self._pauses_due and not self.is_paused:
                self.on_change(self)

    def paused_by_us(self, is_paused: bool) -> None:
        """The engine has answered our own pause, or our continue; from the next probe on that one's word counts."""
        self.pauses_told += 1
        if is_paused is not self.is_paused:
            self.is_paused = is_paused
            self.on_change(self)

    def lost_contact(self, reason: str) -> None:
        """The data plane could not reach the worker at all: out of rotation at once, the probes bring it back."""
        self._failures = max(self._failures, self._unhealthy_after)
        self._successes = 0
        if self.is_up:
            self.is_up = False
            self.detail = reason
            self.on_change(self)

"""What every exchange shares."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from backends.abort_supervisor import AbortSupervisor
from backends.base import Backend
from backends.pair_types import Overlap, PairTimes
from backends.types import EngineKind, Worker
from backends.upstream.base import UpstreamClient
from gateway.access_log import AccessRecord
from gateway.coalescing import Coalescer
from gateway.deadlines import NO_LIMITS, TimeLimits
from gateway.kv_metrics import KvMetrics
from gateway.kv_view import KvView
from gateway.live import LiveLegs, LiveRequests
from gateway.metrics import Metrics
from gateway.native_request import NativeWorkers
from gateway.pair_metrics import PairMetrics
from gateway.prefill_tails import PrefillTails
from gateway.prefixes import Prefixes
from gateway.waiting_room import WaitingRoom
from routers.base import Router
from routers.fleet import Fleet
from routers.pair import PairRouter


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds that requests are held to.

    Attributes:
        max_body_bytes: Bound of a request's body.
        max_response_bytes: Bound of a unary answer and of one event.
        max_attempts: Attempts at workers for one request.
        sse_done_after_error: An error event is followed by ``[DONE]``.
        sse_keepalive_s: Silence after which a comment is sent to a streaming client, 0 for never.
        folds_unary: Engines are asked to stream for unary clients too, and the events folded.
        native_n: Unary requests for several samples go to the engine as they are.
        native_increments: Events of native requests on vLLM hold what is new.
        client_timeout_s: What a client gets to send a request, 0 for no limit.
        time: Time limits of a request.
        pair_times: Durations of a request over a prefill and a decode worker.
        overlap: When decode is sent, where it need not wait for prefill's end.
    """

    max_body_bytes: int
    max_response_bytes: int
    max_attempts: int
    sse_done_after_error: bool
    sse_keepalive_s: float = 0.0
    folds_unary: bool = False
    native_n: bool = False
    native_increments: bool = False
    client_timeout_s: float = 0.0
    time: TimeLimits = NO_LIMITS
    pair_times: PairTimes = field(default_factory=PairTimes)
    overlap: Overlap = Overlap.HEADERS


@dataclass(slots=True, kw_only=True)
class Services:
    """The parts that requests are served with; made by the composition root.

    Attributes:
        limits: Bounds.
        fleet: The workers.
        policy: Chooses among them.
        pairs: Chooses where prefill and decode workers serve the model.
        client: Carries the data plane's calls.
        backends: One for each engine kind.
        aborter: Owns what outlives a request.
        waiting: Places requests, at once or in their turn.
        live: The requests being served.
        legs: Their upstream requests, and those whose client is gone.
        kv: What is known of the engines' caches.
        kv_metrics: Counters of that.
        prefixes: What is known of prompts, and of who holds their beginnings.
        coalescer: Holds requests back that would compute what another one computes already.
        metrics: Counters.
        log_access: Takes one record for each request.
        clock: Monotonic seconds.
        wall_clock: Seconds since the epoch.
        is_alive: Whether a worker that dropped a connection still takes one.
        new_id: Makes a fresh 32-hex id.
        is_draining: Nothing is admitted any more.
        live_rooms: Under which prefill and decode workers hand over the prompts of live requests.
        room_bits: Draws them.
        tails: Reads the legs of pairs, and owns prefills that nobody waits for.
        pair_metrics: Counters of pairs.
        native_workers: What vLLM workers lack that SGLang's native requests need.
    """

    limits: Limits
    fleet: Fleet
    policy: Router
    pairs: PairRouter
    client: UpstreamClient
    backends: dict[EngineKind, Backend]
    aborter: AbortSupervisor
    waiting: WaitingRoom
    live: LiveRequests
    legs: LiveLegs
    kv: KvView
    kv_metrics: KvMetrics
    prefixes: Prefixes
    coalescer: Coalescer
    metrics: Metrics
    log_access: Callable[[AccessRecord], None]
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    is_alive: Callable[[Worker], Awaitable[bool]]
    new_id: Callable[[], str]
    tails: PrefillTails
    pair_metrics: PairMetrics
    is_draining: bool = False
    live_rooms: set[int] = field(default_factory=set)
    room_bits: random.Random = field(default_factory=random.SystemRandom)
    native_workers: NativeWorkers = field(default_factory=NativeWorkers)

"""Crowds, bursts and paced traffic on the policy ``kv-aware`` with its bookings: nobody is swamped, nobody starves."""

import random
from collections import Counter, deque
from collections.abc import Callable

import pytest

from backends.types import EngineKind
from kv_events.index_types import Overlap
from routers.assumed import PREDICTED_TTL_S, AssumedBlocks
from routers.cost import DECODE_COST, CostParameters
from routers.kv_aware import Guard, KvAware
from routers.load import RankBooking, RankLoad
from routers.types import BlockGroup, Candidate, PromptBlocks, RankKey, RouteRequest

GROUP = BlockGroup(EngineKind.SGLANG, 16)
SYSTEM = [10**9 + index for index in range(125)]  # 2,000 tokens


class Site:
    """Ranks behind a policy; what each holds is said by hand, or predicted."""

    def __init__(
        self,
        workers: int,
        parameters: CostParameters | None = None,
        *,
        predicts: bool = False,
        guard: Guard | None = None,
    ) -> None:
        self.candidates = [Candidate(RankKey(f"w{index}", 0), RankLoad(), GROUP) for index in range(workers)]
        rng, parameters = random.Random(5), parameters or CostParameters()
        self.policy = KvAware(rng, parameters) if guard is None else KvAware(rng, parameters, guard=guard)
        self.cached: dict[tuple[str, int], int] = {}
        self.predicted = AssumedBlocks(PREDICTED_TTL_S) if predicts else None
        self.sent: Counter[str] = Counter()

    def send(self, hashes: list[int], now: float = 0.0) -> RankBooking:
        """Place a request and book it, as one step."""
        tokens = len(hashes) * 16 + 7
        prompt = PromptBlocks(16, tokens, hashes, Overlap(dict(self.cached)))
        if self.predicted is not None:
            self.predicted.merge_into(prompt.overlap, hashes, now)
        placement = self.policy.select(RouteRequest(tokens, None, {GROUP: prompt}), self.candidates)
        assert placement.overlap_blocks is not None
        self.sent[placement.candidate.key.worker_id] += 1
        if self.predicted is not None:
            self.predicted.add(placement.candidate.key, hashes, now)
        return placement.candidate.load.book(
            requests=1,
            blocks=prompt.capacity_blocks,
            prefill_tokens=prompt.uncached_tokens(placement.overlap_blocks),
            block_hashes=hashes,
        )

    @property
    def in_flight(self) -> list[int]:
        return [candidate.load.in_flight for candidate in self.candidates]


def tail(number: int, blocks: int = 10) -> list[int]:
    """Blocks of one request alone."""
    return [number * 1000 + index for index in range(blocks)]


@pytest.mark.parametrize("blocks", [0, 1, 63, 600])
@pytest.mark.parametrize("prefilled", ["none", "all"])
def test_a9_5_equal_requests_spread_evenly_over_idle_workers(blocks: int, prefilled: str) -> None:
    site = Site(4)
    bookings = []
    for _ in range(50):
        bookings.append(site.send(tail(1, blocks)))
        if prefilled == "all":
            bookings[-1].first_token()
    assert sorted(site.in_flight) == [12, 12, 13, 13]
    for booking in bookings:
        booking.release()
    assert all(candidate.load.is_idle for candidate in site.candidates)


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
@pytest.mark.parametrize("prefilled", ["none", "every other", "all"])
@pytest.mark.parametrize("predicts", [False, True], ids=["events only", "predicting"])
@pytest.mark.parametrize("guard", [None, "shared"])
def test_a9_6_a_shared_system_prompt_makes_no_hot_spot(
    workers: int, prefilled: str, predicts: bool, guard: Guard | None
) -> None:
    site = Site(workers, predicts=predicts, guard=guard)
    site.cached = {("w0", 0): len(SYSTEM)}
    for number in range(100):
        booking = site.send(SYSTEM + tail(number))
        if prefilled == "all" or (prefilled == "every other" and number % 2):
            booking.first_token()
    assert max(site.in_flight) <= 1.6 * 100 / workers
    assert sum(site.in_flight) == 100
    # It is no way to get there to ignore the cache.
    assert site.sent["w0"] >= 100 // workers


@pytest.mark.parametrize("blocks", [0, 3])
def test_a9_7_paced_traffic_without_load_terms_still_rotates(blocks: int) -> None:
    site = Site(4, CostParameters(prefill_load_scale=0.0, track_active_blocks=False))
    for number in range(400):
        site.send(tail(number, blocks)).release()
    assert len(site.sent) == 4
    assert min(site.sent.values()) > 60


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("cached", [0, 1], ids=["nothing cached", "one has the template"])
def test_a9_8_single_turns_do_not_starve_a_decode_worker(concurrency: int, cached: int) -> None:
    site = Site(3, DECODE_COST)
    live: deque[RankBooking] = deque()
    for number in range(600):
        site.cached = {("w0", 0): cached}
        live.append(site.send([7, *tail(number)]))
        live[-1].first_token()
        if len(live) == concurrency:
            live.popleft().release()
    assert min(site.sent.values()) > 120


def test_unique_prompts_leave_a_saturated_worker_alone() -> None:
    site = Site(2)
    for number in range(20):
        site.candidates[0].load.book(requests=1, blocks=10, prefill_tokens=0, block_hashes=tail(number))
    for number in range(100, 110):
        site.send(tail(number))
    assert site.sent == {"w1": 10}


def _siblings(site: Site, now: Callable[[int], float]) -> None:
    for number in range(4):
        site.send(SYSTEM, now(number)).first_token()


def test_q_13_a_burst_of_siblings_is_computed_once() -> None:
    blind, site = Site(4), Site(4, predicts=True)
    _siblings(blind, lambda number: number / 100)
    assert len(blind.sent) == 4
    _siblings(site, lambda number: number / 100)
    assert len(site.sent) == 1
    paced = Site(4, predicts=True)
    for number in range(40):
        paced.send(SYSTEM, number * PREDICTED_TTL_S).release()
    assert len(paced.sent) == 4


def test_choosing_and_counting_are_one_step() -> None:
    site = Site(8)
    for number in range(200):
        site.send(tail(number))
    assert max(site.in_flight) - min(site.in_flight) <= 1

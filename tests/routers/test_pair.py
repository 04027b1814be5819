"""Which requests go over a pair, over which two ranks, and why none can be had."""

import random
from collections import Counter
from typing import Any

import pytest

from backends.types import EngineKind, Role
from kv_events.index_types import Overlap
from routers.least_loaded import LeastLoaded
from routers.load import RankLoad
from routers.pair import ABANDONED_WINDOW_S, Alone, NoPair, Paired, PairHealth, PairRouter, Pins, Pools, kv_aware_pairs
from routers.types import BlockGroup, Candidate, PromptBlocks, RankKey, RouteRequest

SGLANG = BlockGroup(EngineKind.SGLANG, 16)
VLLM = BlockGroup(EngineKind.VLLM, 16)
TOKENS = 1600


def rank(name: str, group: BlockGroup | None = SGLANG, dp_rank: int = 0) -> Candidate:
    return Candidate(RankKey(name, dp_rank), RankLoad(), group)


def busy(candidate: Candidate, *, blocks: int = 0, tokens: int = 0, requests: int = 1) -> Candidate:
    candidate.load.book(requests=requests, blocks=blocks, prefill_tokens=tokens)
    return candidate


def request(tokens: int = TOKENS, group: BlockGroup = SGLANG, **device: int) -> RouteRequest:
    overlap = Overlap(device={(name, 0): blocks for name, blocks in device.items()})
    hashes = list(range(10**6, 10**6 + tokens // 16))
    return RouteRequest(tokens, None, {group: PromptBlocks(16, tokens, hashes, overlap)})


def pools(prefill: list[Candidate], decode: list[Candidate], regular: list[Candidate] | None = None) -> Pools:
    return Pools(prefill=prefill, decode=decode, regular=regular or [])


def where(choice: Alone | Paired) -> tuple[str, ...]:
    placements = (choice.placement,) if isinstance(choice, Alone) else (choice.prefill, choice.decode)
    return tuple(placement.candidate.key.worker_id for placement in placements)


def choose(asked: RouteRequest, there: Pools, *, short: int = 0, **more: Any) -> tuple[str, ...]:
    return where(kv_aware_pairs(random.Random(1), short).select(asked, there, 0.0, **more))


@pytest.mark.parametrize(
    ("prefill", "decode", "asked", "expected"),
    [
        pytest.param(
            [rank("p0"), rank("p1")], [rank("d0")], request(p1=50), ("p1", "d0"), id="prefill where it is cached"
        ),
        pytest.param(
            [rank("p0"), busy(rank("p1"), tokens=16_000)], [rank("d0")], request(p1=50), ("p0", "d0"),
            id="unless much more is to be computed there",
        ),
        pytest.param(
            [busy(rank("p0"), blocks=9999), busy(rank("p1"), tokens=16)], [rank("d0")], request(), ("p0", "d0"),
            id="blocks in use count for nothing in prefill",
        ),
        pytest.param(
            [rank("p0")], [rank("d0"), busy(rank("d1"), blocks=10)], request(d1=100), ("p0", "d0"),
            id="decode by load, whatever is cached",
        ),
        pytest.param(
            [rank("p0")], [busy(rank("d0"), blocks=11), busy(rank("d1"), blocks=10, tokens=99999)], request(),
            ("p0", "d1"), id="tokens to prefill count for nothing in decode",
        ),
        pytest.param(
            [rank("p0"), busy(rank("p1"))], [busy(rank("d0")), rank("d1")], RouteRequest(), ("p0", "d1"),
            id="an unknown prompt goes by load alone",
        ),
        pytest.param(
            [rank("v", VLLM), rank("s")], [rank("d")], request(v=100), ("s", "d"), id="only of one engine kind"
        ),
        pytest.param(
            [rank("x", None), rank("s")], [rank("y", None), rank("d")], request(), ("s", "d"),
            id="an unknown engine is not paired",
        ),
    ],
)  # fmt: skip
def test_pairs(
    prefill: list[Candidate], decode: list[Candidate], asked: RouteRequest, expected: tuple[str, str]
) -> None:
    assert choose(asked, pools(prefill, decode)) == expected


def test_what_is_booked() -> None:
    there = pools([rank("p0")], [rank("d0")])
    choice = kv_aware_pairs(random.Random(1)).select(request(p0=50, d0=50), there, 0.0)
    assert isinstance(choice, Paired)
    assert choice.prefill.overlap_blocks == 50
    assert choice.prefill.prompt is not None
    assert choice.prefill.prompt.uncached_tokens(50) == TOKENS - 50 * 16
    assert choice.decode.overlap_blocks == 0
    assert choice.decode.prompt is not None
    assert choice.decode.prompt.capacity_blocks == 100
    assert not choice.decode.prompt.sequence_hashes  # nothing is shared with other requests


def test_single_turns_spread_over_decode() -> None:
    """A9.8: with equal prompts that are all cached on one decode worker, none starves."""
    router = kv_aware_pairs(random.Random(1))
    decode = [rank("d0"), rank("d1"), rank("d2")]
    seen: Counter[str] = Counter()
    for _ in range(30):
        choice = router.select(request(d0=100), pools([rank("p0")], decode), 0.0)
        assert isinstance(choice, Paired)
        seen[choice.decode.candidate.key.worker_id] += 1
        choice.decode.candidate.load.book(requests=1, blocks=100, prefill_tokens=0)
    assert seen == {"d0": 10, "d1": 10, "d2": 10}


@pytest.mark.parametrize(
    ("asked", "there", "short", "expected"),
    [
        pytest.param(request(160), pools([rank("p")], [rank("d")], [rank("r")]), 160, ("r",), id="short"),
        pytest.param(request(161), pools([rank("p")], [rank("d")], [rank("r")]), 160, ("p", "d"), id="not short"),
        pytest.param(
            request(320, r=10), pools([rank("p")], [rank("d")], [rank("r")]), 160, ("r",), id="short, the cache counted"
        ),
        pytest.param(request(16), pools([rank("p")], [rank("d")], [rank("r")]), 0, ("p", "d"), id="off"),
        pytest.param(request(16), pools([rank("p")], [rank("d")]), 160, ("p", "d"), id="SGLang's decode cannot"),
        pytest.param(
            request(16, VLLM), pools([rank("p", VLLM)], [rank("d", VLLM)]), 160, ("d",), id="vLLM's decode can"
        ),
        pytest.param(
            RouteRequest(), pools([rank("p")], [rank("d")], [rank("r")]), 160, ("p", "d"), id="of unknown length"
        ),
        pytest.param(
            RouteRequest(100), pools([rank("p")], [rank("d")], [rank("r")]), 160, ("r",), id="length without blocks"
        ),
    ],
)
def test_short_prompts_go_to_one_worker(
    asked: RouteRequest, there: Pools, short: int, expected: tuple[str, ...]
) -> None:
    assert choose(asked, there, short=short) == expected


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        pytest.param(pools([], [rank("d")], [rank("r")]), ("r",), id="no prefill: a regular one"),
        pytest.param(pools([rank("p")], [], [rank("r")]), ("r",), id="no decode: a regular one"),
        pytest.param(pools([], [rank("d", VLLM)]), ("d",), id="Q.5: no prefill: vLLM's decode alone"),
        pytest.param(pools([rank("p")], [rank("d", VLLM)]), ("d",), id="no engines that fit"),
    ],
)
def test_without_a_pair(there: Pools, expected: tuple[str, ...]) -> None:
    assert choose(request(), there) == expected


def test_requests_that_no_pair_serves() -> None:
    assert choose(request(), pools([rank("p")], [rank("d")], [rank("r")]), needs_one_worker=True) == ("r",)
    with pytest.raises(NoPair, match="serves requests alone") as caught:
        choose(request(), pools([rank("p")], [rank("d")]), needs_one_worker=True)
    assert caught.value.missing is Role.REGULAR


@pytest.mark.parametrize(
    ("there", "missing", "match"),
    [
        pytest.param(pools([], [rank("d")]), Role.PREFILL, "no prefill worker", id="case 89: prefill is missing"),
        pytest.param(pools([rank("p")], []), Role.DECODE, "no decode worker", id="decode is missing"),
        pytest.param(pools([], []), Role.PREFILL, "no prefill worker", id="all is missing"),
        pytest.param(pools([rank("p", VLLM)], [rank("d")]), None, "different engines", id="no engines that fit"),
        pytest.param(pools([rank("p", None)], [rank("d", None)]), None, "different engines", id="unknown engines"),
    ],
)
def test_reasons(there: Pools, missing: Role | None, match: str) -> None:
    with pytest.raises(NoPair, match=match) as caught:
        choose(request(), there)
    assert caught.value.missing is missing


FLEET = pools(
    [rank("p0"), rank("p1")],
    [rank("d0", dp_rank=0), rank("d0", dp_rank=1), rank("d1")],
    [rank("r0"), rank("r0", dp_rank=1)],
)


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        pytest.param(Pins(worker_id="p1"), ("p1", None), id="prefill"),
        pytest.param(Pins(worker_id="d1"), (None, "d1"), id="decode"),
        pytest.param(Pins(worker_id="r0"), ("r0",), id="regular"),
        pytest.param(Pins(dp_rank=1), (None, "d0"), id="decode's rank"),
        pytest.param(Pins(worker_id="p0", dp_rank=1), ("p0", "d0"), id="prefill and decode's rank"),
    ],
)
def test_pins(pins: Pins, expected: tuple[str | None, ...]) -> None:
    found = choose(request(), FLEET, pins=pins)
    assert len(found) == len(expected)
    assert all(want in (None, got) for want, got in zip(expected, found, strict=True))


def test_a_pinned_rank_is_that_of_whoever_answers() -> None:
    choice = kv_aware_pairs(random.Random(1)).select(request(), FLEET, 0.0, pins=Pins(dp_rank=1))
    assert isinstance(choice, Paired)
    assert choice.decode.candidate.key.dp_rank == 1


@pytest.mark.parametrize(
    ("pins", "there", "match"),
    [
        pytest.param(Pins(worker_id="x"), FLEET, "pinned to is not ready", id="worker"),
        pytest.param(Pins(dp_rank=7), FLEET, "rank that the request is pinned to", id="rank"),
        pytest.param(
            Pins(worker_id="p"), pools([rank("p", VLLM)], [rank("d")], [rank("r")]), "different", id="no partner"
        ),
        pytest.param(
            Pins(worker_id="p"), pools([rank("p")], [rank("d", VLLM)]), "different", id="nobody else may serve it"
        ),
    ],
)
def test_pins_that_cannot_be(pins: Pins, there: Pools, match: str) -> None:
    with pytest.raises(NoPair, match=match):
        choose(request(), there, pins=pins)


def test_pairs_that_lose_handoffs_are_left_alone_for_a_while() -> None:
    health = PairHealth()
    for now in (0.0, 10.0):
        health.abandoned("p", "d", now)
    assert health.allows("p", "d", 10.0)
    health.abandoned("p", "d", 20.0)
    assert not health.allows("p", "d", 20.0)
    assert health.allows("p", "e", 20.0)
    assert not health.allows("p", "d", ABANDONED_WINDOW_S - 0.1)
    assert health.allows("p", "d", ABANDONED_WINDOW_S)
    health.abandoned("p", "d", 61.0)  # and 10 and 20 are within the last minute
    assert not health.allows("p", "d", 69.9)
    assert health.allows("p", "d", 70.0)
    assert health.is_tracking
    assert health.allows("p", "d", 61.0 + ABANDONED_WINDOW_S)
    assert not health.is_tracking


@pytest.mark.parametrize("worker_id", ["p", "d"])
def test_what_a_worker_lost_is_forgotten_with_it(worker_id: str) -> None:
    health = PairHealth()
    for pair in (("p", "d"), ("q", "e")):
        for _ in range(3):
            health.abandoned(*pair, 0.0)
    health.forget(worker_id)
    assert health.allows("p", "d", 1.0)
    assert not health.allows("q", "e", 1.0)
    health.forget("q")
    assert not health.is_tracking


def test_other_partners_are_taken_meanwhile() -> None:
    policy = LeastLoaded(random.Random(1))
    router = PairRouter(policy, policy, policy)
    there = pools([rank("p0"), rank("p1")], [rank("d0"), rank("d1")])
    for now in range(3):
        router.health.abandoned("p0", "d0", now)
        router.health.abandoned("p1", "d0", now)
        router.health.abandoned("p1", "d1", now)
    assert {where(router.select(request(), there, 5.0)) for _ in range(20)} == {("p0", "d1")}
    for now in range(3):
        router.health.abandoned("p0", "d1", now)
    with pytest.raises(NoPair, match="not paired for a moment") as caught:
        router.select(request(), there, 5.0)
    assert caught.value.missing is None
    assert where(router.select(request(), there, 70.0))[0] in ("p0", "p1")

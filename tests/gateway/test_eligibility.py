"""Who may take a request where prefill and decode workers serve its model, and whether a wait may change that."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from backends.types import EngineFacts, EngineKind, ProbeResult, Role, Worker
from backends.upstream.base import Origin
from gateway.eligibility import check_eligible, eligible_pools, may_come_back, pins_of
from gateway.envelope import Envelope
from gateway.errors import GatewayError, InvalidRequest
from gateway.native_request import NativeRequest, NativeWorkers
from gateway.routes import ROUTES
from routers.breaker import Breaker
from routers.errors import NoReadyWorker, NoRoom, NoSuchRank, RoutingError
from routers.fleet import Fleet, Member
from routers.pair import NoPair, Pools, kv_aware_pairs
from routers.types import RouteRequest
from tests.gateway.envelopes import CHAT, NATIVE, parsed

FACTS = EngineFacts(EngineKind.SGLANG, (0, 5, 23), "0.5.23", "m")
NOW = 1.0  # breakers that opened at 0 are still open


def fleet_of(workers: Mapping[str, str]) -> Fleet:
    """A fleet by name: what each worker is and what is the matter with it, in words."""
    fleet = Fleet()
    for name, text in workers.items():
        words = text.split()
        worker = Worker(name, f"http://{name}", Origin("http", name, 80))
        one = Member(worker, breaker=Breaker(threshold=1), max_in_flight=1)
        fleet.add(one)
        engine = EngineKind.VLLM if "vllm" in words else EngineKind.SGLANG
        one.identified(replace(FACTS, role=Role(words[0]), engine=engine))
        if "paused" in words:
            one.probed(ProbeResult.PAUSED, is_busy=False)
        if "down" in words:
            one.lost_contact("reset")
        if "tripped" in words:
            fleet.failed(one, 0.0)
        if "full" in words:
            one.load_of(0).book(requests=1, blocks=0, prefill_tokens=0)
    return fleet


def asking(path: str, worker: str | None = None, rank: int | None = None, native: str = "unknown") -> Envelope:
    """A request, perhaps with pins; of one on SGLang's own route what vLLM workers would make of it."""
    headers = [] if worker is None else [(b"x-forebay-worker", worker.encode())]
    headers += [] if rank is None else [(b"x-data-parallel-rank", b"%d" % rank)]
    body = {"text": "a", "messages": []} | ({"image_data": "x"} if native == "refused" else {})
    envelope = parsed(body, headers, path=path)
    if path != NATIVE or native == "unknown":
        return envelope
    request = NativeRequest(envelope.body, None, [b"\1\0\0\0"], NativeWorkers())
    return structs.replace(envelope, native=request)


def names(pools: Pools) -> str:
    return " ".join(one.key.worker_id for pool in (pools.prefill, pools.decode, pools.regular) for one in pool)


def found(fleet: Fleet, *, path: str = CHAT, failed: str = "", needs_one_worker: bool = False, **pins: Any) -> str:
    """Names of the workers that may take a request."""
    envelope = asking(path, **pins)
    asked = (lambda: NOW), ROUTES[path], envelope, "m", set(failed.split())
    return names(eligible_pools(fleet, *asked, needs_one_worker=needs_one_worker))


PAIR = {"p": "prefill", "d": "decode"}
TWO = {"p": "prefill", "q": "prefill", "d": "decode", "e": "decode"}


@pytest.mark.parametrize(
    ("workers", "asked", "expected"),
    [
        pytest.param(PAIR, {}, "p d", id="a pair"),
        pytest.param({**PAIR, "r": "regular"}, {}, "p d r", id="and a regular one"),
        pytest.param({**TWO, "q": "prefill down", "e": "decode paused"}, {}, "p d", id="ready ones"),
        pytest.param({**TWO, "q": "prefill tripped", "e": "decode tripped"}, {}, "p d", id="that have not tripped"),
        pytest.param({**TWO, "q": "prefill full", "e": "decode full"}, {}, "p d", id="with room"),
        pytest.param(TWO, {"failed": "p e"}, "q d", id="that have not failed the request"),
        pytest.param({**PAIR, "d": "decode down", "r": "regular"}, {}, "p r", id="a regular one without a pair"),
        pytest.param({**PAIR, "d": "decode full", "r": "regular"}, {}, "p r", id="a regular one beside a full pair"),
        pytest.param({"p": "prefill down", "d": "decode vllm"}, {}, "d", id="vLLM's decode alone"),
        pytest.param({"p": "prefill vllm", "d": "decode vllm"}, {"needs_one_worker": True}, "p d", id="when it must"),
        pytest.param(
            {**TWO, "p": "prefill vllm", "d": "decode vllm"},
            {"path": NATIVE, "native": "refused"},
            "q e",
            id="native on SGLang",
        ),
        pytest.param(
            {**TWO, "p": "prefill vllm", "d": "decode vllm"},
            {"path": NATIVE, "native": "translated"},
            "q d e",
            id="native, on vLLM alone",
        ),
        pytest.param(TWO, {"worker": "q"}, "q d e", id="pinned prefill"),
        pytest.param(TWO, {"worker": "e"}, "p q e", id="pinned decode"),
        pytest.param({**PAIR, "r": "regular"}, {"worker": "r"}, "r", id="pinned regular"),
        pytest.param(PAIR, {"path": "/tokenize", "needs_one_worker": True}, "p d", id="any role tokenizes"),
        pytest.param(PAIR, {"path": "/tokenize", "worker": "p"}, "p", id="pinned prefill tokenizes"),
    ],
)
def test_who_may_take_a_request(workers: dict[str, str], asked: dict[str, Any], expected: str) -> None:
    assert found(fleet_of(workers), **asked) == expected


@pytest.mark.parametrize(
    ("workers", "asked", "error", "says"),
    [
        pytest.param({}, {}, NoReadyWorker, "none left", id="nobody"),
        pytest.param({"p": "prefill down", "d": "decode down"}, {}, NoReadyWorker, "unhealthy", id="nobody is ready"),
        pytest.param({"d": "decode"}, {}, NoPair, "^no prefill worker is ready$", id="no prefill"),
        pytest.param({**PAIR, "d": "decode down"}, {}, NoPair, "^no decode worker is ready$", id="no decode"),
        pytest.param({"p": "prefill vllm", "d": "decode"}, {}, NoPair, "different engines", id="no two that fit"),
        pytest.param(PAIR, {"needs_one_worker": True}, NoPair, "serves requests alone", id="nobody alone"),
        pytest.param(PAIR, {"failed": "d"}, NoPair, "no decode .* has failed this request", id="failed"),
        pytest.param({**PAIR, "p": "prefill tripped"}, {}, NoPair, "no prefill .* left alone", id="tripped"),
        pytest.param({**PAIR, "p": "prefill full"}, {}, NoRoom, "at once", id="prefill is full"),
        pytest.param({**PAIR, "d": "decode full"}, {}, NoRoom, "at once", id="decode is full"),
        pytest.param({**PAIR, "r": "regular full"}, {"needs_one_worker": True}, NoRoom, "at once", id="alone is full"),
        pytest.param({**TWO, "q": "prefill full"}, {"worker": "q"}, NoRoom, "at once", id="pinned prefill is full"),
        pytest.param({**TWO, "e": "decode full"}, {"worker": "e"}, NoRoom, "at once", id="pinned decode is full"),
        pytest.param(
            {**PAIR, "p": "prefill tripped", "d": "decode full"}, {}, NoPair, "no prefill", id="tripped beats full"
        ),
        pytest.param({**TWO, "e": "decode down"}, {"worker": "e"}, NoReadyWorker, "pinned to", id="pinned is down"),
        pytest.param(
            {"p": "prefill", "v": "decode vllm"},
            {"worker": "p"},
            NoPair,
            "different",
            id="a pinned prefill is no extra",
        ),
        pytest.param(PAIR, {"worker": "x"}, NoSuchRank, "no worker 'x'", id="no such worker"),
        pytest.param(PAIR, {"rank": 1}, NoSuchRank, "valid ranks are 0 to 0", id="no such rank"),
        pytest.param(
            {**PAIR, "d": "decode vllm"}, {"path": NATIVE}, NoPair, "no decode", id="native, and nobody has looked"
        ),
        pytest.param(
            {"p": "prefill vllm", "d": "decode vllm"},
            {"path": NATIVE, "native": "refused"},
            InvalidRequest,
            "image_data",
            id="native that only SGLang takes",
        ),
        pytest.param(
            {**PAIR, "v": "decode vllm"},
            {"path": NATIVE, "worker": "v", "native": "refused"},
            InvalidRequest,
            "image_data",
            id="pinned to vLLM",
        ),
    ],
)
def test_why_nobody_may(workers: dict[str, str], asked: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        found(fleet_of(workers), **asked)


def test_the_missing_role_is_told() -> None:
    for workers, missing in (({"d": "decode"}, Role.PREFILL), ({"p": "prefill"}, Role.DECODE)):
        with pytest.raises(NoPair) as caught:
            found(fleet_of(workers))
        assert caught.value.missing is missing


@pytest.mark.parametrize(
    ("workers", "asked", "expected"),
    [
        pytest.param({**PAIR, "d": "decode paused"}, {}, True, id="decode"),
        pytest.param({**PAIR, "p": "prefill paused"}, {}, True, id="prefill"),
        pytest.param({"p": "prefill paused", "d": "decode paused"}, {}, True, id="both"),
        pytest.param({**PAIR, "p": "prefill down", "r": "regular paused"}, {}, True, id="a regular one"),
        pytest.param({"p": "prefill full", "d": "decode paused"}, {}, True, id="fullness passes too"),
        pytest.param({"p": "prefill down", "d": "decode paused"}, {}, False, id="the other is down"),
        pytest.param({"p": "prefill tripped", "d": "decode paused"}, {}, False, id="the other has tripped"),
        pytest.param({"p": "prefill vllm", "d": "decode paused"}, {}, False, id="the other is of another kind"),
        pytest.param({**PAIR, "d": "decode paused"}, {"needs_one_worker": True}, False, id="it serves nothing alone"),
        pytest.param({**PAIR, "d": "decode paused"}, {"failed": "d"}, False, id="it has failed the request"),
        pytest.param({**PAIR, "d": "decode paused"}, {"failed": "p"}, False, id="the other has"),
        pytest.param({**TWO, "e": "decode paused", "q": "prefill down"}, {"worker": "q"}, False, id="pinned is down"),
        pytest.param({**TWO, "e": "decode paused"}, {"worker": "e"}, True, id="pinned is paused"),
        pytest.param({**PAIR, "d": "decode paused"}, {"rank": 1}, False, id="it does not have the rank"),
        pytest.param({"d": "decode paused vllm"}, {}, True, id="vLLM's decode"),
        pytest.param({"d": "decode paused vllm"}, {"path": NATIVE}, False, id="not unseen"),
        pytest.param({"d": "decode paused vllm"}, {"path": NATIVE, "native": "refused"}, False, id="not for all"),
        pytest.param({"d": "decode paused vllm"}, {"path": NATIVE, "native": "translated"}, True, id="native too"),
        pytest.param({"p": "prefill paused vllm"}, {"path": NATIVE, "native": "translated"}, False, id="not alone"),
        pytest.param({"p": "prefill paused"}, {"path": "/tokenize"}, True, id="any role tokenizes"),
        pytest.param({"r": "regular paused"}, {}, True, id="without pairs"),
        pytest.param({"r": "regular paused"}, {"rank": 3}, False, id="without pairs or rank"),
        pytest.param({"r": "regular"}, {"failed": "r"}, False, id="nobody is paused"),
    ],
)
def test_requests_wait_for_paused_workers_that_can_help(
    workers: dict[str, str], asked: dict[str, Any], expected: bool
) -> None:
    pins = {name: value for name, value in asked.items() if name in ("worker", "rank", "native")}
    path = asked.get("path", CHAT)
    found_hope = may_come_back(
        fleet_of(workers),
        ROUTES[path],
        asking(path, **pins),
        "m",
        set(asked.get("failed", "").split()),
        needs_one_worker=asked.get("needs_one_worker", False),
    )
    assert found_hope is expected


def test_models_without_pairs_are_checked_by_their_candidates() -> None:
    envelope = asking(CHAT)
    check_eligible(fleet_of({"r": "regular"}), lambda: NOW, ROUTES[CHAT], envelope, "m", set())
    with pytest.raises(NoRoom):
        check_eligible(fleet_of({"r": "regular full"}), lambda: NOW, ROUTES[CHAT], envelope, "m", set())
    with pytest.raises(NoPair):
        check_eligible(fleet_of({"p": "prefill"}), lambda: NOW, ROUTES[CHAT], envelope, "m", set())


WORKER = st.tuples(
    st.sampled_from(["prefill", "decode", "regular"]),
    st.sampled_from(["", "vllm"]),
    st.sampled_from(["", "", "paused", "down", "tripped", "full"]),
).map(" ".join)


@given(
    workers=st.lists(WORKER, max_size=6),
    pin=st.integers(-6, 5),
    failed=st.sets(st.integers(0, 5), max_size=2),
    path=st.sampled_from([CHAT, NATIVE]),
    native=st.sampled_from(["unknown", "refused", "translated"]),
    needs_one_worker=st.booleans(),
)
def test_what_is_eligible_can_be_selected(
    workers: list[str], pin: int, failed: set[int], path: str, native: str, needs_one_worker: bool
) -> None:
    """No wait and no refusal without a reason, and no choice of anything that is out of the question."""
    fleet = fleet_of({f"w{index}": text for index, text in enumerate(workers)})
    envelope = asking(path, worker=f"w{pin}" if pin >= 0 else None, native=native)
    refused = {f"w{index}" for index in failed}
    asked = ROUTES[path], envelope, "m", refused
    router = kv_aware_pairs(random.Random(1))
    pins = pins_of(envelope)
    try:
        pools = eligible_pools(fleet, lambda: NOW, *asked, needs_one_worker=needs_one_worker)
    except NoRoom:
        # Exactly what would go somewhere, were the full ones not full.
        roomy = fleet_of({f"w{index}": text.replace("full", "") for index, text in enumerate(workers)})
        assert eligible_pools(roomy, lambda: NOW, *asked, needs_one_worker=needs_one_worker)
        return
    except (RoutingError, GatewayError):
        return
    router.select(RouteRequest(), pools, NOW, pins=pins, needs_one_worker=needs_one_worker)
    for name in names(pools).split():
        text = workers[int(name[1:])]
        assert not {"paused", "down", "tripped", "full"} & set(text.split())
        assert name not in refused
        assert not (path == NATIVE and "vllm" in text and (native != "translated" or "prefill" in text))

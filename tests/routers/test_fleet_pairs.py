"""Prefill and decode workers in the fleet: their pools, what is said of them, and pins to them."""

from dataclasses import replace

import pytest

from backends.types import EngineKind, ProbeResult, Role, Worker
from backends.upstream.base import Origin
from routers.errors import NoReadyWorker, NoSuchRank
from routers.fleet import Member
from routers.pair import Pools
from tests.routers.test_fleet import FACTS, fleet_of, member, ready

PREFILL, DECODE = Role.PREFILL, Role.DECODE
VLLM = EngineKind.VLLM


def keys(pools: Pools) -> dict[str, list[str]]:
    """Worker ids and ranks by role, empty pools left out."""
    by_role = {"prefill": pools.prefill, "decode": pools.decode, "regular": pools.regular}
    return {
        role: [f"{one.key.worker_id}{one.key.dp_rank}" for one in pool] for role, pool in by_role.items() if len(pool)
    }


def test_ready_ranks_are_in_the_pool_of_their_role() -> None:
    late = member("late", pinned_role=PREFILL, pinned_model="m")
    other = ready("o", role=PREFILL, model_id="n")
    fleet = fleet_of(ready("r"), ready("p", role=PREFILL), ready("d", role=DECODE, dp_size=2), late, other)
    assert keys(fleet.pools("m")) == {"prefill": ["p0"], "decode": ["d0", "d1"], "regular": ["r0"]}
    assert [one.key.worker_id for one in fleet.candidates("m")] == ["r"]
    assert keys(fleet.pools("n")) == {"prefill": ["o0"]}
    assert keys(fleet.pools("x")) == {}
    first = fleet.get("d")
    assert first is not None
    assert fleet.pools("m").decode[1].load is first.load_of(1)


def test_pools_follow_states() -> None:
    prefill, decode = ready("p", role=PREFILL), ready("d", role=DECODE)
    fleet = fleet_of(prefill, decode)
    decode.probed(ProbeResult.PAUSED, is_busy=False)
    assert keys(fleet.pools("m")) == {"prefill": ["p0"]}
    assert keys(fleet.paused("m")) == {"decode": ["d0"]}
    assert keys(fleet.paused("n")) == {}
    decode.is_draining = True
    assert keys(fleet.paused("m")) == {}
    prefill.lost_contact("reset")
    assert keys(fleet.pools("m")) == {}
    assert fleet.has_pairs("m")  # they may come back
    fleet.remove("p")
    assert fleet.has_pairs("m")
    fleet.remove("d")
    assert not fleet.has_pairs("m")


def test_models_of_regular_workers_have_no_pairs() -> None:
    fleet = fleet_of(ready("r"), ready("p", role=PREFILL, model_id="n", models=("n", "lora")), member("u"))
    assert [model for model in ("m", "n", "lora", "x") if fleet.has_pairs(model)] == ["n", "lora"]
    assert not fleet_of(member("p", pinned_role=PREFILL)).has_pairs("m")
    assert fleet_of(member("p", pinned_role=PREFILL, pinned_model="m")).has_pairs("m")


def test_workers_of_all_roles_serve_a_model() -> None:
    fleet = fleet_of(ready("p", role=PREFILL), ready("d", role=DECODE, engine=VLLM))
    assert fleet.models == ("m",)
    assert fleet.model_of(None) == "m"
    assert fleet.engines_serving("m") == [EngineKind.SGLANG, VLLM]
    assert fleet.has_vllm


@pytest.mark.parametrize(
    ("members", "is_ready"),
    [
        pytest.param([ready("r")], True, id="regular"),
        pytest.param([ready("p", role=PREFILL)], False, id="prefill alone"),
        pytest.param([ready("d", role=DECODE)], False, id="SGLang's decode alone"),
        pytest.param([ready("d", role=DECODE, engine=VLLM)], True, id="vLLM's decode alone"),
        pytest.param([ready("p", role=PREFILL), ready("d", role=DECODE)], True, id="a pair"),
        pytest.param([ready("p", role=PREFILL, engine=VLLM), ready("d", role=DECODE)], False, id="two engines"),
        pytest.param([ready("p", role=PREFILL), ready("d", role=DECODE, model_id="n")], False, id="two models"),
        pytest.param([ready("p", role=PREFILL), member("d", pinned_role=DECODE)], False, id="one is not reached"),
    ],
)
def test_who_makes_a_model_ready(members: list[Member], is_ready: bool) -> None:
    assert fleet_of(*members).has_ready("m") is is_ready


def test_reasons_of_workers_without_a_partner() -> None:
    prefill, decode, of_vllm = (
        ready("p", role=PREFILL),
        ready("d", role=DECODE),
        ready("v", role=DECODE, engine=VLLM),
    )
    fleet = fleet_of(prefill, of_vllm)
    assert fleet.reason(prefill) == "prefill worker without a ready decode worker"
    assert fleet.reason(of_vllm) == "ready"
    fleet.add(decode)
    assert (fleet.reason(prefill), fleet.reason(decode)) == ("ready", "ready")
    prefill.lost_contact("reset")
    assert fleet.reason(prefill) == "unhealthy"
    assert fleet.reason(decode) == "decode worker without a ready prefill worker"
    with pytest.raises(NoReadyWorker, match=r"\(decode alone, unhealthy\)"):
        fleet.candidates("m")


@pytest.mark.parametrize(
    ("dp_rank", "worker_id", "says"),
    [
        pytest.param(2, None, "valid ranks are 0 to 1", id="ranks of prefill workers answer nothing"),
        pytest.param(2, "p", "valid ranks are 0 to 1", id="beside a prefill worker that is asked for, too"),
        pytest.param(1, "r", "valid ranks are 0 to 0", id="of the worker that is asked for"),
        pytest.param(None, "x", "no worker 'x'", id="no such worker"),
        pytest.param(None, "o", "does not serve", id="of another model"),
    ],
)
def test_g_4_pins_that_can_never_be(dp_rank: int | None, worker_id: str | None, says: str) -> None:
    fleet = fleet_of(
        ready("p", role=PREFILL, dp_size=8), ready("d", role=DECODE, dp_size=2), ready("r"), ready("o", model_id="n")
    )
    with pytest.raises(NoSuchRank, match=says):
        fleet.check_pins("m", dp_rank, worker_id)


def test_pins_that_may_be() -> None:
    down = ready("d", role=DECODE, dp_size=2)
    fleet = fleet_of(ready("p", role=PREFILL, dp_size=8), down, member("u"))
    down.lost_contact("reset")
    for dp_rank, worker_id in ((None, None), (1, None), (1, "p"), (1, "d"), (None, "u"), (7, "u")):
        fleet.check_pins("m", dp_rank, worker_id)


def test_the_operators_bootstrap_port_wins() -> None:
    given = Worker("p", "http://p", Origin("http", "p", 80), bootstrap_port=9000)
    one, other = Member(given), member("q")
    assert (one.bootstrap_port, other.bootstrap_port) == (9000, None)
    for each in (one, other):
        each.identified(replace(FACTS, bootstrap_port=8998))
    assert (one.bootstrap_port, other.bootstrap_port) == (9000, 8998)

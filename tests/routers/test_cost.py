"""The cost of a placement: the two worked examples, and every parameter by itself."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routers.cost import DECODE_COST, DEFAULT_COST, PREFILL_COST, Cost, CostParameters, placement_cost, with_recompute

# A rank with 320 tokens to prefill and 50 blocks in use once the prompt of 200 tokens is there; 6 of its 12 blocks
# are cached. Raw prefill is (320 + 200) / 16 = 32.5.
BUSY: dict[str, Any] = {
    "block_size": 16,
    "prompt_tokens": 200,
    "active_prefill_tokens": 320,
    "least_prefill_tokens": 128,
    "decode_blocks": 50,
    "in_flight": 3,
    "device_blocks": 6,
}


def cost(parameters: CostParameters = DEFAULT_COST, **changes: int) -> float:
    """The total for the busy rank."""
    return Cost(*placement_cost(parameters, **{**BUSY, **changes})).total


@pytest.mark.parametrize(
    ("prompt_tokens", "cached", "total", "prefill", "decode"),
    [
        pytest.param(200, 0, 24.5, 12.5, 12, id="200 new tokens"),
        pytest.param(9_000, 562, 562.5, 0.5, 562, id="9,000 tokens, all full blocks cached"),
    ],
)
def test_a9_1_worked_examples(prompt_tokens: int, cached: int, total: float, prefill: float, decode: int) -> None:
    found = Cost(
        *placement_cost(
            DEFAULT_COST,
            block_size=16,
            prompt_tokens=prompt_tokens,
            active_prefill_tokens=0,
            least_prefill_tokens=0,
            decode_blocks=prompt_tokens // 16,
            in_flight=0,
            device_blocks=cached,
        )
    )
    assert (found.total, found.prefill_term, found.decode_blocks) == (total, prefill, decode)


@pytest.mark.parametrize(
    ("parameters", "changes", "total"),
    [
        pytest.param({}, {}, 26.5 + 50, id="defaults"),
        pytest.param({}, {"device_blocks": 0}, 32.5 + 50, id="nothing cached"),
        pytest.param({}, {"active_prefill_tokens": 0}, 6.5 + 50, id="nothing else to prefill"),
        pytest.param({}, {"block_size": 32}, 10.25 + 50, id="larger blocks"),
        pytest.param({}, {"device_blocks": 40}, 50, id="prefill is never below nothing"),
        pytest.param({}, {"host_blocks": 4, "disk_blocks": 2}, 32.5 - 6 - 3 - 0.5 + 50, id="lower tiers"),
        pytest.param({"host_cache_hit_weight": 0.5}, {"host_blocks": 4}, 32.5 - 6 - 2 + 50, id="host weight"),
        pytest.param({"disk_cache_hit_weight": 1.0}, {"disk_blocks": 4}, 32.5 - 6 - 4 + 50, id="disk weight"),
        pytest.param({}, {"shared_blocks": 4}, 26.5 + 50, id="no shared cache"),
        pytest.param({"shared_cache_multiplier": 0.5}, {"shared_blocks": 4}, 24.5 + 50, id="shared cache"),
        pytest.param({"overlap_score_credit": 0.5}, {}, 29.5 + 50, id="half the credit"),
        pytest.param({"overlap_score_credit": 0.0}, {"host_blocks": 4}, 29.5 + 50, id="credit of the device only"),
        # Twelve blocks more to prefill than the least, which is one prompt: the credit is halved.
        pytest.param({"overlap_score_credit_decay": 1.0}, {}, 29.5 + 50, id="decay"),
        pytest.param({"overlap_score_credit_decay": 1.0}, {"least_prefill_tokens": 320}, 76.5, id="decay of the least"),
        pytest.param({"overlap_score_credit_decay": 1.0}, {"host_blocks": 4}, 26.5 + 50, id="lower tiers do not decay"),
        # 16 tokens in one block, 12 blocks behind: a thirteenth of the credit.
        pytest.param({"overlap_score_credit_decay": 1.0}, {"prompt_tokens": 16, "device_blocks": 1},
                     21 - 1 / 13 + 50, id="decay of a short prompt"),
        pytest.param({"overlap_score_credit_decay": 1.0}, {"prompt_tokens": 8, "device_blocks": 1},
                     20.5 - 1 / 13 + 50, id="decay of less than a block"),
        pytest.param({"prefill_load_scale": 2.0}, {}, 53 + 50, id="prefill weighs double"),
        pytest.param({"prefill_load_scale": 0.0}, {}, 50, id="prefill does not count"),
        pytest.param({"decode_active_request_weight": 1.5}, {}, 26.5 + 50 + 4.5, id="requests count"),
        pytest.param({"track_active_blocks": False}, {}, 26.5, id="blocks in use do not count"),
        pytest.param({"track_prefill_tokens": False}, {}, 44, id="decode with credit"),
        pytest.param({"track_prefill_tokens": False}, {"device_blocks": 60}, 0, id="decode is never below nothing"),
        pytest.param({"track_prefill_tokens": False, "decode_active_request_weight": 2.0}, {"device_blocks": 60}, 6,
                     id="decode with credit, requests count"),
    ],
)  # fmt: skip
def test_a9_2_every_parameter(parameters: dict[str, Any], changes: dict[str, int], total: float) -> None:
    assert cost(CostParameters(**parameters), **changes) == pytest.approx(total, rel=1e-12)


def test_parts_make_the_total() -> None:
    found = Cost(*placement_cost(CostParameters(decode_active_request_weight=1.0), **BUSY))
    assert found._asdict() == {
        "total": 79.5,
        "raw_prefill_blocks": 32.5,
        "credit_blocks": 6.0,
        "prefill_term": 26.5,
        "decode_blocks": 50,
        "request_term": 3.0,
    }


def test_blocks_that_others_have_count_more() -> None:
    found = placement_cost(CostParameters(), **BUSY)
    parameters = CostParameters(recompute_weight=2.0, prefill_load_scale=3.0)
    assert with_recompute(parameters, found, 5.0) == (106.5, 32.5, 6.0, 56.5, 50, 0.0)
    assert with_recompute(parameters, found, 0.0) == found


def test_roles_of_a_pair() -> None:
    assert cost(PREFILL_COST) == 26.5
    assert cost(DECODE_COST) == cost(DECODE_COST, device_blocks=0, host_blocks=9, disk_blocks=9) == 50


def test_defaults_are_those_of_the_table() -> None:
    assert {field.name: field.default for field in fields(CostParameters)} == {
        "overlap_score_credit": 1.0,
        "overlap_score_credit_decay": 0.0,
        "prefill_load_scale": 1.0,
        "recompute_weight": 16.0,  # the one that the table does not have
        "host_cache_hit_weight": 0.75,
        "disk_cache_hit_weight": 0.25,
        "shared_cache_multiplier": 0.0,
        "decode_active_request_weight": 0.0,
        "track_prefill_tokens": True,
        "track_active_blocks": True,
    }


@pytest.mark.parametrize("value", [-0.1, math.inf, math.nan, 1e7], ids=str)
@pytest.mark.parametrize("name", [field.name for field in fields(CostParameters) if field.type is float])
def test_weights_without_meaning_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is"):
        replace(DEFAULT_COST, **{name: value})  # type: ignore[arg-type]


WEIGHT = st.floats(0, 1e6)
COUNT = st.integers(0, 10**7)


@given(
    st.builds(CostParameters, **{field.name: WEIGHT for field in fields(CostParameters)[:8]}),
    st.fixed_dictionaries(
        {"block_size": st.integers(1, 4096), **{name: COUNT for name in BUSY if name != "block_size"}}
    ),
    COUNT,
)
def test_costs_are_finite_and_a_cached_block_never_adds_to_them(
    parameters: CostParameters, facts: dict[str, int], more: int
) -> None:
    facts["active_prefill_tokens"] += facts["least_prefill_tokens"]
    total = placement_cost(parameters, **facts)[0]
    assert 0 <= total < math.inf
    facts["device_blocks"] += more
    assert placement_cost(parameters, **facts)[0] <= total

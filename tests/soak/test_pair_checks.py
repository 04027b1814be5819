"""The checks of the soak over pairs: each of them finds what it is there for."""

from typing import Any

import pytest

from tests.soak.bodies import GENERATING, MODEL, VLLM_MODEL
from tests.soak.pair_audit import audit_handoffs, audit_pairs
from tests.soak.pair_bodies import OFTEN, PAIR_ASKS
from tests.soak.plan import plan

ID = "a" * 32
WHOLE: dict[str, Any] = {"rids": [ID], "headers": [], "status": 200, "ended": "complete", "faults": [], "tokens": 1}
VLLM: dict[str, Any] = {**WHOLE, "rids": [], "headers": [["X-Request-Id", ID]]}


def line(**values: Any) -> dict[str, Any]:
    usual = {"prefill_worker": "p", "worker": "d", "outcome": "complete", "attempts": 1, "engine_ids": [ID]}
    return {**usual, **values}


def logs(prefill: list[Any], decode: list[Any], *transfers: str) -> dict[str, Any]:
    happened = [{"event": event, "room": f"cmpl-{ID}-0"} for event in transfers]
    return {"p": [{"requests": prefill, "transfers": happened}], "d": [{"requests": decode, "transfers": []}]}


@pytest.mark.parametrize(
    ("told", "prefill", "decode", "is_good"),
    [
        pytest.param(line(), [WHOLE], [WHOLE], True, id="both complete"),
        pytest.param(line(), [VLLM], [VLLM], True, id="ids in a header"),
        pytest.param(line(), [], [], True, id="both killed, and their logs with them"),
        pytest.param(line(), [{**WHOLE, "ended": "fault"}], [WHOLE], False, id="prefill broke off"),
        pytest.param(line(), [WHOLE], [{**WHOLE, "status": 500}], False, id="decode refused"),
        pytest.param(line(), [WHOLE], [{**WHOLE, "faults": ["status"]}], False, id="an error inside of an answer"),
        pytest.param(line(attempts=2), [{**WHOLE, "status": 500}], [WHOLE], True, id="tried again"),
        pytest.param(line(prefill_worker=None), [], [{**WHOLE, "status": 500}], True, id="no pair"),
        pytest.param(line(outcome="prefill_failed"), [{**WHOLE, "status": 500}], [], True, id="prefill refused"),
        pytest.param(line(outcome="prefill_failed"), [{**WHOLE, "faults": ["huge"]}], [], True, id="struck"),
        pytest.param(line(outcome="prefill_failed"), [{**WHOLE, "tokens": 0}], [], True, id="waited in vain"),
        pytest.param(line(outcome="prefill_failed"), [], [], True, id="prefill has seen nothing"),
        pytest.param(line(outcome="prefill_failed"), [WHOLE], [WHOLE], False, id="blamed for nothing"),
    ],
)
def test_outcomes_against_the_engines_logs(told: dict[str, Any], prefill: Any, decode: Any, is_good: bool) -> None:
    assert (audit_pairs([told], logs(prefill, decode)) == []) is is_good


@pytest.mark.parametrize(("event", "is_good"), [("failed", True), ("sent", False)])
def test_prefill_may_say_behind_its_token_that_the_transfer_failed(event: str, is_good: bool) -> None:
    told = line(outcome="prefill_failed", error=f"Prefill transfer failed for bootstrap_room=cmpl-{ID}-0")
    assert (audit_pairs([told], logs([WHOLE], [WHOLE], event)) == []) is is_good


@pytest.mark.parametrize(
    ("told", "decode", "transfers", "counted", "is_good"),
    [
        pytest.param(line(), [VLLM], ["pinned", "fetched"], 0, True, id="taken over"),
        pytest.param(line(), [VLLM], ["pinned", "expired"], 0, False, id="lost, and not counted"),
        pytest.param(line(), [VLLM], ["pinned", "expired"], 1, True, id="lost and counted"),
        pytest.param(line(), [VLLM], ["fetched", "expired"], 0, True, id="fetched, and prefill not told"),
        pytest.param(line(), [], ["expired"], 0, True, id="decode killed, and its log with it"),
        pytest.param(line(outcome="client_closed"), [VLLM], ["expired"], 0, True, id="left while prefill answered"),
    ],
)
def test_lost_handoffs(told: dict[str, Any], decode: Any, transfers: list[str], counted: int, is_good: bool) -> None:
    metrics = f"# x\nforebay_handoff_abandoned_total {counted}.0\n"
    assert (audit_handoffs([told], logs([VLLM], decode, *transfers), metrics) == []) is is_good


def test_plans_leave_nothing_out() -> None:
    good = [one for one in (plan(1, number, PAIR_ASKS, OFTEN) for number in range(3000)) if not one.wrong]
    assert {one.route.path for one in good} == set(GENERATING)
    assert {one.ask.body["model"] for one in good} == {MODEL, VLLM_MODEL}
    asked = {name for one in good for name in one.ask.body}
    assert {"prompt_logprobs", "logprob_start_len", "echo", "n"} <= asked
    assert not any(one.is_stream for one in good if one.ask.is_unary)
    assert any(one.ask.batch for one in good)
    assert any(len(one.ask.body.get("input_ids", "")) == 3 for one in good)

"""The table of cancelling: contract, section 8, decision 12."""

import dataclasses

import pytest

from backends.cancel_policy import (
    AbortCapability,
    CancelPolicy,
    CancelWindow,
    EarlyAbort,
    LegKind,
    OnCancel,
    abort_capability,
    cancel_policy,
)
from backends.types import EngineKind

NEW = (0, 5, 23)
FORGETS = (0, 5, 22)
UNKNOWN = ()
SGLANG, VLLM = EngineKind.SGLANG, EngineKind.VLLM
CLOSES = (OnCancel.DROP, False)
ABORTS = (OnCancel.ABORT, False)
ABORTS_THEN_CLOSES = (OnCancel.ABORT, True)
DRAINS = (OnCancel.DRAIN_TO_FIRST_OUTPUT, False)
BOTH, STREAM, UNARY = (True, False), (True,), (False,)


@pytest.mark.parametrize(
    ("engine", "version", "kind", "modes", "has_ids", "expected"),
    [
        pytest.param(SGLANG, NEW, LegKind.AGGREGATED, STREAM, True, CLOSES, id="stream"),
        pytest.param(SGLANG, NEW, LegKind.AGGREGATED, UNARY, True, ABORTS, id="unary"),
        pytest.param(SGLANG, FORGETS, LegKind.AGGREGATED, STREAM, True, ABORTS_THEN_CLOSES, id="forgotten stream"),
        pytest.param(SGLANG, FORGETS, LegKind.AGGREGATED, UNARY, True, ABORTS, id="unary, older"),
        pytest.param(SGLANG, UNKNOWN, LegKind.AGGREGATED, BOTH, True, ABORTS_THEN_CLOSES, id="unknown version"),
        pytest.param(SGLANG, (0, 5, 16), LegKind.DECODE, BOTH, True, ABORTS_THEN_CLOSES, id="too old to be known"),
        pytest.param(SGLANG, NEW, LegKind.AGGREGATED, BOTH, False, CLOSES, id="the engine's own ids"),
        pytest.param(SGLANG, UNKNOWN, LegKind.AGGREGATED, BOTH, False, CLOSES, id="own ids, unknown version"),
        pytest.param(SGLANG, NEW, LegKind.PREFILL, BOTH, True, ABORTS, id="prefill leg"),
        pytest.param(SGLANG, NEW, LegKind.DECODE, BOTH, True, ABORTS, id="decode leg"),
        pytest.param(SGLANG, FORGETS, LegKind.DECODE, BOTH, True, ABORTS, id="decode leg, older"),
        pytest.param(VLLM, (0, 32, 0), LegKind.AGGREGATED, BOTH, True, CLOSES, id="vLLM"),
        pytest.param(VLLM, (0, 32, 0), LegKind.PREFILL, BOTH, True, CLOSES, id="vLLM prefill leg"),
        pytest.param(VLLM, (0, 32, 0), LegKind.DECODE, BOTH, True, DRAINS, id="vLLM decode leg"),
        pytest.param(VLLM, UNKNOWN, LegKind.DECODE, BOTH, False, DRAINS, id="vLLM decode leg without an id"),
    ],
)
def test_policies(
    engine: EngineKind,
    version: tuple[int, ...],
    kind: LegKind,
    modes: tuple[bool, ...],
    has_ids: bool,
    expected: tuple[OnCancel, bool],
) -> None:
    for is_stream in modes:
        policy = cancel_policy(
            engine, abort_capability(engine, version), kind=kind, is_stream=is_stream, has_ids=has_ids
        )
        assert (policy.on_cancel, policy.closes_after_abort) == expected
        assert policy.is_stream is is_stream
        if policy.on_cancel is OnCancel.ABORT:
            assert policy.loses_aborts_in_pause  # all of them are SGLang's


def test_an_abort_on_call_spares_a_paused_sglang_also_where_streams_are_closed() -> None:
    policy = cancel_policy(SGLANG, abort_capability(SGLANG, NEW), kind=LegKind.AGGREGATED, is_stream=True, has_ids=True)
    assert policy == CancelPolicy(OnCancel.DROP, is_stream=True, loses_aborts_in_pause=True)


@pytest.mark.parametrize("is_stream", BOTH)
def test_a3_17_a_record_of_an_unknown_form_is_not_relied_on(is_stream: bool) -> None:
    """Mutation tried: ``is_known`` without the version; then the unary leg is read on as if retries were proven."""
    record = dataclasses.replace(abort_capability(SGLANG, NEW), v=99)
    policy = cancel_policy(SGLANG, record, kind=LegKind.AGGREGATED, is_stream=is_stream, has_ids=True)
    assert (policy.on_cancel, policy.closes_after_abort) == ABORTS_THEN_CLOSES


@pytest.mark.parametrize(
    ("version", "early", "disconnect_aborts"),
    [
        pytest.param((), EarlyAbort.UNSUPPORTED, False, id="unreadable"),
        pytest.param((0, 4, 99), EarlyAbort.UNSUPPORTED, False, id="old"),
        pytest.param((0, 5, 16), EarlyAbort.UNSUPPORTED, False, id="before the first known"),
        pytest.param((0, 5, 17), EarlyAbort.RETRY, False, id="first that forgets"),
        pytest.param((0, 5, 22, 9), EarlyAbort.RETRY, False, id="last that forgets"),
        pytest.param((0, 5, 23), EarlyAbort.RETRY, True, id="first that does not"),
        pytest.param((0, 6), EarlyAbort.RETRY, True, id="newer"),
        pytest.param((1,), EarlyAbort.RETRY, True, id="much newer"),
    ],
)
def test_records_of_sglang_releases(version: tuple[int, ...], early: EarlyAbort, disconnect_aborts: bool) -> None:
    record = abort_capability(SGLANG, version)
    assert (record.v, record.early, record.disconnect_aborts) == (1, early, disconnect_aborts)
    assert not record.group
    assert not record.unary_disconnect_aborts
    assert record.is_known is (early is EarlyAbort.RETRY)


def test_the_record_of_vllm() -> None:
    assert abort_capability(VLLM, ()) == AbortCapability(
        v=1,
        early=EarlyAbort.EXACT,
        group=True,
        disconnect_aborts=True,
        unary_disconnect_aborts=True,
        cancel_window=CancelWindow.ANYTIME,
        must_consume_handoff=True,
    )

"""Reading and matching of scripted faults."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.faults import FaultError, FaultTable, RequestFacts, parse_fault

GENERATE = RequestFacts("POST", "/generate", True, ("r1",), "m", True)
HEALTH = RequestFacts("GET", "/health")


@pytest.mark.parametrize("at", ["connect", "headers", "first_event", "event:3", "end", "abort"])
def test_points(at: str) -> None:
    shown = parse_fault({"at": at, "do": "reset"}).describe()
    assert shown["at"] == ("event:0" if at == "first_event" else at)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param([], "object", id="no object"),
        pytest.param({"at": "headers"}, "unknown 'do'", id="no action"),
        pytest.param({"at": "nowhere", "do": "reset"}, "unknown 'at'", id="point"),
        pytest.param({"at": "event:x", "do": "reset"}, "unknown 'at'", id="event number"),
        pytest.param({"at": "event", "do": "reset"}, "unknown 'at'", id="event without number"),
        pytest.param({"at": "headers", "do": "explode"}, "unknown 'do'", id="action"),
        pytest.param({"at": "headers", "do": "delay"}, "needs a number", id="no number"),
        pytest.param({"at": "headers", "do": "status:99"}, "200 to 599", id="status"),
        pytest.param({"at": "headers", "do": "reset:1"}, "takes no number", id="number too many"),
        pytest.param({"at": "headers", "do": "ignore"}, "not possible", id="ignore outside abort"),
        pytest.param({"at": "connect", "do": "status:500"}, "not possible", id="status before a request"),
        pytest.param({"at": "connect", "do": "reset", "match": {"path": "/x"}}, "before there is", id="match"),
        pytest.param({"at": "kv", "do": "reset"}, "not possible", id="kv"),
        pytest.param({"at": "headers", "do": "drop"}, "not possible", id="kv only"),
        pytest.param({"at": "kv", "do": "drop", "match": {"path": "/x"}}, "'dp_rank' only", id="kv match"),
        pytest.param({"at": "replay", "do": "ignore", "match": {"dp_rank": True}}, "wrong type", id="rank type"),
        pytest.param({"at": "end", "do": "reset", "match": {"dp_rank": 0}}, "for KV events", id="rank elsewhere"),
        pytest.param({"at": "transfer", "do": "reset"}, "not possible", id="transfer"),
        pytest.param({"at": "transfer", "do": "drop", "match": {"path": "/x"}}, "'rid' only", id="transfer match"),
        pytest.param({"at": "end", "do": "fail"}, "not possible", id="transfer only"),
        pytest.param({"at": "end", "do": "reset", "times": 0}, "'times'", id="times"),
        pytest.param({"at": "end", "do": "reset", "times": True}, "'times'", id="times bool"),
        pytest.param({"at": "end", "do": "reset", "match": {"who": "x"}}, "unknown 'match'", id="match key"),
        pytest.param({"at": "end", "do": "reset", "match": {"stream": "x"}}, "wrong type", id="match type"),
        pytest.param({"at": "end", "do": "reset", "match": []}, "is an object", id="match list"),
        pytest.param({"at": "end", "do": "reset", "body": 1}, "'body'", id="body"),
        pytest.param({"at": "end", "do": "reset", "whatever": 1}, "unknown key", id="unknown key"),
    ],
)
def test_refusals(fault: Any, message: str) -> None:
    with pytest.raises(FaultError, match=message):
        parse_fault(fault)


@pytest.mark.parametrize(
    ("match", "fits"),
    [
        ({}, True),
        ({"path": "/generate"}, True),
        ({"path": "/v1/completions"}, False),
        ({"rid": "r1"}, True),
        ({"rid": "r"}, False),
        ({"model": "m", "stream": True, "method": "post"}, True),
        ({"stream": False}, False),
        ({"model": "other"}, False),
        ({"method": "PUT"}, False),
    ],
)
def test_matching(match: dict[str, Any], fits: bool) -> None:
    assert parse_fault({"at": "headers", "do": "reset", "match": match}).fits(GENERATE) is fits


def test_probes_do_not_use_faults_up_unless_named() -> None:
    table = FaultTable()
    table.add(parse_fault({"at": "headers", "do": "reset"}))
    assert table.take("headers", HEALTH) is None
    assert table.take("headers", GENERATE) is not None
    assert not table
    table.add(parse_fault({"at": "headers", "do": "reset", "match": {"path": "/health"}}))
    assert table.take("headers", HEALTH) is not None


def test_times_and_order() -> None:
    table = FaultTable()
    table.add(parse_fault({"at": "event:2", "do": "hang", "times": 2}))
    table.add(parse_fault({"at": "event:2", "do": "close", "times": None}))
    assert table.expects(GENERATE)
    assert table.take("event", GENERATE, 1) is None
    kinds = [fault.kind for _ in range(4) if (fault := table.take("event", GENERATE, 2)) is not None]
    assert kinds == ["hang", "hang", "close", "close"]
    assert table.describe() == [{"at": "event:2", "do": "close", "times": None, "match": {}}]
    table.clear()
    assert not table.expects(GENERATE)


def test_faults_of_kv_events_are_matched_by_rank() -> None:
    table = FaultTable()
    table.add(parse_fault({"at": "kv", "do": "drop", "match": {"dp_rank": 1}}))
    table.add(parse_fault({"at": "replay", "do": "ignore"}))
    assert table.take_for_rank("kv", 0) is None
    assert not table.expects(GENERATE)
    assert [fault.kind for fault in (table.take_for_rank("kv", 1), table.take_for_rank("replay", 3)) if fault] == [
        "drop",
        "ignore",
    ]
    assert not table

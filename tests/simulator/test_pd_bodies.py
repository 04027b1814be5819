"""Reading what a body says of the other half of a pair."""

from __future__ import annotations

from typing import Any

import pytest

from simulator.api import FatalRequest
from simulator.options import EngineOptions
from simulator.sglang.errors import InvalidRequest
from simulator.sglang.rooms import Room, rooms_of
from simulator.vllm.transfer import Fetch, Order, Transfer, kept_params, parse_transfer

PREFILL = EngineOptions(role="prefill")


@pytest.mark.parametrize(
    ("fields", "rooms"),
    [
        pytest.param({"bootstrap_room": 5}, [Room(5, "", 8998, None), Room(6, "", 8998, None)], id="one number"),
        pytest.param({"bootstrap_room": [5, 9]}, [Room(5, "", 8998, None), Room(9, "", 8998, None)], id="list"),
        pytest.param(
            {"bootstrap_room": 0, "bootstrap_host": "h", "bootstrap_port": 7, "disagg_prefill_dp_rank": 1},
            [Room(0, "h", 7, 1), Room(1, "h", 7, 1)],
            id="all fields",
        ),
        pytest.param(
            {"bootstrap_room": [1, 2, 3], "bootstrap_host": ["a", "b"], "bootstrap_port": [3, None]},
            [Room(1, "a", 3, None), Room(2, "b", 8998, None)],
            id="lists of all",
        ),
    ],
)
def test_rooms(fields: dict[str, Any], rooms: list[Room]) -> None:
    assert rooms_of(fields, PREFILL, ["x", "y"]) == rooms
    assert rooms_of(fields, EngineOptions(), ["x", "y"]) == [None, None]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({}, "room id. req.rid='x'", id="none"),
        pytest.param({"bootstrap_room": [1, None]}, "room id. req.rid='y'", id="one missing"),
        pytest.param({"bootstrap_room": "7"}, "room id", id="text"),
        pytest.param({"bootstrap_room": True}, "room id", id="boolean"),
        pytest.param({"bootstrap_room": [1]}, "batch size", id="too few"),
        pytest.param({"bootstrap_room": 1, "bootstrap_host": ["a"]}, "batch size", id="too few hosts"),
    ],
)
def test_no_rooms(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        rooms_of(fields, PREFILL, ["x", "y"])
    assert message in caught.value.message


def test_no_room_with_ranks() -> None:
    ranks = EngineOptions(role="prefill", dp_size=2)
    with pytest.raises(FatalRequest):
        rooms_of({}, ranks, ["x"])
    with pytest.raises(InvalidRequest):
        rooms_of({}, EngineOptions(role="prefill", dp_size=2, die_on_bad_input=False), ["x"])
    with pytest.raises(InvalidRequest):
        rooms_of({}, EngineOptions(role="decode", dp_size=2), ["x"])


KEPT = kept_params("cmpl-1-0-abcdef01", [1, 2], "engine", ("host", 5600), 40, 0)


@pytest.mark.parametrize(
    ("params", "transfer"),
    [
        pytest.param(None, None, id="absent"),
        pytest.param({}, None, id="empty"),
        pytest.param({"do_remote_decode": False, "do_remote_prefill": False}, None, id="neither"),
        pytest.param({"do_remote_decode": True, "remote_host": None}, Order.KEEP, id="keep"),
        pytest.param(KEPT, Fetch("host", 5600, "cmpl-1-0-abcdef01"), id="fetch"),
        pytest.param({"do_remote_prefill": True}, Order.DIE, id="flag alone"),
        pytest.param({**KEPT, "remote_block_ids": [1, 2]}, Order.DIE, id="flat blocks"),
        pytest.param({**KEPT, "remote_block_ids": None}, Order.DIE, id="no blocks"),
        pytest.param({**KEPT, "remote_request_id": None}, Order.DIE_LATER, id="no request id"),
        pytest.param({**KEPT, "remote_port": "5600"}, Order.DIE_LATER, id="port as text"),
    ],
)
def test_transfers(params: dict[str, Any] | None, transfer: Transfer | None) -> None:
    assert parse_transfer(params) == transfer

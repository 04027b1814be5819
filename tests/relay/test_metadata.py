"""What a node says about itself: which of it is refused, and what absent, empty and null mean."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_events.sources import Source
from relay.errors import MetadataRefused
from relay.metadata import check_endpoint, difference, parse_metadata
from tests.relay.nodes import info, leader_node, node, source

KV_EVENTS = {
    "publisher": "zmq",
    "endpoint_host": "*",
    "endpoint_port_base": 6000,
    "topic": "kv",
    "block_size": 8,
    "dp_size": 4,
    "replay_endpoint_port_base": 7000,
}


def test_a_node_is_read_as_it_is() -> None:
    found = node(disaggregation_mode="prefill", disaggregation_bootstrap_port=8998)
    assert not found.is_leader
    assert (found.nnodes, found.dp_size, found.role, found.bootstrap_port) == (2, 4, "prefill", 8998)
    assert found.ranks == (2, 3)
    assert found.block_size == 16
    assert found.sources[0] == Source(2, "tcp://127.0.0.1:5559", None, "", 16)
    assert found.boot_id == "7"


def test_a1_2_the_rank_is_the_one_that_the_engine_names() -> None:
    found = node(dp_size=8, kv_event_sources=[source(4, replay_endpoint="tcp://127.0.0.1:7004")])
    assert found.ranks == (4,)
    assert found.sources[0].replay_endpoint == "tcp://127.0.0.1:7004"


@pytest.mark.parametrize("written", [1, "1", " 1 "], ids=["number", "text", "text with spaces"])
def test_numbers_may_be_text(written: object) -> None:
    assert node(node_rank=written).node_rank == 1


@pytest.mark.parametrize(
    ("changes", "is_leader"),
    [
        pytest.param({"node_rank": ..., "nnodes": ...}, True, id="nothing said"),
        pytest.param({"node_rank": 0}, True, id="first"),
        pytest.param({"node_rank": 1}, False, id="second"),
    ],
)
def test_the_first_node_leads(changes: dict[str, object], is_leader: bool) -> None:
    assert node(**changes).is_leader is is_leader


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        pytest.param({"node_rank": ...}, "node_rank is missing", id="many nodes without a rank"),
        pytest.param({"node_rank": 2}, "node_rank is 2", id="rank beyond the nodes"),
        pytest.param({"node_rank": -1}, "node_rank", id="negative rank"),
        pytest.param({"node_rank": "one"}, "node_rank", id="rank in words"),
        pytest.param({"node_rank": True}, "cannot be read", id="rank is a boolean"),
        pytest.param({"node_rank": "9" * 30}, "node_rank", id="endless rank"),
        pytest.param({"nnodes": 0}, "nnodes", id="no nodes"),
        pytest.param({"dp_size": 0}, "dp_size", id="no ranks"),
        pytest.param({"dist_init_addr": ...}, "dist_init_addr", id="no meeting point"),
        pytest.param({"dist_init_addr": "  "}, "dist_init_addr", id="blank meeting point"),
        pytest.param({"disaggregation_mode": "both"}, "disaggregation_mode", id="unknown mode"),
    ],
)
def test_a_node_that_nobody_can_place_is_refused(changes: dict[str, object], names: str) -> None:
    with pytest.raises(MetadataRefused, match=names):
        node(**changes)


@pytest.mark.parametrize(
    ("mode", "role"),
    [
        *((mode, "regular") for mode in (..., None, "null", "agg", "aggregated")),
        *((mode, mode) for mode in ("prefill", "decode")),
    ],
)
def test_modes(mode: object, role: str) -> None:
    assert node(disaggregation_mode=mode).role == role


def test_a1_5_an_empty_list_is_no_absent_one() -> None:
    assert leader_node(kv_event_sources=[], kv_events=KV_EVENTS).sources == ()


def test_a1_5_null_is_refused() -> None:
    with pytest.raises(MetadataRefused, match="null"):
        leader_node(kv_event_sources=None, kv_events=KV_EVENTS)


@pytest.mark.parametrize(("node_rank", "ranks"), [(0, (0, 1)), (1, (2, 3))], ids=["leader", "follower"])
def test_a1_5_absent_counts_this_nodes_ranks_at_its_own_addresses(node_rank: int, ranks: tuple[int, ...]) -> None:
    found = node(node_rank=node_rank, kv_event_sources=..., kv_events=KV_EVENTS)
    assert found.ranks == ranks
    first = ranks[0]
    assert found.sources[0] == Source(
        first, f"tcp://127.0.0.1:{6000 + first}", f"tcp://127.0.0.1:{7000 + first}", "kv", 8
    )


def test_an_engine_that_publishes_nothing_has_no_sources() -> None:
    assert leader_node(kv_event_sources=..., kv_events=None).sources == ()


def test_the_count_that_knows_data_parallel_attention_is_believed() -> None:
    assert node(dp_size=1, kv_events=KV_EVENTS).dp_size == 4


def test_a_block_size_that_the_list_leaves_out_is_the_pages() -> None:
    assert node(kv_event_sources=[source(2, block_size=None)], page_size=32, dcp_size=2).block_size == 64


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        pytest.param([source(1), source(1, endpoint="ipc://@x")], "rank twice", id="a rank twice"),
        pytest.param([source(2), source(3, endpoint="tcp://127.0.0.1:5559")], "address twice", id="an address twice"),
        pytest.param([source(4)], "dp_size is 4", id="a rank too high"),
        pytest.param([source(-1)], "rank -1", id="a rank below 0"),
        pytest.param([source(2, block_size=0)], "block_size", id="no block"),
        pytest.param([source(2, block_size=None)], "block_size", id="no block size"),
        pytest.param([source(2), source(3, block_size=8)], "different block sizes", id="two block sizes"),
        pytest.param([source(2, replay_endpoint="tcp://*:1")], "wildcard", id="replay at a wildcard"),
        pytest.param([{"endpoint": "ipc://@x"}], "dp_rank", id="no rank"),
        pytest.param([source(2, endpoint="")], "no address", id="no address"),
    ],
)
def test_a1_15_sources_that_cannot_be_are_refused(sources: list[dict[str, object]], names: str) -> None:
    with pytest.raises(MetadataRefused, match=names):
        node(kv_event_sources=sources)


@pytest.mark.parametrize(
    "endpoint",
    ["ipc://@x", "ipc:///abs", "tcp://127.0.0.1:1", "tcp://[::1]:65535", "tcp://node-1.example:5557"],
)
def test_a1_14_endpoints_that_can_be_used(endpoint: str) -> None:
    check_endpoint(endpoint)


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://*:1",
        "tcp://0.0.0.0:1",
        "tcp://[::]:1",
        "tcp://h:0",
        "tcp://h:65536",
        "tcp://u@h:1",
        "tcp://h:1/p",
        "tcp://h:1?q",
        "tcp://:1",
        "tcp://h",
        "h:1",
        "udp://h:1",
        "inproc://x",
        "ipc://rel",
        "ipc:///a\0b",
        "ipc://",
        "ipc:///",
        "ipc://@",
        "tcp://h:1\n",
        "tcp://::1:5",
        "tcp://h:٣",
    ],
)
def test_a1_14_endpoints_that_cannot_be_used(endpoint: str) -> None:
    with pytest.raises(MetadataRefused):
        check_endpoint(endpoint)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        pytest.param({}, "", id="nothing"),
        pytest.param({"random_seed": 8, "served_model_name": "m"}, "", id="what does not matter"),
        pytest.param({"dp_size": 8}, "dp_size was 4 and is now 8", id="ranks"),
        pytest.param({"dist_init_addr": "10.0.0.2:5000"}, "dist_init_addr", id="group"),
        pytest.param({"disaggregation_mode": "decode"}, "role", id="mode"),
        pytest.param({"kv_event_sources": []}, "publishes none", id="events switched off"),
        pytest.param({"kv_event_sources": [source(2)]}, "now publishes 2", id="a rank less"),
        pytest.param({"kv_event_sources": [source(2), source(3, endpoint="ipc://@x")]}, "ipc://@x", id="address"),
        pytest.param(
            {"kv_event_sources": [source(2, block_size=8), source(3, block_size=8)]},
            "block_size of rank 2",
            id="blocks",
        ),
    ],
)
def test_a1_10_only_what_matters_is_a_difference(changes: dict[str, object], names: str) -> None:
    found = difference(node(), node(**changes))
    assert names in found
    assert bool(found) is bool(names)


def test_no_secret_gets_into_an_error() -> None:
    with pytest.raises(MetadataRefused) as caught:
        parse_metadata(info(node_rank=[], api_key="hunter2", disaggregation_mode="hunter2"))
    assert "hunter2" not in str(caught.value)


@given(st.binary() | st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_whatever_comes_is_read_or_refused(body: bytes | str) -> None:
    try:
        found = parse_metadata(body if isinstance(body, bytes) else body.encode())
    except MetadataRefused:
        return
    assert found.is_leader


@given(
    st.dictionaries(
        st.sampled_from(["node_rank", "nnodes", "dp_size", "kv_event_sources", "kv_events", "page_size", "dcp_size"]),
        st.none() | st.integers() | st.text() | st.just([]) | st.just([{"dp_rank": 0, "endpoint": "tcp://h:1"}]),
    )
)
def test_a_node_that_is_read_is_sound(changes: dict[str, object]) -> None:
    try:
        found = node(**changes)
    except MetadataRefused:
        return
    assert 0 <= found.node_rank < found.nnodes
    assert all(0 <= rank < found.dp_size for rank in found.ranks)
    assert all((one.block_size or 0) >= 1 for one in found.sources)


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        pytest.param({"max_total_num_tokens": 1000}, 62, id="whole blocks"),
        pytest.param({"max_total_num_tokens": None}, None, id="unknown"),
        pytest.param({"max_total_num_tokens": 0}, None, id="none yet"),
        pytest.param({"max_total_num_tokens": 1000, "node_rank": 0, "kv_event_sources": []}, None, id="no sources"),
    ],
)
def test_the_cache_is_as_large_as_the_engine_says(changes: dict[str, object], blocks: int | None) -> None:
    assert node(**changes).kv_blocks == blocks

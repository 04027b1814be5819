import json
from typing import Any

import pytest

from kv_events.errors import SourceMisconfigured
from kv_events.sources import Source, announced_by_sglang, announced_by_vllm, set_by_operator
from tests.kv_events.captured import CAPTURES, load

HOST = "10.0.0.5"
NODES = ["tcp://10.0.0.5:{}", "tcp://10.0.0.6:{}", "tcp://10.0.0.7:{}", "tcp://10.0.0.8:{}"]


def server_info(capture: str) -> bytes:
    answer = (CAPTURES / "sglang" / f"{capture}.http").read_bytes().split(b"### RESPONSE", 1)[1]
    return answer.split(b"\r\n\r\n", 1)[1].removesuffix(b"\n### END\n")


def block(**changes: Any) -> dict[str, Any]:
    """Give SGLang's ``kv_events`` for one rank, with changes."""
    return {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "topic": "kv",
        "block_size": 16,
        "dp_size": 1,
        **changes,
    }


def sglang(host: str = HOST, **info: Any) -> list[Source] | None:
    return announced_by_sglang(json.dumps(info).encode(), host)


def vllm(answer: Any) -> list[Source] | None:
    return announced_by_vllm(json.dumps(answer).encode(), HOST, 32)


TWO_RANKS = [
    Source(0, f"tcp://{HOST}:31401", f"tcp://{HOST}:31501", "kv-events", 4),
    Source(1, f"tcp://{HOST}:31402", f"tcp://{HOST}:31502", "kv-events", 4),
]


@pytest.mark.parametrize(
    ("capture", "sources"),
    [
        pytest.param(
            "http/get_server_info",
            [Source(0, f"tcp://{HOST}:31557", f"tcp://{HOST}:31558", "kv-events", 4)],
            id="one rank, base ports",
        ),
        pytest.param("http_dp2/server_info", TWO_RANKS, id="two ranks, listed"),
        pytest.param("http_pd/prefill_server_info", None, id="no events"),
    ],
)
def test_recorded_answers_of_sglang(capture: str, sources: list[Source] | None) -> None:
    assert announced_by_sglang(server_info(capture), HOST) == sources


def test_the_answer_over_grpc_is_the_same() -> None:
    info = json.dumps(load("sglang/grpc_getserverinfo_dp2.json")).encode()
    assert announced_by_sglang(info, HOST) == TWO_RANKS


@pytest.mark.parametrize(
    ("capture", "sources"),
    [
        pytest.param("misc", [Source(0, f"tcp://{HOST}:18110", f"tcp://{HOST}:18111", "kv-events", 32)], id="one rank"),
        pytest.param(
            "dp2",
            [
                Source(0, f"tcp://{HOST}:18410", f"tcp://{HOST}:18420", "kv-events", 32),
                Source(1, f"tcp://{HOST}:18411", f"tcp://{HOST}:18421", "kv-events", 32),
            ],
            id="two ranks, not in order",
        ),
    ],
)
def test_recorded_answers_of_vllm(capture: str, sources: list[Source]) -> None:
    answer = (CAPTURES / "vllm" / capture / "kv_event_sources.resp").read_bytes()
    assert announced_by_vllm(answer.split(b"\r\n\r\n", 1)[1], HOST, 32) == sources


@pytest.mark.parametrize(
    ("host", "endpoint"),
    [
        pytest.param("*", "tcp://10.0.0.5:5557", id="star"),
        pytest.param("0.0.0.0", "tcp://10.0.0.5:5557", id="all"),
        pytest.param("::", "tcp://10.0.0.5:5557", id="all, IPv6"),
        pytest.param("[::]", "tcp://10.0.0.5:5557", id="all, in brackets"),
        pytest.param("127.0.0.1", "tcp://10.0.0.5:5557", id="loopback"),
        pytest.param("localhost", "tcp://10.0.0.5:5557", id="localhost"),
        pytest.param("::1", "tcp://10.0.0.5:5557", id="loopback, IPv6"),
        pytest.param("10.1.2.3", "tcp://10.1.2.3:5557", id="an address"),
        pytest.param("node-7.example", "tcp://node-7.example:5557", id="a name"),
        pytest.param("fd00::7", "tcp://[fd00::7]:5557", id="IPv6"),
    ],
)
def test_hosts_are_seen_from_the_gateway(host: str, endpoint: str) -> None:
    bracketed = f"[{host}]" if ":" in host and not host.startswith("[") else host
    assert sglang(kv_events=block(endpoint_host=host)) == [Source(0, endpoint, None, "kv", 16)]
    listed = {"dp_rank": 0, "endpoint": f"tcp://{bracketed}:5557", "topic": "kv", "block_size": 16}
    assert sglang(kv_event_sources=[listed]) == [Source(0, endpoint, None, "kv", 16)]
    assert vllm({"0": {"endpoint": f"tcp://{bracketed}:5557", "topic": "kv"}}) == [Source(0, endpoint, None, "kv", 32)]


def test_zmq_writes_ipv6_without_brackets_too() -> None:
    assert vllm({"0": {"endpoint": "tcp://:::5557"}}) == [Source(0, f"tcp://{HOST}:5557", None, "", 32)]


def test_a_worker_with_an_ipv6_address() -> None:
    assert sglang("fd00::5", kv_events=block()) == [Source(0, "tcp://[fd00::5]:5557", None, "kv", 16)]


def ranks(sources: list[Source] | None) -> list[tuple[int, str, str | None]]:
    return [(source.dp_rank, source.endpoint, source.replay_endpoint) for source in sources or ()]


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        pytest.param(
            {"kv_events": block(dp_size=2, replay_endpoint_port_base=5600)},
            [(0, f"tcp://{HOST}:5557", f"tcp://{HOST}:5600"), (1, f"tcp://{HOST}:5558", f"tcp://{HOST}:5601")],
            id="ports count up",
        ),
        pytest.param(
            {"kv_events": block(dp_size=4), "nnodes": 2, "node_rank": 1},
            [(2, f"tcp://{HOST}:5559", None), (3, f"tcp://{HOST}:5560", None)],
            id="ranks of the other node are left out",
        ),
        pytest.param(
            {"kv_events": block(dp_size=1), "nnodes": 2, "node_rank": 0},
            [(0, f"tcp://{HOST}:5557", None)],
            id="a rank over two nodes publishes on its first",
        ),
        pytest.param(
            {"kv_events": block(dp_size=2, endpoint_host="10.9.9.9"), "nnodes": 2, "node_rank": 0},
            [(0, "tcp://10.9.9.9:5557", None), (1, "tcp://10.9.9.9:5558", None)],
            id="an address is meant for all",
        ),
        pytest.param({"kv_events": block(), "kv_event_sources": []}, [], id="an empty list is believed"),
        pytest.param(
            {"kv_events": block(dp_size=2), "kv_event_sources": [{"dp_rank": 1, "endpoint": "tcp://127.0.0.1:7001"}]},
            [(1, f"tcp://{HOST}:7001", None)],
            id="a list is believed before the first port",
        ),
        pytest.param(
            {
                "kv_events": block(
                    dp_size=4,
                    replay_endpoint_port_base=5600,
                    publishers=[{"dp_rank": rank, "endpoint": NODES[rank].format(5557 + rank)} for rank in range(4)],
                ),
                "nnodes": 4,
                "kv_event_sources": [{"dp_rank": 0, "endpoint": "tcp://127.0.0.1:5557"}],
            },
            [(rank, NODES[rank].format(5557 + rank), NODES[rank].format(5600 + rank)) for rank in range(4)],
            id="publishers add the other nodes",
        ),
        pytest.param(
            {
                "kv_events": block(
                    dp_size=2,
                    publishers=[
                        {"dp_rank": 0, "endpoint": "tcp://*:5557"},
                        {"dp_rank": 1, "endpoint": "tcp://*:5558"},
                    ],
                ),
                "nnodes": 2,
            },
            [(0, f"tcp://{HOST}:5557", None)],
            id="a wildcard of another node says nothing",
        ),
        pytest.param(
            {"kv_event_sources": [{"dp_rank": 0, "endpoint": "ipc:///run/kv", "replay_endpoint": "ipc:///run/replay"}]},
            [(0, "ipc:///run/kv", "ipc:///run/replay")],
            id="ipc",
        ),
        pytest.param({"kv_events": block(publishers=[])}, [], id="no publishers"),
    ],
)  # fmt: skip
def test_ranks_of_sglang(info: dict[str, Any], expected: list[tuple[int, str, str | None]]) -> None:
    assert ranks(sglang(**info)) == expected


@pytest.mark.parametrize(
    "info",
    [
        pytest.param({}, id="older than events"),
        pytest.param({"kv_events": None}, id="null"),
        pytest.param({"kv_events": {"publisher": "null"}}, id="null publisher"),
    ],
)
def test_sglang_without_events(info: dict[str, Any]) -> None:
    assert sglang(**info) is None


def test_the_block_size_is_of_pages_over_all_context_ranks() -> None:
    sources = sglang(page_size=16, dcp_size=2, kv_event_sources=[{"dp_rank": 0, "endpoint": "tcp://*:1"}])
    assert sources == [Source(0, f"tcp://{HOST}:1", None, "", 32)]


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        pytest.param({"kv_event_sources": None}, "null", id="null list"),
        pytest.param({"kv_events": block(publishers=None)}, "null", id="null publishers"),
        pytest.param({"kv_events": block(endpoint_port_base=None)}, "TCP address", id="no port"),
        pytest.param({"kv_events": block(endpoint_host=None)}, "TCP address", id="no host"),
        pytest.param({"kv_events": block(dp_size=3, endpoint_port_base=65534)}, "port 65536", id="port too high"),
        pytest.param({"kv_events": block(endpoint_port_base=0)}, "port 0", id="port not chosen yet"),
        pytest.param({"kv_events": block(dp_size=10**9)}, "no number of ranks", id="absurd size"),
        pytest.param({"kv_events": block(block_size=-1)}, "block_size is -1", id="block size"),
        pytest.param({"kv_events": 5}, "cannot be read", id="not an object"),
        pytest.param({"kv_event_sources": [{"dp_rank": -1, "endpoint": "tcp://h:1"}]}, "no rank", id="rank"),
        pytest.param({"kv_event_sources": [{"dp_rank": 0, "endpoint": "inproc://kv"}]}, "no address", id="inproc"),
        pytest.param({"kv_event_sources": [{"dp_rank": 0, "endpoint": "tcp://h"}]}, "no address", id="no port in it"),
        pytest.param(
            {"kv_event_sources": [{"dp_rank": 0, "endpoint": "tcp://h:1"}, {"dp_rank": 0, "endpoint": "tcp://h:2"}]},
            "announced twice",
            id="rank twice",
        ),
        pytest.param(
            {"kv_event_sources": [{"dp_rank": 0, "endpoint": "tcp://h:1"}, {"dp_rank": 1, "endpoint": "tcp://h:1"}]},
            "one address",
            id="address twice",
        ),
    ],
)
def test_what_sglang_cannot_mean(info: dict[str, Any], reason: str) -> None:
    with pytest.raises(SourceMisconfigured, match=reason):
        sglang(**info)


def test_secrets_stay_out_of_errors() -> None:
    with pytest.raises(SourceMisconfigured) as caught:
        announced_by_sglang(b'{"api_key": "hunter2", "kv_events": 5}', HOST)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param(
            [
                {"data_parallel_rank": 1, "endpoint": "tcp://*:2", "replay_endpoint": None, "topic": ""},
                {"data_parallel_rank": 0, "endpoint": "tcp://10.1.1.1:1", "replay_endpoint": "tcp://*:9"},
            ],
            [(0, "tcp://10.1.1.1:1", f"tcp://{HOST}:9"), (1, f"tcp://{HOST}:2", None)],
            id="a list",
        ),
        pytest.param([{"endpoint": "tcp://*:2"}], [(0, f"tcp://{HOST}:2", None)], id="a list without ranks"),
        pytest.param(
            {
                "0": {"enable_kv_cache_events": False, "endpoint": "tcp://*:1"},
                "1": {"publisher": "null"},
                "2": {"endpoint": "tcp://*:3"},
            },
            [(2, f"tcp://{HOST}:3", None)],
            id="some ranks publish nothing",
        ),
        pytest.param(
            {"4": {"endpoint": "tcp://*:5561"}, "5": {"endpoint": "tcp://*:5562"}},
            [(0, f"tcp://{HOST}:5561", None), (1, f"tcp://{HOST}:5562", None)],
            id="the second node of hybrid load balancing",
        ),
        pytest.param(
            {"3": {"endpoint": "tcp://*:5560"}}, [(0, f"tcp://{HOST}:5560", None)], id="a server for each rank"
        ),
        pytest.param(
            {"2": {"publisher": "null"}, "3": {"endpoint": "tcp://*:5560"}},
            [(1, f"tcp://{HOST}:5560", None)],
            id="the first one of a node publishes nothing",
        ),
    ],
)
def test_ranks_of_vllm(answer: Any, expected: list[tuple[int, str, str | None]]) -> None:
    assert ranks(vllm(answer)) == expected


@pytest.mark.parametrize("answer", [{}, [], None, {"0": {"publisher": None}}], ids=repr)
def test_vllm_without_events(answer: Any) -> None:
    assert vllm(answer) is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param({"0": {"endpoint": None}}, "no address", id="no endpoint"),
        pytest.param({"x": {}}, "cannot be read", id="no rank"),
        pytest.param("?", "cannot be read", id="text"),
        pytest.param({"70000": {"endpoint": "tcp://*:1"}}, "no rank", id="rank"),
        pytest.param({"0": {"endpoint": "tcp://*:0"}}, "port 0", id="port not chosen yet"),
        pytest.param([{"endpoint": "tcp://*:1"}, {"endpoint": "tcp://*:2"}], "twice", id="rank twice"),
    ],
)
def test_what_vllm_cannot_mean(answer: Any, reason: str) -> None:
    with pytest.raises(SourceMisconfigured, match=reason):
        vllm(answer)


@pytest.mark.parametrize(
    ("endpoint", "dp_size", "expected"),
    [
        pytest.param("tcp://10.2.2.2:5557", 2, ["tcp://10.2.2.2:5557", "tcp://10.2.2.2:5558"], id="ports count up"),
        pytest.param("tcp://*:5557", 1, [f"tcp://{HOST}:5557"], id="wildcard"),
        pytest.param("tcp://127.0.0.1:5557", 1, ["tcp://127.0.0.1:5557"], id="a tunnel"),
        pytest.param("tcp://[fd00::1]:5557", 1, ["tcp://[fd00::1]:5557"], id="IPv6"),
        pytest.param("ipc:///run/kv.sock", 1, ["ipc:///run/kv.sock"], id="ipc"),
    ],
)
def test_an_operators_address(endpoint: str, dp_size: int, expected: list[str]) -> None:
    sources = set_by_operator(endpoint, HOST, dp_size, 16)
    assert sources == [Source(rank, address, block_size=16) for rank, address in enumerate(expected)]


@pytest.mark.parametrize(
    ("endpoint", "dp_size", "reason"),
    [
        pytest.param("ipc:///run/kv.sock", 2, "2 ranks", id="ipc has no ports"),
        pytest.param("inproc://kv", 1, "cannot be subscribed", id="inproc"),
        pytest.param("tcp://h", 1, "no address", id="no port"),
        pytest.param("tcp://h:65535", 2, "port 65536", id="port too high"),
    ],
)
def test_an_operators_mistake(endpoint: str, dp_size: int, reason: str) -> None:
    with pytest.raises(SourceMisconfigured, match=reason):
        set_by_operator(endpoint, HOST, dp_size)

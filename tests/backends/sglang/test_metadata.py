"""What is read of a worker's metadata: real bodies, and bodies that are not what they should be."""

import dataclasses
import json
from typing import Any

import msgspec
import pytest

from backends.sglang.metadata import facts_from
from backends.types import EngineFacts, EngineKind, Role
from backends.versions import parse_version
from tests.simulator.wire import load_capture


def captured(path: str) -> bytes:
    """Body of a captured answer."""
    return load_capture(path.removesuffix(".http")).response.partition(b"\r\n\r\n")[2]


MODELS = captured("http/get_v1_models.http")
PLAIN = captured("http/get_server_info.http")


@pytest.mark.parametrize(
    ("model_info", "server_info", "expected"),
    [
        pytest.param(
            "http/get_model_info.http", "http/get_server_info.http",
            {"max_running_requests": 2048, "boot_id": "490434039", "kv_blocks": 1024},
            id="plain",
        ),
        pytest.param(
            "http/get_model_info.http", "http_dp2/server_info.http",
            {"dp_size": 2, "max_running_requests": 4, "incremental_output": True, "boot_id": "125527009",
             "kv_blocks": 64},
            id="two ranks, incremental",
        ),
        pytest.param(
            "http_pd/prefill_model_info.http", "http_pd/prefill_server_info.http",
            {"role": Role.PREFILL, "max_running_requests": 1024, "boot_id": "769386621", "kv_blocks": 512,
             "bootstrap_port": 36601, "follows_rooms": True},
            id="prefill",
        ),
    ],
)  # fmt: skip
def test_captured_metadata(model_info: str, server_info: str, expected: dict[str, Any]) -> None:
    common = {
        "engine": EngineKind.SGLANG,
        "version": (0, 5, 23),
        "version_text": "0.5.23",
        "model_id": "model",
        "page_size": 4,
        "context_tokens": 2048,
        "weight_version": "default",
        "models": ("model",),
        "bootstrap_port": 8998,
    }
    found = facts_from(captured(model_info), captured(server_info), MODELS)
    assert dataclasses.replace(found, kv_announcement=b"") == EngineFacts(**{**common, **expected})


def test_what_is_said_of_publishers_is_kept_and_nothing_else() -> None:
    announced = json.loads(
        facts_from(captured("http/get_model_info.http"), captured("http/get_server_info.http"), MODELS).kv_announcement
    )
    assert sorted(announced) == ["dcp_size", "kv_events", "nnodes", "node_rank", "page_size"]
    assert announced["kv_events"]["endpoint_port_base"] == 31557
    assert (
        facts_from(
            captured("http/get_model_info.http"), captured("http_pd/prefill_server_info.http"), MODELS
        ).kv_announcement
        == b""
    )


def facts(
    server: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    models: list[dict[str, Any]] | None = None,
) -> EngineFacts:
    """Facts from small made-up bodies."""
    model_info = {"model_path": "/m", **(model or {})}
    served = {"data": models if models is not None else [{"id": "served"}]}
    return facts_from(json.dumps(model_info).encode(), json.dumps(server or {}).encode(), json.dumps(served).encode())


@pytest.mark.parametrize(
    ("server", "field", "value"),
    [
        pytest.param({}, "dp_size", 1, id="no ranks named"),
        pytest.param({"dp_size": 0}, "dp_size", 1, id="rank count 0"),
        pytest.param({"dp_size": 1, "kv_events": {"dp_size": 4}}, "dp_size", 4, id="the publisher's count of ranks"),
        pytest.param({"dp_size": 2, "kv_events": {"dp_size": None}}, "dp_size", 2, id="a publisher without one"),
        pytest.param({}, "page_size", 1, id="no page size"),
        pytest.param({"page_size": 16, "dcp_size": 2}, "page_size", 32, id="context parallelism widens blocks"),
        pytest.param({"page_size": 16, "kv_events": {"block_size": 64}}, "page_size", 64, id="the publisher's block"),
        pytest.param({"context_length": 4096}, "context_tokens", 4096, id="context of the server"),
        pytest.param({}, "context_tokens", 1024, id="context of the model list"),
        pytest.param({"disaggregation_mode": None}, "role", Role.REGULAR, id="no role"),
        pytest.param({"disaggregation_mode": "agg"}, "role", Role.REGULAR, id="aggregated"),
        pytest.param({"disaggregation_mode": "decode"}, "role", Role.DECODE, id="decode"),
        pytest.param({"disaggregation_mode": "null", "internal_states": [{"disaggregation_mode": "prefill"}]},
                     "role", Role.PREFILL, id="a role that was switched"),
        pytest.param({"internal_states": [{}], "disaggregation_mode": "decode"}, "role", Role.DECODE,
                     id="a live state that does not say"),
        pytest.param({"max_running_requests": 8, "dp_size": 2}, "max_running_requests", 16, id="limit of each rank"),
        pytest.param({"max_running_requests": 8, "dp_size": 2, "enable_dp_attention": True}, "max_running_requests", 8,
                     id="limit of all ranks"),
        pytest.param({}, "max_running_requests", None, id="no limit"),
        pytest.param({"random_seed": 0}, "boot_id", "0", id="seed 0"),
        pytest.param({}, "boot_id", "", id="no seed"),
        pytest.param({"version": "0.5.17.dev1+g1"}, "version", (0, 5, 17), id="development version"),
        pytest.param({"unknown": {"x": [1]}}, "version", (), id="unknown fields, no version"),
    ],
)  # fmt: skip
def test_single_facts(server: dict[str, Any], field: str, value: object) -> None:
    models: list[dict[str, Any]] = [{"id": "lora", "parent": "served"}, {"id": "served", "max_model_len": 1024}]
    assert getattr(facts(server, models=models), field) == value


@pytest.mark.parametrize(
    ("server", "model", "models", "name"),
    [
        pytest.param({}, {}, [{"id": "a:lora", "parent": "a"}, {"id": "a"}], "a", id="the base, not its adapter"),
        pytest.param({}, {"served_model_name": "b"}, [], "b", id="model_info's name"),
        pytest.param({"served_model_name": "c"}, {}, [], "c", id="server_info's name"),
        pytest.param({}, {}, [], "/m", id="the path"),
    ],
)
def test_model_names(server: dict[str, Any], model: dict[str, Any], models: list[dict[str, Any]], name: str) -> None:
    assert facts(server, model, models).model_id == name


@pytest.mark.parametrize(
    ("server", "model", "models"),
    [
        pytest.param({}, {"model_path": ""}, [], id="no model"),
        pytest.param({"disaggregation_mode": "sideways"}, {}, None, id="unknown role"),
        pytest.param({"dp_size": "two"}, {}, None, id="wrong type"),
        pytest.param({}, {}, [{"object": "model"}], id="model without an id"),
    ],
)
def test_what_no_worker_says(
    server: dict[str, Any], model: dict[str, Any], models: list[dict[str, Any]] | None
) -> None:
    with pytest.raises(msgspec.ValidationError):
        facts(server, model, models)


def test_what_is_no_json() -> None:
    with pytest.raises(msgspec.DecodeError):
        facts_from(b"<html>", b"{}", b"{}")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.5.23", (0, 5, 23)),
        ("0.5.23.post1", (0, 5, 23)),
        ("0.5.23rc2", (0, 5, 23)),
        ("1", (1,)),
        ("1.", (1,)),
        ("", ()),
        ("v1.2", ()),
        ("main", ()),
        ("9" * 6000, (999999999,)),
    ],
)
def test_versions(text: str, version: tuple[int, ...]) -> None:
    assert parse_version(text) == version

"""What is read of a vLLM server's metadata: real bodies, and bodies that are not what they should be."""

import json
from typing import Any

import msgspec
import pytest

from backends.types import EngineFacts, EngineKind, Role
from backends.versions import parse_version
from backends.vllm.metadata import facts_from
from tests.simulator.wire import VLLM_CAPTURES, load_vllm_capture

# The captured metrics are excerpts without the process's own; this is how its client library writes them.
STARTED = b"process_start_time_seconds 1.79595177892e+09\n"


def captured(name: str) -> bytes:
    """Body of a captured answer."""
    return load_vllm_capture(name).response.partition(b"\r\n\r\n")[2]


def metrics_of(path: str) -> bytes:
    """Captured metrics."""
    return (VLLM_CAPTURES / path).read_bytes()


VERSION = captured("misc/version")
PLAIN = metrics_of("misc/metrics-vllm-samples.txt")


@pytest.mark.parametrize(
    ("models", "metrics", "expected"),
    [
        pytest.param("misc/models", STARTED + PLAIN,
                     {"models": ("tiny", "tiny-alias"), "boot_id": "1.79595177892e+09", "kv_blocks": 80},
                     id="one rank, an alias"),
        pytest.param("dp2/models-with-lora", metrics_of("dp2/metrics-running-kv.txt"),
                     {"models": ("tiny", "my-lora"), "adapters": ("my-lora",), "dp_size": 2, "kv_blocks": 160},
                     id="two ranks, an adapter"),
    ],
)  # fmt: skip
def test_captured_metadata(models: str, metrics: bytes, expected: dict[str, Any]) -> None:
    common: dict[str, Any] = {
        "engine": EngineKind.VLLM,
        "version": (0, 32, 0),
        "version_text": "0.32.0",
        "model_id": "tiny",
        "role": Role.REGULAR,
        "page_size": 32,
        "context_tokens": 2048,
        "incremental_output": True,
    }
    assert facts_from(captured(models), VERSION, metrics) == EngineFacts(**{**common, **expected})


@pytest.mark.parametrize(
    ("more", "connector"),
    [
        pytest.param(b"# TYPE vllm:nixl_num_kv_expired_reqs_total counter\nvllm:nixl_num_kv_expired_reqs_total 0.0\n",
                     "nixl", id="by its counters"),
        pytest.param(b"# HELP vllm:nixl_xfer_time_seconds x\n", "", id="a comment is none"),
        pytest.param(b"", "", id="it does not say"),
    ],
)  # fmt: skip
def test_how_prompts_are_handed_over(more: bytes, connector: str) -> None:
    assert facts_from(captured("misc/models"), VERSION, PLAIN + more).kv_connector == connector


def test_sources_of_events_go_on_as_they_are() -> None:
    sources = captured("misc/kv_event_sources")
    assert facts_from(captured("misc/models"), VERSION, PLAIN, sources).kv_announcement == sources


def config(**labels: object) -> str:
    """One sample of the metric that holds block size and rank."""
    shown = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"vllm:cache_config_info{{{shown}}} 1.0\n"


def facts(models: list[dict[str, Any]], metrics: str = "", version: str = '{"version":"0.32.0"}') -> EngineFacts:
    """Facts from small made-up bodies."""
    return facts_from(json.dumps({"data": models}).encode(), version.encode(), metrics.encode())


@pytest.mark.parametrize(
    ("metrics", "field", "value"),
    [
        pytest.param("", "dp_size", 1, id="no metric"),
        pytest.param("", "page_size", 16, id="no block size"),
        pytest.param("", "boot_id", "", id="no start time"),
        pytest.param(config(engine=0, block_size=16), "page_size", 16, id="block size"),
        pytest.param(config(engine=0, block_size="None"), "page_size", 16, id="a block size that is none"),
        pytest.param(config(engine=0, block_size=0), "page_size", 16, id="blocks of nothing"),
        pytest.param(config(block_size=64), "dp_size", 1, id="a release without the label"),
        pytest.param(config(engine=0) + config(engine=1) + config(engine=2), "dp_size", 3, id="ranks"),
        pytest.param(config(engine=4) + config(engine=5), "dp_size", 2, id="ranks of the second node"),
        pytest.param(config(engine=0) + config(engine=0, x=1), "dp_size", 1, id="one rank, two samples"),
        pytest.param(config(x='a}\\"b', engine=0, block_size=8), "page_size", 8, id="a label with a brace and a quote"),
        pytest.param("# HELP vllm:cache_config_info x\n" + config(engine=0, block_size=8), "page_size", 8, id="help"),
        pytest.param("process_start_time_seconds 1.5e+09\n", "boot_id", "1.5e+09", id="start time"),
    ],
)
def test_single_facts(metrics: str, field: str, value: object) -> None:
    assert getattr(facts([{"id": "m"}], metrics), field) == value


@pytest.mark.parametrize(
    ("models", "name", "context"),
    [
        pytest.param([{"id": "a", "parent": None, "max_model_len": 8}], "a", 8, id="one"),
        pytest.param([{"id": "lora", "parent": "a"}, {"id": "a", "max_model_len": 8}], "a", 8, id="not its adapter"),
        pytest.param([{"id": "a", "max_model_len": 8}, {"id": "b", "max_model_len": 8}], "a", 8, id="not its alias"),
        pytest.param([{"id": "lora", "parent": "a"}], "lora", None, id="nothing but an adapter"),
    ],
)
def test_model_names(models: list[dict[str, Any]], name: str, context: int | None) -> None:
    found = facts(models)
    assert (found.model_id, found.context_tokens) == (name, context)
    assert found.models == tuple(model["id"] for model in models)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('{"version":"0.32.0"}', (0, 32, 0)),
        ('{"version":"0.9.2.dev3+gabc.cpu"}', (0, 9, 2)),
        ('{"version":"dev"}', ()),
        ("{}", ()),
    ],
)
def test_versions(text: str, version: tuple[int, ...]) -> None:
    found = facts([{"id": "m"}], version=text)
    assert found.version == version == parse_version(found.version_text)


@pytest.mark.parametrize(
    ("models", "version", "says"),
    [
        pytest.param(b'{"data":[]}', VERSION, "lists no model", id="no model"),
        pytest.param(b"{}", VERSION, "lists no model", id="no list"),
        pytest.param(b'{"data":[{"object":"model"}]}', VERSION, "required field `id`", id="a model without a name"),
        pytest.param(b'{"data":{}}', VERSION, "Expected `array`", id="another shape"),
        pytest.param(b"<html>", VERSION, "malformed", id="HTML"),
        pytest.param(captured("misc/models"), b'"0.32"', "Expected `object`", id="a bare version"),
        pytest.param(captured("misc/models"), b'{"version":32}', "Expected `str`", id="a version that is a number"),
    ],
)
def test_what_no_server_says(models: bytes, version: bytes, says: str) -> None:
    with pytest.raises(msgspec.DecodeError, match=says):
        facts_from(models, version, PLAIN)


def test_metrics_are_read_whatever_they_are() -> None:
    assert facts_from(captured("misc/models"), VERSION, b"\xff\x00<html>").page_size == 16

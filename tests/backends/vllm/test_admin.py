"""What SGLang's control routes are called on vLLM."""

import pytest

from backends.vllm.admin import NoCounterpart, vllm_target


@pytest.mark.parametrize(
    ("path", "query", "body", "target"),
    [
        pytest.param("/pause_generation", "", b"", "/pause?mode=abort", id="pause, no body"),
        pytest.param("/pause_generation", "", b"{}", "/pause?mode=abort", id="pause, as by default"),
        pytest.param("/pause_generation", "", b'{"mode":"in_place"}', "/pause?mode=keep", id="pause in place"),
        pytest.param("/pause_generation", "mode=wait", b"{}", "/pause?mode=wait", id="pause in its own words"),
        pytest.param("/pause_generation", "a=1", b"{}", "/pause?a=1&mode=abort", id="pause, another query"),
        pytest.param("/continue_generation", "", b'{"torch_empty_cache":true}', "/resume", id="continue"),
        pytest.param("/flush_cache", "timeout=3", b"", "/reset_prefix_cache?timeout=3", id="flush"),
        pytest.param("/update_weight_version", "", b"{", "/update_weight_version", id="the engine judges bodies"),
        pytest.param("/release_memory_occupation", "", b'{"tags":null}', "/sleep", id="release all"),
        pytest.param(
            "/release_memory_occupation",
            "level=2",
            b'{"tags":["kv_cache","weights"]}',
            "/sleep?level=2",
            id="both tags",
        ),
        pytest.param("/resume_memory_occupation", "", b"", "/wake_up", id="resume all"),
        pytest.param("/resume_memory_occupation", "", b'{"tags":["a b","c"]}', "/wake_up?tags=a+b&tags=c", id="resume"),
        pytest.param("/load_lora_adapter", "", b"{}", "/v1/load_lora_adapter", id="load"),
        pytest.param("/unload_lora_adapter", "", b"{}", "/v1/unload_lora_adapter", id="unload"),
    ],
)
def test_the_same_under_another_name(path: str, query: str, body: bytes, target: str) -> None:
    assert vllm_target(path, query, body) == target


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        pytest.param("/update_weights_from_disk", b"{}", 501, "/update_weights_from_disk", id="no such route"),
        pytest.param("/pause_generation", b'{"mode":"retract"}', 501, "'retract'", id="no such mode"),
        pytest.param("/pause_generation", b'{"mode":["abort"]}', 501, "mode", id="a mode that is none"),
        pytest.param("/pause_generation", b"{", 400, "JSON object", id="no JSON"),
        pytest.param("/pause_generation", b"[]", 400, "JSON object", id="no object"),
        pytest.param("/release_memory_occupation", b'{"tags":["kv_cache"]}', 501, "'tags'", id="a part"),
        pytest.param("/release_memory_occupation", b'{"tags":"weights"}', 400, "'tags'", id="tags that are none"),
        pytest.param("/resume_memory_occupation", b'{"tags":[1]}', 400, "'tags'", id="a tag that is none"),
    ],
)
def test_what_has_no_counterpart(path: str, body: bytes, status: int, said: str) -> None:
    found = vllm_target(path, "", body)
    assert isinstance(found, NoCounterpart)
    assert (found.status, said in found.reason) == (status, True)

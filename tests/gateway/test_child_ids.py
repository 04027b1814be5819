"""Ids that an engine made by itself, found in its events and nowhere else."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.sse import data_of, events
from gateway.child_ids import revealed
from tests.fakes.replay_engine import captured_answer
from tests.simulator.wire import load_capture

FIRST, SECOND = "0123456789abcdef" * 2, "fedcba9876543210" * 2
PATTERNS = [f'"meta_info":{{"id":"{SECOND}"', f'\n\ndata: {{"id":"{SECOND}"', f'data: {{"id":"{SECOND}"']


def native(text: str, engine_id: str = FIRST) -> bytes:
    """An event of the native stream."""
    event = {"text": text, "meta_info": {"id": engine_id, "finish_reason": None}, "index": 0}
    return b"data: %b\n\n" % json.dumps(event, separators=(",", ":")).encode()


def chunk(text: str, engine_id: str = FIRST) -> bytes:
    """A chunk of a chat stream."""
    event = {"id": engine_id, "choices": [{"index": 0, "delta": {"content": text}}]}
    return b"data: %b\n\n" % json.dumps(event, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param("http/gen_stream_n2", 2, id="native"),
        pytest.param("http_dp2/incr_stream_n2", 2, id="native incremental"),
        pytest.param("http/chat_n2_stream", 2, id="chat"),
        pytest.param("http/gen_stream_text", 1, id="one sample"),
        pytest.param("http/gen_stream_err_temp", 0, id="error"),
    ],
)
def test_ids_in_captured_streams(name: str, count: int) -> None:
    answer = captured_answer(load_capture(name))
    assert answer is not None
    payloads = [json.loads(data) for event in events(answer.body) if (data := data_of(event)).startswith(b"{")]
    found = [payload["id"] if "id" in payload else payload.get("meta_info", {}).get("id") for payload in payloads]
    expected = tuple(dict.fromkeys(one for one in found if one))
    assert len(expected) == count
    assert revealed(answer.body) == expected


@pytest.mark.parametrize("event", [native, chunk])
@pytest.mark.parametrize("pattern", PATTERNS)
@given(before=st.text(max_size=20), after=st.text(max_size=20))
def test_an_id_in_a_text_is_no_id(event: Callable[..., bytes], pattern: str, before: str, after: str) -> None:
    assert revealed(event(before + pattern + after)) == (FIRST,)


@pytest.mark.parametrize("event", [native, chunk])
def test_several_events_in_one_block(event: Callable[..., bytes]) -> None:
    block = event("a") + event("b", SECOND) + b": comment\n\n" + event("c") + b"data: [DONE]\n\n"
    assert revealed(block) == (FIRST, SECOND)
    assert revealed(b": comment\n\n" + event("a", SECOND)) == (SECOND,)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"data: [DONE]\n\n", id="end"),
        pytest.param(native("a", FIRST[:-1]), id="short"),
        pytest.param(native("a", FIRST + "0"), id="long"),
        pytest.param(native("a", FIRST.upper()), id="capitals"),
        pytest.param(chunk("a", "chatcmpl-1"), id="another engine's"),
        pytest.param(b'data: {"id":"' + FIRST.encode(), id="cut"),
    ],
)
def test_what_is_no_id(block: bytes) -> None:
    assert revealed(block) == ()

"""What shows that vLLM has begun to decode."""

import re
from pathlib import Path

import pytest

from backends.errors import AnswerMalformed
from backends.sse import DONE_DATA
from backends.vllm.output import has_output, is_silent

CAPTURES = Path(__file__).parents[2] / "data" / "captures" / "vllm"


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(b"", False, id="comment"),
        pytest.param(DONE_DATA, False, id="end marker"),
        pytest.param(
            b'{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}', False, id="role"
        ),
        pytest.param(b'{"choices":[{"delta":{"content":"a"}}]}', True, id="chat text"),
        pytest.param(b'{"choices":[{"delta":{"reasoning":"a"}}]}', True, id="reasoning"),
        pytest.param(b'{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}', True, id="tool call"),
        pytest.param(b'{"choices":[{"delta":{},"finish_reason":"stop"}]}', True, id="chat end"),
        pytest.param(b'{"choices":[{"text":"","finish_reason":null}]}', False, id="empty text"),
        pytest.param(b'{"choices":[{"text":"","token_ids":[5]}]}', True, id="half a character"),
        pytest.param(b'{"choices":[{"text":"","finish_reason":"abort"}]}', True, id="aborted"),
        pytest.param(b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":0}}', False, id="usage, no token"),
        pytest.param(b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}', True, id="usage"),
        pytest.param(b'{"error":{"message":"dead"}}', False, id="error"),
    ],
)
def test_events(data: bytes, expected: bool) -> None:
    assert has_output(data) is expected


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"choices":5}', b'{"choices":[{"text":1}]}', b"\xff"])
def test_other_shapes_are_errors(data: bytes) -> None:
    with pytest.raises(AnswerMalformed):
        has_output(data)


def _streams() -> list[Path]:
    found = sorted(CAPTURES.glob("*/*.resp"))
    return [p for p in found if b"text/event-stream" in p.read_bytes()[:600] and p.parent.name != "engine-death"]


@pytest.mark.parametrize("path", _streams(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_captured_stream_can_be_read_and_shows_output_where_it_has_any(path: Path) -> None:
    events = re.findall(rb"data: (\{.*\})\n\n", path.read_bytes())
    shown = [has_output(event) for event in events if b'"choices"' in event]
    # The token route tells a finish reason then too.
    has_none = "before-first-token" in path.stem and not path.stem.startswith("generate")
    if shown:
        assert any(shown) is not has_none
    assert is_silent(b"".join(b"data: %b\n\n" % event for event in events)) is has_none
    if events and b'"role":"assistant","content":""' in events[0]:
        assert not shown[0]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        pytest.param(b"", True, id="nothing"),
        pytest.param(b": ping\n\ndata: [DONE]\n\n", True, id="a comment and the end"),
        pytest.param(b'data: {"text":"","meta_info":{}}\n\n', False, id="a native event"),
        pytest.param(b'data: {"choices":[{"text":7}]}\n\n', False, id="another shape"),
        pytest.param(b'data: {"choices":[]}\n\ndata: {"choices":[{"text":"a"}]}\n\n', False, id="one of several"),
    ],
)
def test_what_is_silent(block: bytes, expected: bool) -> None:
    assert is_silent(block) is expected

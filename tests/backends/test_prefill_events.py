"""What is read of a prefill leg's answer."""

import json
from collections.abc import Callable

import pytest

from backends.errors import AnswerBroken, AnswerMalformed, AnswerTooLarge, UpstreamError
from backends.prefill_events import PrefillReader, PrefillRefused, PromptReport, is_prompt_field
from tests.backends.captured_pair import sglang_answer, vllm_answer

LIMIT = 1 << 20
DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def meta(finish: object, **more: object) -> dict[str, object]:
    return {"meta_info": {"id": "x", "finish_reason": finish, **more}}


END = event(meta({"type": "length", "length": 0}, cached_tokens=4, completion_tokens=1))


def read(stream: bytes, *, limit: int = LIMIT, count: int = 1, keeps: bool = False, step: int = 0) -> PrefillReader:
    reader = PrefillReader(limit_bytes=limit, is_stream=True, count=count, keeps_logprobs=keeps)
    step = step or len(stream) or 1
    for start in range(0, len(stream), step):
        reader.feed(stream[start : start + step])
    reader.end()
    return reader


def read_document(body: bytes, *, limit: int = LIMIT, count: int = 1, keeps: bool = False) -> PrefillReader:
    reader = PrefillReader(limit_bytes=limit, is_stream=False, count=count, keeps_logprobs=keeps)
    for start in range(0, len(body), 100):
        reader.feed(body[start : start + 100])
    reader.end()
    return reader


@pytest.mark.parametrize(
    ("stream", "error", "match"),
    [
        pytest.param(b"", AnswerBroken, "before its terminal", id="nothing"),
        pytest.param(event(meta(None)), AnswerBroken, "before its terminal", id="A0.11: end without a terminal"),
        pytest.param(event(meta(None)) + END[:-1], AnswerBroken, "before its terminal", id="terminal cut short"),
        pytest.param(DONE + END, AnswerMalformed, "end marker", id="A0.11: end marker first"),
        pytest.param(b"data: {\n\n", AnswerMalformed, "cannot be read", id="A0.11: invalid JSON"),
        pytest.param(b"data: []\n\n", AnswerMalformed, "cannot be read", id="no object"),
        pytest.param(b'data: {"error":"\xff"}\n\n', AnswerMalformed, "cannot be read", id="no UTF-8"),
        pytest.param(event({"meta_info": [1]}), AnswerMalformed, "cannot be read", id="another shape"),
        pytest.param(b"data: " + b"[" * 200_000 + b"\n\n", AnswerMalformed, "cannot be read", id="nested deeply"),
        pytest.param(b"data: " + b"x" * LIMIT, AnswerTooLarge, "larger than", id="A0.11: a line above the bound"),
        pytest.param(event({**meta({"type": "stop"}), "index": 7}), AnswerMalformed, "not sent", id="foreign prompt"),
        pytest.param(event({"choices": [{"index": -1}]}), AnswerMalformed, "not sent", id="foreign choice"),
    ],
)
def test_what_is_no_answer(stream: bytes, error: type[UpstreamError], match: str) -> None:
    with pytest.raises(error, match=match):
        read(stream)


@pytest.mark.parametrize(
    ("value", "status", "kind", "message"),
    [
        pytest.param({"error": {"message": "bad", "code": 400}}, 400, "error", "bad", id="error object"),
        pytest.param({"error": {"message": "full", "code": "503"}}, 503, "error", "full", id="code as text"),
        pytest.param({"error": {"message": "x", "code": "SERVICE"}}, 500, "error", "x", id="code as a word"),
        pytest.param({"error": {"message": "x", "code": 200}}, 500, "error", "x", id="code of success"),
        pytest.param({"error": {}}, 500, "error", "ended the request: error", id="error without a text"),
        pytest.param({"error": "unknown field"}, 500, "error", "unknown field", id="error as a string"),
        pytest.param(
            meta({"type": "abort", "message": "KVTransferError", "status_code": 500}),
            500, "abort", "KVTransferError", id="abort with a status",
        ),
        pytest.param(meta({"type": "abort"}), 500, "abort", "ended the request: abort", id="abort without one"),
        pytest.param(meta({"type": "abort", "status_code": 400}), 400, "abort", "abort", id="abort for the client"),
        pytest.param(meta({"type": "error", "message": "x"}), 500, "error", "x", id="error finish"),
        pytest.param(meta({"type": "cancelled"}), 500, "cancelled", "cancelled", id="cancelled"),
        pytest.param({"choices": [{"finish_reason": "abort"}]}, 500, "abort", "abort", id="choice aborted"),
        pytest.param(
            {"text": "tokens", "output_ids": [1, 2], **meta({"type": "abort", "message": "late"})},
            500, "abort", "late", id="A0.12: abort together with tokens",
        ),
    ],
)  # fmt: skip
def test_failures_inside_a_successful_answer(value: object, status: int, kind: str, message: str) -> None:
    reads: tuple[Callable[[bytes], PrefillReader], ...] = (read, read_document)
    for reading, body in zip(reads, (event(value), json.dumps(value).encode()), strict=True):
        with pytest.raises(PrefillRefused, match=message) as caught:
            reading(body)
        assert (caught.value.status, caught.value.kind) == (status, kind)
    assert bool(caught.value.body) is ('"error":' in json.dumps(value))


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_a_stream_at_any_cut(step: int) -> None:
    stream = b": comment\n\nevent: x\nid: 1\nretry: 5\n\ndata:" + event({**meta(None), "text": "é"})[6:] + END + DONE
    reader = read(stream, step=step)
    assert reader.is_terminated
    assert reader.body == b""
    assert reader.prompts == [PromptReport(cached_tokens=4)]


def test_what_follows_the_terminal_is_read_for_its_numbers() -> None:
    chunks = [
        event({"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]}),
        event({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "length"}]}),
        event({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 12}}}),
        event({"choices": [], "usage": {"prompt_tokens_details": None}}),
        DONE,
    ]
    assert read(b"".join(chunks)).prompts == [PromptReport(cached_tokens=12)]


def test_a_batch_ends_when_all_of_it_has() -> None:
    first = event({**meta({"type": "length"}, cached_tokens=1), "index": 1})
    with pytest.raises(AnswerMalformed, match="end marker"):
        read(first + DONE, count=2)
    second = event({**meta({"type": "length"}, cached_tokens=2), "index": 0})
    assert [prompt.cached_tokens for prompt in read(first + second + DONE, count=2).prompts] == [2, 1]


def test_a_batch_in_one_document() -> None:
    reader = read_document(sglang_answer("http_pd/batch_prefill"), count=2)
    assert [prompt.cached_tokens for prompt in reader.prompts] == [4, 0]
    with pytest.raises(AnswerBroken, match="terminal"):
        read_document(sglang_answer("http_pd/batch_prefill"), count=3)
    with pytest.raises(AnswerMalformed, match="not sent"):
        read_document(sglang_answer("http_pd/batch_prefill"), count=1)
    with pytest.raises(AnswerMalformed, match="cannot be read"):
        read_document(b"[1]")


def test_a_document_is_bounded() -> None:
    body = sglang_answer("http_pd/unary_prefill")
    assert read_document(body, limit=len(body)).body == body
    with pytest.raises(AnswerTooLarge, match="larger than"):
        read_document(body, limit=len(body) - 1)


@pytest.mark.parametrize(
    "name",
    ["unary_prefill", "stream_prefill", "chat_prefill", "prefill_fake_stream", "prefill_fake", "abort_both_prefill"],
)
def test_captured_answers_end_well(name: str) -> None:
    body = sglang_answer(f"http_pd/{name}")
    reads: Callable[[bytes], PrefillReader] = read if body.startswith(b"data:") else read_document
    assert reads(body).is_terminated


def test_captured_abort_is_a_failure() -> None:
    with pytest.raises(PrefillRefused, match="Prefill bootstrap failed") as caught:
        read(sglang_answer("http_pd/prefill_orphan_stream_abort"))
    assert caught.value.status == 500


@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "document"])
def test_captured_logprobs_are_kept_as_they_are(is_stream: bool) -> None:
    body = sglang_answer("http_pd/logprob_stream_prefill" if is_stream else "http_pd/logprob_prefill")
    (prompt,) = (read if is_stream else read_document)(body, keeps=True).prompts
    assert list(prompt.logprobs) == ["input_token_logprobs", "input_top_logprobs"]
    assert all(b'"%b":%b' % (name.encode(), raw) in body for name, raw in prompt.logprobs.items())
    assert prompt.logprobs["input_token_logprobs"].startswith(b"[[null,352,null],[-6.803166389465332,350,null]")
    assert prompt.output_tokens == 1


def test_logprobs_that_nobody_wants_are_not_kept() -> None:
    assert read(sglang_answer("http_pd/logprob_stream_prefill")).prompts[0].logprobs == {}


def test_kept_logprobs_are_bounded_and_replaced_not_added() -> None:
    events = [event(meta(None, input_token_logprobs=[1.5] * 100)) for _ in range(10)]
    stream = b"".join([*events, event(meta({"type": "length"}, input_token_logprobs=[1.5] * 100))])
    assert read(stream, limit=600, keeps=True).prompts[0].logprobs == {
        "input_token_logprobs": b"[" + b",".join([b"1.5"] * 100) + b"]"
    }
    batch = b"".join(
        event({**meta({"type": "length"}, input_token_logprobs=[1.5] * 100), "index": index}) for index in range(3)
    )
    with pytest.raises(AnswerTooLarge, match="larger than"):
        read(batch, limit=600, count=3, keeps=True)


def test_vllm_tells_of_its_prompt_in_the_choice_or_beside_it() -> None:
    body = vllm_answer("completions/prompt-logprobs")
    logprobs = read_document(body, keeps=True).prompts[0].logprobs
    assert list(logprobs) == ["prompt_logprobs"]
    assert logprobs["prompt_logprobs"].startswith(b'[null,{"15":{"logprob":-12.356344223022461')
    chat = json.dumps({"choices": [{"finish_reason": "length"}], "prompt_logprobs": [None, 1]}).encode()
    assert read_document(chat, keeps=True).prompts[0].logprobs == {"prompt_logprobs": b"[null, 1]"}


def test_the_first_piece_of_an_openai_stream_tells_of_the_prompt() -> None:
    first = event({"choices": [{"index": 0, "logprobs": {"tokens": ["a", "b"]}, "finish_reason": None}]})
    second = event({"choices": [{"index": 0, "logprobs": {"tokens": ["c"]}, "finish_reason": "length"}]})
    assert read(first + second, keeps=True).prompts[0].logprobs == {"logprobs": b'{"tokens":["a","b"]}'}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("input_token_logprobs", True),
        ("input_token_ids_logprobs", True),
        ("input_top_logprobs_idx_flat_b64_dtype", True),
        ("input_top_logprobs_null_prefix", True),
        ("output_token_logprobs", False),
        ("input_tokens", False),
    ],
)
def test_fields_about_the_prompt(name: str, expected: bool) -> None:
    assert is_prompt_field(name) is expected

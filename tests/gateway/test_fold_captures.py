"""Folds of captured streams against the unary answers that the same engines gave to the same prompts."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backends.sse import EventCutter
from backends.types import EngineKind
from gateway.errors import EngineRefused
from gateway.fold import Fold, FoldIncomplete, new_fold
from gateway.outcome import Outcome
from gateway.routes import Dialect
from tests.simulator.wire import load_capture, parse_answer

SGLANG, VLLM = EngineKind.SGLANG, EngineKind.VLLM
VLLM_CAPTURES = Path(__file__).parent.parent / "data" / "captures" / "vllm"
CUT = re.compile(rb"\.\.\.[\[(]cut")
LIMIT_BYTES = 1 << 20
# Clocks, ids and cache hits differ between any two answers, in type too: null or an object.
VARYING = re.compile(r"_ts$|_time$|_wait$|latency$|throughput$|cached_tokens_details$|dp_rank$")


def body_of(name: str) -> bytes:
    """Body of a captured response; of a body cut in the middle the events that are whole."""
    path = VLLM_CAPTURES / f"{name}.resp"
    raw = path.read_bytes() if path.exists() else load_capture(name).response
    if CUT.search(raw):
        return b"".join(re.findall(rb"data: (?:\{[^\n]*\}|\[DONE\])\n\n", raw))
    answer = parse_answer(raw)
    assert answer is not None
    return answer.body


def feed_all(fold: Fold, stream: bytes, seed: int = 0) -> Fold:
    """Feed a stream in reads of random sizes."""
    rng = random.Random(seed)
    cutter = EventCutter(LIMIT_BYTES)
    while stream:
        size = rng.choice((1, 7, 300, 2000, 100_000))
        block = cutter.feed(stream[:size])
        stream = stream[size:]
        if block:
            fold.feed(block)
    return fold


def folded(fold: Fold, name: str, seed: int = 0) -> bytes:
    """The body that a captured stream folds into."""
    result = feed_all(fold, body_of(name), seed).result()
    assert isinstance(result, bytes)
    return result


def parsed(body: bytes) -> Any:
    """JSON with the spelling of its numbers."""
    return json.loads(body, parse_float=str)


def shape(value: object) -> object:
    """Key order and types."""
    if isinstance(value, dict):
        fixed = (name for name in value if name != "response_sent_to_client_ts")
        return [(name, "varies" if VARYING.search(name) else shape(value[name])) for name in fixed]
    if isinstance(value, list):
        return [shape(item) for item in value]
    return type(value).__name__


def pick(body: Any, *names: str) -> Iterator[tuple[str, Any]]:
    """Every member with one of these names, wherever it stands, in order."""
    members = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for name, value in members:
        if name in names:
            yield name, value
        yield from pick(value, *names)


# SGLang's native route


NATIVE_VALUES = (
    "text",
    "output_ids",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "weight_versions",
    "input_token_logprobs",
    "output_token_logprobs",
    "output_token_logprobs_length",
)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("stream", "unary", "count", "is_incremental"),
    [
        pytest.param("http/gen_stream_text", "http/gen_text", 1, False, id="cumulative"),
        pytest.param("http/gen_stream_batch2", "http/gen_batch2", 2, False, id="cumulative batch"),
        pytest.param("http/gen_stream_n2", "http/gen_n2", 2, False, id="cumulative samples"),
        pytest.param("http_dp2/incr_stream", "http/gen_text", 1, True, id="incremental"),
        pytest.param("http_dp2/incr_stream_n2", "http/gen_n2", 2, True, id="incremental samples"),
    ],
)
def test_native_streams_fold_into_the_unary_answer(
    stream: str, unary: str, count: int, is_incremental: bool, seed: int
) -> None:
    fold = new_fold(
        Dialect.NATIVE, SGLANG, limit_bytes=LIMIT_BYTES, count=count, is_list=count > 1, is_incremental=is_incremental
    )
    ours, theirs = parsed(folded(fold, stream, seed)), parsed(body_of(unary))
    assert shape(ours) == shape(theirs)
    assert list(pick(ours, *NATIVE_VALUES)) == list(pick(theirs, *NATIVE_VALUES))


def test_a_single_cumulative_answer_is_the_last_event_itself() -> None:
    stream = body_of("http/gen_stream_text")
    fold = new_fold(Dialect.NATIVE, SGLANG, limit_bytes=LIMIT_BYTES)
    last = stream.split(b"\n\n")[-3].removeprefix(b"data: ")
    assert folded(fold, "http/gen_stream_text") == last


def without_texts(rows: object) -> object:
    """Logprob rows as they are without ``return_text_in_logprobs``."""
    if not isinstance(rows, list):
        return rows
    if len(rows) == 3 and isinstance(rows[1], int):
        return [rows[0], rows[1], None]
    return [without_texts(row) for row in rows]


def test_cumulative_logprobs_are_those_of_the_unary_answer() -> None:
    fold = new_fold(Dialect.NATIVE, SGLANG, limit_bytes=LIMIT_BYTES)
    ours = parsed(folded(fold, "http/gen_stream_logprob"))["meta_info"]
    theirs = parsed(body_of("http/gen_logprob_top2"))["meta_info"]
    names = [name for name in theirs if "logprobs" in name]
    assert len(names) == 5
    assert [name for name in ours if "logprobs" in name] == names
    assert [ours[name] for name in names] == [without_texts(theirs[name]) for name in names]


def test_incremental_logprobs_are_joined_with_their_own_spelling() -> None:
    fold = new_fold(Dialect.NATIVE, SGLANG, limit_bytes=LIMIT_BYTES, is_incremental=True)
    body = folded(fold, "http_dp2/incr_stream_lp")
    assert (
        b'"output_token_logprobs":[[-6.521358966827393,286,null],[-6.557250499725342,192,null],'
        b'[-6.437783241271973,255,null]],"output_token_logprobs_length":3,"input_top_logprobs":[],'
        b'"output_top_logprobs":[[[-6.521358966827393,286,null]],[[-6.557250499725342,192,null]],'
        b'[[-6.437783241271973,255,null]]],"reasoning_tokens":0' in body
    )
    assert body.startswith('{"text":"do\\u0001�","output_ids":[286,192,255],"meta_info":{"id":"'.encode())


@pytest.mark.parametrize("name", ["http_dp2/incr_abort", "http_dp2/incr_abort_logprob"])
def test_an_abort_of_a_running_request_is_a_delta_like_any_other(name: str) -> None:
    fold = new_fold(Dialect.NATIVE, SGLANG, limit_bytes=LIMIT_BYTES, is_incremental=True)
    body = parsed(folded(fold, name))
    meta = body["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert len(body["output_ids"]) == meta["completion_tokens"]
    assert [row[1] for row in meta.get("output_token_logprobs", [])] in ([], body["output_ids"])
    assert body["text"].startswith("do\u0001�z in�\u0014ont")


@pytest.mark.parametrize("name", ["http_dp2/incr_retract_abort", "http_dp2/incr_retract_abort_logprob"])
def test_an_abort_in_the_queue_adds_nothing(name: str) -> None:
    stream = body_of(name)
    fold = new_fold(Dialect.NATIVE, SGLANG, limit_bytes=LIMIT_BYTES, is_incremental=True)
    body = parsed(folded(fold, name))
    last = json.loads(stream.split(b"\n\n")[-3].removeprefix(b"data: "))
    # The engine's last event holds the whole text, and the last id alone.
    assert body["text"] == last["text"]
    assert body["output_ids"][-1:] == last["output_ids"]
    assert len(body["output_ids"]) == body["meta_info"]["completion_tokens"]
    assert body["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert list(body["meta_info"]) == list(last["meta_info"])
    logprobs = body["meta_info"].get("output_token_logprobs")
    assert logprobs is None or len(logprobs) == len(body["output_ids"])


def test_an_aborted_cumulative_stream_gives_its_partial_text() -> None:
    fold = new_fold(Dialect.NATIVE, SGLANG, limit_bytes=LIMIT_BYTES)
    body = parsed(folded(fold, "http/abort_stream_0"))
    assert body["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(body["output_ids"]) == body["meta_info"]["completion_tokens"] == 21


@pytest.mark.parametrize("is_incremental", [False, True])
@pytest.mark.parametrize(
    ("name", "status", "outcome"),
    [
        ("http/gen_stream_err_temp", 400, Outcome.REJECTED),
        ("http/gen_stream_err_schema", 400, Outcome.REJECTED),
        ("http/gen_stream_err_batchmixed", 400, Outcome.REJECTED),
    ],
)
def test_native_errors_keep_their_status(name: str, status: int, outcome: Outcome, is_incremental: bool) -> None:
    count = 2 if "batch" in name else 1
    fold = new_fold(
        Dialect.NATIVE, SGLANG, limit_bytes=LIMIT_BYTES, count=count, is_list=count > 1, is_incremental=is_incremental
    )
    result = feed_all(fold, body_of(name)).result()
    assert isinstance(result, EngineRefused)
    assert (result.report.status, result.report.outcome) == (status, outcome)


# Chunks


def chunks(dialect: Dialect, engine: EngineKind, count: int = 1, **supplied: bytes) -> Fold:
    return new_fold(dialect, engine, limit_bytes=LIMIT_BYTES, count=count, supplied=supplied)


METADATA = b'{"weight_version":"default","weight_versions":[{"version":"default","start":0,"end":4}]}'
SAID_ELSEWHERE = {"model": b'"tiny"', "created": b"1795951872"}
CHUNK_VALUES = ("content", "text", "token_ids", "finish_reason", "usage", "prompt_token_ids", "weight_versions")


@pytest.mark.parametrize(
    ("stream", "unary", "dialect", "engine", "count"),
    [
        pytest.param("http/chat_stream_usage", "http/chat_unary", Dialect.CHAT, SGLANG, 1, id="sglang chat"),
        pytest.param("http/chat_stream_cont_usage", "http/chat_unary", Dialect.CHAT, SGLANG, 1, id="sglang usage"),
        pytest.param("http/comp_stream_usage", "http/comp_unary", Dialect.COMPLETIONS, SGLANG, 1, id="sglang"),
        pytest.param("completions/stream-usage", "completions/unary", Dialect.COMPLETIONS, VLLM, 1, id="vllm"),
        pytest.param(
            "completions/logprobs2-stream", "completions/logprobs2", Dialect.COMPLETIONS, VLLM, 1, id="vllm logprobs"
        ),
        pytest.param("chat/stream-usage", "chat/unary", Dialect.CHAT, VLLM, 1, id="vllm chat"),
        pytest.param("chat/return-token-ids-stream", "chat/return-token-ids", Dialect.CHAT, VLLM, 1, id="vllm ids"),
        pytest.param("chat/n2-stream", "chat/n2", Dialect.CHAT, VLLM, 2, id="vllm chat samples"),
        pytest.param("generate/stream-usage", "generate/unary", Dialect.NATIVE, VLLM, 1, id="vllm tokens"),
        pytest.param("generate/text-mode-stream", "generate/text-mode", Dialect.NATIVE, VLLM, 1, id="vllm tokens text"),
    ],
)
def test_chunks_fold_into_the_unary_answer(
    stream: str, unary: str, dialect: Dialect, engine: EngineKind, count: int
) -> None:
    supplied = {"metadata": METADATA} if engine is SGLANG else SAID_ELSEWHERE if dialect is Dialect.NATIVE else {}
    ours = parsed(folded(chunks(dialect, engine, count, **supplied), stream))
    theirs = parsed(body_of(unary))
    assert shape(ours) == shape(theirs)
    assert list(pick(ours, *CHUNK_VALUES)) == list(pick(theirs, *CHUNK_VALUES))
    assert list(pick(ours, "logprobs", "role")) == list(pick(theirs, "logprobs", "role"))
    assert list(pick(ours, "object", "model")) == list(pick(theirs, "object", "model"))


@pytest.mark.parametrize(
    ("stream", "unary", "dialect", "engine", "count"),
    [
        pytest.param("chat/stream", "chat/unary", Dialect.CHAT, VLLM, 1, id="vllm chat"),
        pytest.param("chat/stream-usage-continuous", "chat/unary", Dialect.CHAT, VLLM, 1, id="vllm usage"),
        pytest.param("chat/logprobs-stream", "chat/logprobs", Dialect.CHAT, VLLM, 1, id="vllm logprobs"),
        pytest.param("completions/stream", "completions/unary", Dialect.COMPLETIONS, VLLM, 1, id="vllm completions"),
        pytest.param("completions/n2-stream", "completions/n2", Dialect.COMPLETIONS, VLLM, 2, id="vllm samples"),
        pytest.param(
            "completions/prompt-token-ids-stream", "completions/prompt-list-2", Dialect.COMPLETIONS, VLLM, 1, id="ids"
        ),
        pytest.param("generate/stream", "generate/unary", Dialect.NATIVE, VLLM, 1, id="vllm tokens"),
        pytest.param("generate/n2-stream", "generate/n2", Dialect.NATIVE, VLLM, 2, id="vllm tokens samples"),
        pytest.param("generate/logprobs-stream", "generate/logprobs", Dialect.NATIVE, VLLM, 1, id="tokens logprobs"),
        pytest.param("http/chat_n2_stream", "http/chat_n2", Dialect.CHAT, SGLANG, 2, id="sglang chat samples"),
        pytest.param("http/comp_batch_stream", "http/comp_batch", Dialect.COMPLETIONS, SGLANG, 2, id="sglang batch"),
        pytest.param("http/comp_stream", "http/comp_unary", Dialect.COMPLETIONS, SGLANG, 1, id="sglang no usage"),
    ],
)
def test_the_fields_and_their_order_do_not_depend_on_what_was_asked(
    stream: str, unary: str, dialect: Dialect, engine: EngineKind, count: int
) -> None:
    supplied = {"metadata": METADATA} if engine is SGLANG else SAID_ELSEWHERE if dialect is Dialect.NATIVE else {}
    ours = parsed(folded(chunks(dialect, engine, count, **supplied), stream))
    theirs = parsed(body_of(unary))
    assert list(ours) == list(theirs)
    assert [list(choice) for choice in ours["choices"]] == [list(choice) for choice in theirs["choices"][:count]]
    assert list(pick(ours, "index")) == list(pick(theirs, "index"))[:count]


def test_sampled_tokens_are_told_apart() -> None:
    choices = parsed(folded(chunks(Dialect.NATIVE, VLLM, 2), "generate/n2-stream"))["choices"]
    assert [choice["token_ids"] for choice in choices] == [[910, 654], [804, 320]]
    ours = parsed(folded(chunks(Dialect.COMPLETIONS, VLLM, 2), "completions/n2-stream"))["choices"]
    theirs = parsed(body_of("completions/n2"))["choices"]
    assert all(full["text"].startswith(cut["text"]) for cut, full in zip(ours, theirs, strict=True))


def test_logprobs_keep_the_spelling_of_their_numbers() -> None:
    ours = folded(chunks(Dialect.CHAT, VLLM), "chat/logprobs-stream")
    theirs = body_of("chat/logprobs")
    start, end = theirs.index(b'"logprobs":'), theirs.index(b',"finish_reason"')
    assert theirs[start:end] in ours


def test_prompt_tokens_come_once() -> None:
    choice = parsed(folded(chunks(Dialect.COMPLETIONS, VLLM), "completions/prompt-token-ids-stream"))["choices"][0]
    assert choice["prompt_token_ids"] == [784, 15, 812, 4, 856, 432]
    assert choice["token_ids"][:2] == [229, 221]
    whole = parsed(folded(chunks(Dialect.NATIVE, VLLM), "generate/return-token-ids-stream"))
    assert whole["prompt_token_ids"] == [784, 15, 812, 4, 856, 432]
    assert whole["choices"][0]["token_ids"] == [229, 221, 442, 322]


def test_a_batch_of_prompts_is_ordered_by_index() -> None:
    body = parsed(folded(chunks(Dialect.COMPLETIONS, VLLM, 2), "completions/prompt-list-2-stream"))
    assert [choice["text"] for choice in body["choices"]] == ["anspkwargs", ""]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "stop"]


def test_samples_of_sglang_take_the_id_of_the_first() -> None:
    body = parsed(folded(chunks(Dialect.CHAT, SGLANG, 2), "http/chat_n2_stream"))
    assert body["id"] == "925e3278005e49b59ad2eaced9999588"
    assert body["usage"] is None


def test_sglang_streams_fewer_chat_logprobs_than_it_generates_tokens() -> None:
    body = parsed(folded(chunks(Dialect.CHAT, SGLANG), "http/chat_stream_logprobs"))
    assert len(list(pick(body, "top_logprobs"))) == 2
    assert len(list(pick(parsed(body_of("http/chat_logprobs")), "top_logprobs"))) == 4


def test_comments_are_no_events() -> None:
    body = parsed(folded(chunks(Dialect.COMPLETIONS, VLLM), "completions/stream-sse-keepalive"))
    assert body["choices"][0]["finish_reason"] == "length"


def test_an_abort_on_vllm_gives_the_partial_answer() -> None:
    body = parsed(folded(chunks(Dialect.CHAT, VLLM), "abort/chat-stream-by-response-id"))
    assert body["choices"][0]["finish_reason"] == "abort"
    assert body["choices"][0]["message"]["content"].startswith("ver")


def test_an_abort_before_the_first_token_leaves_nothing_to_answer() -> None:
    fold = feed_all(chunks(Dialect.COMPLETIONS, VLLM), body_of("pd/abort-before-first-token-stream"))
    with pytest.raises(FoldIncomplete) as caught:
        fold.result()
    assert caught.value.is_terminated


@pytest.mark.parametrize(
    ("name", "engine", "status", "outcome"),
    [
        pytest.param("engine-death/stream-chat", VLLM, 502, Outcome.ENGINE_ERROR, id="late"),
        pytest.param("http_dp2/queue_5_chatstream", SGLANG, 503, Outcome.OVERLOADED, id="at once"),
    ],
)
def test_errors_in_chunks_keep_their_status(name: str, engine: EngineKind, status: int, outcome: Outcome) -> None:
    result = feed_all(chunks(Dialect.CHAT, engine), body_of(name)).result()
    assert isinstance(result, EngineRefused)
    assert (result.report.status, result.report.outcome) == (status, outcome)

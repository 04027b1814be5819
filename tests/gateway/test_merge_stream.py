"""Streams of one sample each, merged, against the streams of both engines for the same requests with ``n``."""

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.errors import AnswerMalformed
from backends.sse import DONE_DATA, DONE_EVENT, data_of, events, name_of
from backends.types import EngineKind
from gateway.fold import new_fold
from gateway.merge import merge
from gateway.merge_stream import StreamMerge
from gateway.routes import Dialect
from tests.gateway.test_fold_captures import LIMIT_BYTES, body_of, shape

SGLANG, VLLM = EngineKind.SGLANG, EngineKind.VLLM
NATIVE, CHAT, COMPLETIONS = Dialect.NATIVE, Dialect.CHAT, Dialect.COMPLETIONS
Kind = tuple[Dialect, EngineKind]
# Which choice an event is of; None if it is of none.
Sequences = dict[int | None, list[Any]]
HEAD = re.compile(rb'"(?:request_)?id":"[^"]*"|"created":\d+')


def stream_of(*payloads: Any) -> bytes:
    """Events with these payloads."""
    texts = (one if isinstance(one, bytes) else json.dumps(one, separators=(",", ":")).encode() for one in payloads)
    return b"".join(b"data: %b\n\n" % text for text in texts)


def chunk(index: int, text: str, **more: Any) -> dict[str, Any]:
    """A made-up chunk of completions."""
    return {"id": "x", "choices": [{"index": index, "text": text}], **more}


def native(text: str, **more: Any) -> dict[str, Any]:
    """A made-up event of ``/generate``."""
    return {"text": text, "meta_info": {"id": "x"}, **more}


def usage(prompt: int, completion: int, **more: Any) -> dict[str, Any]:
    """A made-up chunk with a usage alone."""
    counts = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    return {"id": "x", "choices": [], "usage": {**counts, **more}}


def merged(kind: Kind, legs: Sequence[bytes], *, batch_size: int | None = None) -> bytes:
    """The whole stream of legs that come at the same pace."""
    merging = StreamMerge(*kind, batch_size=batch_size, count=len(legs))
    steps = itertools.zip_longest(*(list(events(leg)) for leg in legs), fillvalue=b"")
    told = [merging.feed(choice, event) for step in steps for choice, event in enumerate(step)]
    return b"".join([*told, merging.end()])


def payloads_of(stream: bytes) -> list[bytes]:
    """The payloads of a stream's events."""
    return [data_of(event) for event in events(stream)]


def parsed(stream: bytes) -> list[Any]:
    """The events of a stream that has its end marker, and has it once."""
    *others, last = payloads_of(stream)
    assert last == DONE_DATA
    return [json.loads(one) for one in others]


def choice_of(event: Any) -> int | None:
    """The choice that an event is of."""
    if "meta_info" in event:
        return int(event["index"])
    return int(event["choices"][0]["index"]) if event["choices"] else None


def sequences(stream: bytes) -> Sequences:
    """Payloads by choice, without what differs between any two requests."""
    found: Sequences = {}
    for data in payloads_of(stream):
        choice = None if data == DONE_DATA else choice_of(json.loads(data))
        found.setdefault(choice, []).append(HEAD.sub(b"", data))
    return found


def without_repeats(value: Any) -> Any:
    """A shape in which no list says the same twice in a row."""
    if isinstance(value, list):
        return [one for one, _ in itertools.groupby(map(without_repeats, value))]
    return tuple(map(without_repeats, value)) if isinstance(value, tuple) else value


def kinds(stream: bytes) -> Sequences:
    """By choice the kinds of its events, as one follows another."""
    found: Sequences = {}
    for event in parsed(stream):
        found.setdefault(choice_of(event), []).append(shape(event))
    return {choice: without_repeats(ones) for choice, ones in found.items()}


# Against captures.


@pytest.mark.parametrize(
    ("kind", "leg", "whole"),
    [
        pytest.param((NATIVE, SGLANG), "http/gen_stream_text", "http/gen_stream_n2", id="cumulative"),
        pytest.param((NATIVE, SGLANG), "http_dp2/incr_stream", "http_dp2/incr_stream_n2", id="incremental"),
        pytest.param((CHAT, SGLANG), "http/chat_stream", "http/chat_n2_stream", id="sglang chat"),
        pytest.param((CHAT, VLLM), "chat/stream-usage", "chat/n2-stream", id="vllm chat"),
        pytest.param((COMPLETIONS, VLLM), "completions/stream-usage", "completions/n2-stream", id="vllm completions"),
        pytest.param((NATIVE, VLLM), "generate/stream", "generate/n2-stream", id="vllm tokens"),
    ],
)
def test_each_choice_has_the_engines_kinds_of_events(kind: Kind, leg: str, whole: str) -> None:
    one = body_of(leg)
    ours, theirs = merged(kind, [one, one]), body_of(whole)
    assert kinds(ours) == kinds(theirs)
    *_, last_of_ours = map(choice_of, parsed(ours))
    *_, last_of_theirs = map(choice_of, parsed(theirs))
    assert (last_of_ours is None) == (last_of_theirs is None), "usage comes last"


@pytest.mark.parametrize(
    ("kind", "whole"),
    [
        pytest.param((NATIVE, SGLANG), "http/gen_stream_n2", id="cumulative"),
        pytest.param((NATIVE, SGLANG), "http_dp2/incr_stream_n2", id="incremental"),
        pytest.param((CHAT, SGLANG), "http/chat_n2_stream", id="sglang chat"),
        pytest.param((COMPLETIONS, SGLANG), "http/comp_batch_stream", id="sglang completions"),
        pytest.param((CHAT, VLLM), "chat/n2-stream", id="vllm chat"),
        pytest.param((COMPLETIONS, VLLM), "completions/n2-stream", id="vllm completions"),
        pytest.param((NATIVE, VLLM), "generate/n2-stream", id="vllm tokens"),
    ],
)
def test_a_stream_taken_apart_and_merged_is_the_same_bytes(kind: Kind, whole: str) -> None:
    stream = body_of(whole)
    legs = [b"", b""]
    expected = b""
    for data in payloads_of(stream):
        choice = None if data == DONE_DATA else choice_of(json.loads(data))
        if choice is None:
            continue  # the counts of each leg are not known
        expected += stream_of(data)
        alone = b"}" if kind == (NATIVE, SGLANG) else b'"choices":[{"index":0,'
        legs[choice] += stream_of(re.sub(rb',"index":\d\}$|"choices":\[\{"index":\d,', alone, data))
    ours = merged(kind, [leg + DONE_EVENT for leg in legs])
    assert sequences(ours) == sequences(expected + DONE_EVENT)


@pytest.mark.parametrize(
    ("kind", "leg", "batch_size"),
    [
        pytest.param((NATIVE, SGLANG), "http/gen_stream_batch2", 2, id="native"),
        pytest.param((COMPLETIONS, SGLANG), "http/comp_batch_stream", 2, id="sglang"),
        pytest.param((COMPLETIONS, VLLM), "completions/prompt-list-2-stream", 2, id="vllm"),
    ],
)
def test_a_batch_has_each_prompts_samples_together(kind: Kind, leg: str, batch_size: int) -> None:
    one = body_of(leg)
    ours, theirs = sequences(merged(kind, [one, one, one], batch_size=batch_size)), sequences(one)
    plain = re.compile(rb'"index":\d')
    assert sorted(choice for choice in ours if choice is not None) == list(range(6))
    for choice in range(6):
        assert [plain.sub(b"", data) for data in ours[choice]] == [plain.sub(b"", data) for data in theirs[choice // 3]]


@pytest.mark.parametrize(
    ("kind", "leg", "batch_size"),
    [
        pytest.param((NATIVE, SGLANG), "http/gen_stream_batch2", 2, id="native batch"),
        pytest.param((NATIVE, SGLANG), "http/gen_stream_text", None, id="native"),
        pytest.param((CHAT, SGLANG), "http/chat_stream_usage", None, id="sglang chat"),
        pytest.param((CHAT, SGLANG), "http/chat_stream_cont_usage", None, id="sglang usage in all chunks"),
        pytest.param((COMPLETIONS, SGLANG), "http/comp_stream_usage", None, id="sglang completions"),
        pytest.param((CHAT, VLLM), "chat/return-token-ids-stream", None, id="vllm chat"),
        pytest.param((CHAT, VLLM), "chat/stream-usage-continuous", None, id="vllm usage in all chunks"),
        pytest.param((COMPLETIONS, VLLM), "completions/prompt-list-2-stream", 2, id="vllm batch"),
        pytest.param((NATIVE, VLLM), "generate/return-token-ids-stream", None, id="vllm tokens"),
        pytest.param((NATIVE, VLLM), "generate/stream-usage", None, id="vllm tokens with usage"),
    ],
)
def test_the_stream_says_the_same_as_the_merged_answers(kind: Kind, leg: str, batch_size: int | None) -> None:
    dialect, engine = kind
    one, count = body_of(leg), 3
    fold = new_fold(*kind, limit_bytes=LIMIT_BYTES, count=batch_size or 1, is_list=batch_size is not None)
    fold.feed(one)
    answer = fold.result()
    assert isinstance(answer, bytes)
    fold = new_fold(*kind, limit_bytes=LIMIT_BYTES, count=count * (batch_size or 1), is_list=True)
    fold.feed(merged(kind, [one] * count, batch_size=batch_size))
    assert fold.result() == merge(dialect, [answer] * count, batch_size=batch_size, engine=engine)


def test_usage_in_all_chunks_stays_each_choices_own() -> None:
    one = body_of("chat/stream-usage-continuous")
    *chunks, last = parsed(merged((CHAT, VLLM), [one, one]))
    alone = [event["usage"] for event in parsed(one)[:-1]]
    for choice in range(2):
        assert [event["usage"] for event in chunks if choice_of(event) == choice] == alone
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (29, 8)


# Made-up streams.


def told_at_the_end(kind: Kind, *legs: Sequence[Any]) -> list[tuple[bytes, Any]]:
    """Names and payloads of the events behind all choices."""
    merging = StreamMerge(*kind, batch_size=None, count=len(legs))
    for choice, leg in enumerate(legs):
        blocks = [one if isinstance(one, bytes) else stream_of(one) for one in leg]
        assert merging.feed(choice, b"".join(blocks)) == b"".join(one for one in blocks if b'"error"' in one)
    *told, done = events(merging.end())
    assert done == DONE_EVENT
    return [(name_of(event), json.loads(data_of(event))) for event in told]


def extension(**told: Any) -> dict[str, Any]:
    """A chunk of SGLang with what is told of the whole answer."""
    return {"id": "x", "choices": [], "usage": None, "sglext": told}


def framed(**told: Any) -> bytes:
    """Token ids in an event of their own."""
    return b"event: sglext_ids\n" + stream_of(extension(**told))


FAILED = stream_of({"error": {"message": "no", "code": 500}})


@pytest.mark.parametrize(
    ("legs", "told"),
    [
        pytest.param([[usage(6, 4)], [usage(6, 5)], [usage(6, 0)]], [(b"", usage(6, 9))], id="usage"),
        pytest.param(
            [[usage(6, 4, reasoning_tokens=0)], [usage(6, 5, completion_tokens_details={"reasoning_tokens": 3})]],
            [(b"", usage(6, 9, reasoning_tokens=0, completion_tokens_details={"reasoning_tokens": 3}))],
            id="details that are not told where they are null",
        ),
        pytest.param(
            [[{**usage(6, 4), "metrics": {"a": 1}, "z": 1.0}], [usage(6, 5)]],
            [(b"", {**usage(6, 9), "z": 1.0})],
            id="no metrics of one sample",
        ),
        pytest.param([[usage(6, 4)], []], [], id="usage of one leg only"),
        pytest.param([[], []], [], id="none"),
        pytest.param(
            [
                [extension(routed_experts="A", cached_tokens_details={"device": 4}), usage(6, 4)],
                [extension(routed_experts="B", cached_tokens_details={"device": 0}), usage(6, 4)],
            ],
            [(b"", extension(routed_experts="A", cached_tokens_details={"device": 4})), (b"", usage(6, 8))],
            id="the first's, before usage",
        ),
        pytest.param(
            [[usage(6, 4)], [extension(routed_experts="B"), usage(6, 4)]],
            [(b"", extension(routed_experts="B")), (b"", usage(6, 8))],
            id="the first that tells",
        ),
        pytest.param(
            [[extension(spec_tokens_details={"a": 1})], [], [extension(spec_tokens_details={"a": 3})]],
            [(b"", extension(spec_tokens_details=[{"a": 1}, {"a": 3}]))],
            id="speculation of each",
        ),
        pytest.param(
            [
                [extension(routed_experts="A", input_ids=[1], output_ids=[[2]])],
                [extension(input_ids=[1], output_ids=[[3, 4]])],
            ],
            [(b"", extension(routed_experts="A", input_ids=[1], output_ids=[[2], [3, 4]]))],
            id="ids of each",
        ),
        pytest.param(
            [[extension(routed_experts="A"), framed(output_ids=[[2]])], [framed(output_ids=[[3]])]],
            [(b"", extension(routed_experts="A")), (b"sglext_ids", extension(output_ids=[[2], [3]]))],
            id="ids in an event of their own",
        ),
        pytest.param(
            [[framed(output_ids=[[2]])], []],
            [(b"sglext_ids", extension(output_ids=[[2], []]))],
            id="no ids of a sample without output",
        ),
        pytest.param(
            [[extension(routed_experts="A", output_ids=[[2]]), framed(input_ids=[1])], [FAILED]],
            [(b"", extension(routed_experts="A"))],
            id="no ids behind an error",
        ),
    ],
)
def test_what_is_told_behind_all_choices(legs: list[list[Any]], told: list[tuple[bytes, Any]]) -> None:
    assert told_at_the_end((CHAT, SGLANG), *legs) == told


@pytest.mark.parametrize("kind", [(NATIVE, SGLANG), (CHAT, SGLANG), (NATIVE, VLLM)], ids=["native", "chat", "tokens"])
@pytest.mark.parametrize(
    "event",
    [
        pytest.param(b": keep-alive\n\n", id="comment"),
        pytest.param(b"\n\n", id="empty"),
        pytest.param(FAILED, id="error"),
        pytest.param(b'data:{"a":1,"error":"no"}\r\n\r\n', id="error of another shape"),
        pytest.param(b'event: later\ndata: {"choices":[{"index":0}]}\n\n', id="unknown name"),
    ],
)
def test_other_events_are_passed_on(kind: Kind, event: bytes) -> None:
    assert StreamMerge(*kind, batch_size=None, count=2).feed(1, event) == event


@pytest.mark.parametrize(
    ("kind", "batch_size", "event", "expected"),
    [
        pytest.param(
            (NATIVE, SGLANG),
            None,
            b'data: {"text":"\\u00e9 \xff","meta_info":{"a":1.50E+2 , "b":[ ]} }\n\n',
            b'data: {"text":"\\u00e9 \xff","meta_info":{"a":1.50E+2 , "b":[ ]} ,"index":2}\n\n',
            id="native",
        ),
        pytest.param(
            (NATIVE, SGLANG),
            2,
            b'data: {"text":"\\"index\\":0}","meta_info":{"a":1.0}, "index": 1 }\r\n\r\n',
            b'data: {"text":"\\"index\\":0}","meta_info":{"a":1.0},"index":5}\n\n',
            id="native batch",
        ),
        pytest.param(
            (NATIVE, SGLANG),
            2,
            b'data: {"index":1,"meta_info":{"a":1.0},"z":2.50}\n\n',
            b'data: {"index":5,"meta_info":{"a":1.0},"z":2.50}\n\n',
            id="index elsewhere",
        ),
        pytest.param(
            (CHAT, VLLM),
            None,
            b'data: {"a":1.0E+2,\ndata: "choices":[{"x":[ 1.50, "\\u00e9" ],"index":0}],"z":123456789012345678901}\n\n',
            b'data: {"a":1.0E+2,"choices":[{"x":[ 1.50, "\\u00e9" ],"index":2}],"z":123456789012345678901}\n\n',
            id="chunk in two lines",
        ),
        pytest.param(
            (COMPLETIONS, VLLM),
            2,
            b'data: {"choices":[{"index":1},{"index":0}],"usage":{"a":1.0}}\n\n',
            b'data: {"choices":[{"index":5},{"index":2}],"usage":{"a":1.0}}\n\n',
            id="two choices",
        ),
    ],
)
def test_numbers_and_escapes_keep_their_spelling(
    kind: Kind, batch_size: int | None, event: bytes, expected: bytes
) -> None:
    assert StreamMerge(*kind, batch_size=batch_size, count=3).feed(2, event) == expected


def test_a_chunk_without_choices_that_says_something_else_is_passed_on() -> None:
    event = stream_of({"id": "x", "choices": [], "usage": None, "later": 1})
    assert StreamMerge(CHAT, VLLM, batch_size=None, count=2).feed(1, event) == event


def test_all_chunks_were_created_when_the_first_was() -> None:
    legs = [stream_of(chunk(0, "a", created=2), {**usage(1, 1), "created": 2}) for _ in range(2)]
    legs[1] = legs[1].replace(b'"created":2', b'"created":1')
    merging = StreamMerge(COMPLETIONS, SGLANG, batch_size=None, count=2)
    stream = merging.feed(1, legs[1]) + merging.feed(0, legs[0]) + merging.end()
    assert [event["created"] for event in parsed(stream)] == [1, 1, 1]


def test_the_token_route_tells_the_prompt_once() -> None:
    one = body_of("generate/return-token-ids-stream")
    told = [event.get("prompt_token_ids") for event in parsed(merged((NATIVE, VLLM), [one, one]))]
    assert told == [parsed(one)[0]["prompt_token_ids"], *[None] * (len(told) - 1)]


@pytest.mark.parametrize(
    ("kind", "batch_size", "payload"),
    [
        pytest.param((NATIVE, SGLANG), None, b"{", id="cut"),
        pytest.param((NATIVE, SGLANG), None, b'{"meta_info":{', id="cut in meta_info"),
        pytest.param((NATIVE, SGLANG), None, b"{}", id="no meta_info"),
        pytest.param((NATIVE, SGLANG), None, b"[" * 100_000, id="deep"),
        pytest.param((NATIVE, SGLANG), None, b'{"meta_info":{},"index":1}', id="index of a batch"),
        pytest.param((NATIVE, SGLANG), 2, b'{"meta_info":{},"index":2}', id="index too large"),
        pytest.param((NATIVE, SGLANG), 2, b'{"meta_info":{}}', id="no index"),
        pytest.param((NATIVE, SGLANG), 2, b'{"meta_info":{},"index":"0"}', id="index of another kind"),
        pytest.param((CHAT, VLLM), None, b"null", id="null"),
        pytest.param((CHAT, VLLM), None, b"{}", id="no choices"),
        pytest.param((CHAT, VLLM), None, b'{"choices":{}}', id="choices of another kind"),
        pytest.param((CHAT, VLLM), None, b'{"choices":[{"text":"x"}]}', id="choice without index"),
        pytest.param((CHAT, VLLM), None, b'{"choices":[{"index":1}]}', id="another choice"),
        pytest.param((CHAT, VLLM), None, b'{"choices":[{"index":-1}]}', id="index below nothing"),
    ],
)
def test_other_shapes_are_refused(kind: Kind, batch_size: int | None, payload: bytes) -> None:
    with pytest.raises(AnswerMalformed, match="engine's stream"):
        StreamMerge(*kind, batch_size=batch_size, count=2).feed(1, stream_of(payload))


@pytest.mark.parametrize(
    "told",
    [
        pytest.param({"usage": 1}, id="usage"),
        pytest.param({"usage": {"completion_tokens": -1}}, id="count"),
        pytest.param({"sglext": []}, id="extension"),
        pytest.param({"sglext": {"output_ids": [[1], [2]]}}, id="ids of two samples"),
    ],
)
def test_other_shapes_are_refused_at_the_end(told: dict[str, Any]) -> None:
    merging = StreamMerge(CHAT, SGLANG, batch_size=None, count=1)
    assert merging.feed(0, stream_of({"choices": [], **told})) == b""
    with pytest.raises(AnswerMalformed):
        merging.end()


@pytest.mark.parametrize("dialect", [Dialect.RESPONSES, Dialect.MESSAGES, Dialect.EMBEDDINGS, Dialect.PLAIN])
def test_dialects_without_samples(dialect: Dialect) -> None:
    with pytest.raises(ValueError, match="has no samples"):
        StreamMerge(dialect, SGLANG, batch_size=None, count=2)


@st.composite
def interleavings(draw: st.DrawFn) -> tuple[Kind, int | None, list[list[Any]], list[tuple[int, int]]]:
    """Legs of made-up events, and the blocks in which they come: whose, and how many events."""
    kind = draw(st.sampled_from([(NATIVE, SGLANG), (CHAT, SGLANG), (COMPLETIONS, VLLM), (NATIVE, VLLM)]))
    batch_size = draw(st.none() | st.integers(1, 3))
    legs: list[list[Any]] = []
    for choice in range(draw(st.integers(1, 4))):
        prompts = draw(st.lists(st.integers(0, (batch_size or 1) - 1), max_size=6))
        made: Iterable[Any] = enumerate(prompts)
        if kind == (NATIVE, SGLANG):
            names = () if batch_size is None else ("index",)
            legs.append([native(f"{choice}.{i}", **dict.fromkeys(names, prompt)) for i, prompt in made])
        else:
            legs.append([*(chunk(prompt, f"{choice}.{i}") for i, prompt in made), usage(5, len(prompts))])
        legs[-1].append(DONE_DATA)
    left = [len(leg) for leg in legs]
    blocks = []
    while any(left):
        choice = draw(st.sampled_from([choice for choice, count in enumerate(left) if count]))
        size = draw(st.integers(1, left[choice]))
        left[choice] -= size
        blocks.append((choice, size))
    return kind, batch_size, legs, blocks


@given(interleavings())
def test_each_choices_events_are_the_same_in_any_order(
    made: tuple[Kind, int | None, list[list[Any]], list[tuple[int, int]]],
) -> None:
    kind, batch_size, legs, blocks = made
    merging = StreamMerge(*kind, batch_size=batch_size, count=len(legs))
    left = [iter(leg) for leg in legs]
    stream = b""
    for choice, size in blocks:
        stream += merging.feed(choice, stream_of(*itertools.islice(left[choice], size)))
    found: Sequences = {}
    for event in parsed(stream + merging.end()):
        text = event["usage"] if event.get("usage") else event.get("text") or event["choices"][0]["text"]
        found.setdefault(choice_of(event), []).append(text)
    expected: Sequences = {}
    for choice, leg in enumerate(legs):
        for event in leg[:-1]:
            prompt = event.get("index", 0) if "meta_info" in event else choice_of(event)
            if prompt is not None:
                text = event.get("text") or event["choices"][0]["text"]
                expected.setdefault(prompt * len(legs) + choice, []).append(text)
    if kind != (NATIVE, SGLANG):
        completion = sum(len(leg) - 2 for leg in legs)
        expected[None] = [usage(5, completion)["usage"]]
    assert found == expected

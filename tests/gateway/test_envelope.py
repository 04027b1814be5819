"""What is read from a request, and what is refused before any worker sees it."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.upstream.base import Headers
from gateway.envelope import MAX_ID_CHARS, header_value, read_headers, request_id_of
from gateway.errors import InvalidRequest
from gateway.routes import ROUTES
from tests.gateway.envelopes import CHAT, COMPLETIONS, EMBEDDINGS, NATIVE, parsed, refused

# Bodies.


@pytest.mark.parametrize(
    ("raw", "param", "says"),
    [
        pytest.param(b"", None, "empty", id="empty"),
        pytest.param(b"[]", None, "JSON object", id="array"),
        pytest.param(b"{", None, "valid JSON", id="cut"),
        pytest.param(b'{"rid":"a","rid":"b"}', "rid", "more than once", id="repeated rid"),
        pytest.param(b'{"stream":true,"stre\\u0061m":false}', "stream", "more than once", id="repeated in disguise"),
        pytest.param(b'{"bootstrap_room":1,"bootstrap_room":null}', "bootstrap_room", "more than once",
                     id="an internal field that the last one hides"),
        pytest.param(b'{"text":"a","model":1}', "model", "string", id="model is no string"),
        pytest.param(b'{"text":"a","model":"\xff"}', "model", "string", id="model is no UTF-8"),
    ],
)  # fmt: skip
def test_bodies_that_are_refused(raw: bytes, param: str | None, says: str) -> None:
    error = refused(raw)
    assert error.report.param == param
    assert says in error.report.message


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_read_or_refused(raw: bytes) -> None:
    for path in ROUTES:
        try:
            parsed(raw, path=path)
        except InvalidRequest:
            continue


FIELDS = st.sampled_from(
    ["rid", "stream", "model", "n", "text", "input_ids", "prompt", "sampling_params", "top_logprobs_num", "logprobs",
     "logprob_start_len", "return_logprob", "input_embeds", "return_flat_raw_output_top_logprobs", "x"]
)  # fmt: skip
JSON_TEXTS = st.sampled_from(
    [b"null", b"true", b"1", b"-1", b"1e9", b"9" * 400, b'""', b'"a"', b'"\\u0000"', b'"\xff"', b"[]", b"[1,2]",
     b"[[1],[2]]", b'["a","b"]', b'["\xff"]', b"[null]", b"{}", b'{"n":2}', b'{"n":-3}', b'{"n":1.5}', b'[{"n":3},{}]',
     b'{"n":99999999999999999999}', b'{"min_new_tokens":5,"ignore_eos":true}', b"[[[0.5]]]", b'"5000"']
)  # fmt: skip


@given(st.dictionaries(FIELDS, JSON_TEXTS, max_size=7), st.sampled_from(sorted(ROUTES)))
def test_odd_values_are_read_or_refused_and_never_fail(fields: dict[str, bytes], path: str) -> None:
    raw = b"{" + b",".join(b'"%b":%b' % (name.encode(), text) for name, text in fields.items()) + b"}"
    try:
        envelope = parsed(raw, path=path)
    except InvalidRequest:
        return
    assert envelope.body.raw == raw
    assert envelope.sequences >= 1
    assert envelope.prompt_tokens >= 0
    assert len(envelope.item_ids) == (envelope.batch_size or 1)


# Streams.


@pytest.mark.parametrize(
    ("text", "is_native", "is_openai"),
    [
        (b"true", True, True),
        (b"false", False, False),
        (b"null", False, False),
        (b"1", False, True),
        (b"0", False, False),
        (b'"true"', False, True),
        (b'"TRUE"', False, True),
        (b'"Yes"', False, True),
        (b'"false"', False, False),
        (b"1.0", False, True),
        (b"2", False, False),
        (b"[]", False, False),
    ],
)
def test_stream_is_read_as_the_engines_do(text: bytes, is_native: bool, is_openai: bool) -> None:
    assert parsed(b'{"text":"a","stream":%b}' % text).is_stream is is_native
    assert parsed(b'{"messages":[],"stream":%b}' % text, path=CHAT).is_stream is is_openai


@pytest.mark.parametrize("path", [NATIVE, CHAT, COMPLETIONS])
@pytest.mark.parametrize("value", [True, 1, "true"])
def test_a2_1_flat_output_does_not_stream(path: str, value: object) -> None:
    error = refused({"text": "a", "stream": True, "return_flat_raw_output_top_logprobs": value}, path=path)
    assert error.report.param == "return_flat_raw_output_top_logprobs"


@pytest.mark.parametrize(
    ("stream", "value"),
    [(False, True), (None, True), (True, False), (True, None)],
    ids=["unary", "default", "f", "null"],
)
def test_a2_2_flat_output_in_one_piece_passes(stream: bool | None, value: bool | None) -> None:
    parsed({"text": "a", "stream": stream, "return_flat_raw_output_top_logprobs": value})


# Ids.


@pytest.mark.parametrize(
    ("body", "header", "public_id", "item_ids"),
    [
        pytest.param({"rid": "mine"}, b"head", "mine", ("mine",), id="the body's"),
        pytest.param({}, b"head", "head", ("head",), id="the header's"),
        pytest.param({"rid": None}, None, "made", ("made",), id="made here"),
        pytest.param({"rid": 'é"\\'}, None, 'é"\\', ('é"\\',), id="odd but printable"),
        pytest.param({"rid": "x" * 256}, None, "x" * 256, ("x" * 256,), id="longest"),
        pytest.param({"text": ["a", "b"], "rid": "R"}, None, "R", ("R_0", "R_1"), id="one id for a batch"),
        pytest.param({"text": ["a", "b"]}, b"head", "head", ("head_0", "head_1"), id="header and batch"),
        pytest.param({"text": ["a", "b"], "rid": ["x", "y"]}, b"head", "head", ("x", "y"), id="an id for each item"),
        pytest.param({"text": ["a"], "rid": ["x"]}, None, "made", ("x",), id="batch of one"),
    ],
)
def test_public_ids(body: dict[str, Any], header: bytes | None, public_id: str, item_ids: tuple[str, ...]) -> None:
    headers = [] if header is None else [(b"x-request-id", header)]
    envelope = parsed({"text": "a", **body}, headers)
    assert (envelope.public_id, envelope.item_ids) == (public_id, item_ids)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param({"rid": ""}, "empty", id="a2_13 empty"),
        pytest.param({"text": ["a", "b"], "rid": ["x", ""]}, "empty", id="a2_13 empty in a list"),
        pytest.param({"rid": "x" * (MAX_ID_CHARS + 1)}, "256", id="too long"),
        pytest.param({"rid": "a\nb"}, "printable", id="line break"),
        pytest.param({"rid": "a\u200bb"}, "printable", id="not printable"),
        pytest.param({"text": ["a"], "rid": ["a\tb"]}, "printable", id="not printable in a list"),
        pytest.param({"rid": 5}, "string", id="number"),
        pytest.param({"rid": {}}, "string", id="object"),
        pytest.param({"rid": ["x"]}, "no batch", id="list without a batch"),
        pytest.param({"text": ["a", "b"], "rid": ["x"]}, "2 items", id="list too short"),
        pytest.param({"text": ["a", "b"], "rid": ["x", "x"]}, "more than once", id="same twice"),
        pytest.param({"text": ["a", "b"], "rid": ["x", 1]}, "string", id="list with a number"),
    ],
)
def test_g_3_ids_that_are_refused(body: dict[str, Any], says: str) -> None:
    error = refused({"text": "a", **body})
    assert error.report.param == "rid"
    assert says in error.report.message


@pytest.mark.parametrize("value", [b"", b"a\x01b", b"x" * 257, b"\xa0"], ids=["empty", "control", "long", "nbsp"])
def test_request_id_headers_that_are_refused(value: bytes) -> None:
    assert refused({"text": "a"}, [(b"x-request-id", value)]).report.param == "x-request-id"


def test_request_id_of_headers() -> None:
    assert request_id_of({}) is None
    assert request_id_of({b"x-request-id": b"caf\xc3\xa9"}) == "cafÃ©"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("plain-1", b"plain-1"),
        ("a b%", b"a b%"),
        ("é", b"%C3%A9"),
        ("é%", b"%C3%A9%25"),
        ("\u2028", b"%E2%80%A8"),
        ("a\r\nb", b"a%0D%0Ab"),
        ('é "x"', b'%C3%A9 "x"'),
    ],
)
def test_header_values_are_visible_ascii(text: str, value: bytes) -> None:
    assert header_value(text) == value


@given(st.text('aé\u0001\n\r\0\x7f"% \u2028\uffff\U0001f600'))
def test_header_values_never_end_a_line(text: str) -> None:
    assert re.fullmatch(rb"[ -~]*", header_value(text))


def test_header_id() -> None:
    assert parsed({"text": "a", "rid": "é"}).header_id == b"%C3%A9"


# Prompts.


@pytest.mark.parametrize(
    ("body", "path", "batch_size", "prompt_tokens"),
    [
        pytest.param({"text": "a, b"}, NATIVE, None, 0, id="text"),
        pytest.param({"text": ["a, b", "c"]}, NATIVE, 2, 0, id="texts"),
        pytest.param({"input_ids": [1, 2, 3]}, NATIVE, None, 3, id="ids"),
        pytest.param({"input_ids": [[1, 2], [3]]}, NATIVE, 2, 3, id="lists of ids"),
        pytest.param(b'{"input_ids":[ [1],\n[2]]}', NATIVE, 2, 2, id="spaced lists of ids"),
        pytest.param({"text": "a", "input_ids": [1, 2]}, NATIVE, None, 2, id="both: the ids are used"),
        pytest.param({"text": ["a"], "input_ids": [[1, 2]]}, NATIVE, 1, 2, id="both as a batch"),
        pytest.param({"text": []}, NATIVE, 1, 0, id="no texts"),
        pytest.param({"input_embeds": [[0.1, 0.2]]}, NATIVE, None, 0, id="embeddings"),
        pytest.param({"input_embeds": [[[0.1]], [[0.2]], [[0.3]]]}, NATIVE, 3, 0, id="lists of embeddings"),
        pytest.param({}, NATIVE, None, 0, id="nothing"),
        pytest.param({"prompt": "a, b"}, COMPLETIONS, None, 0, id="prompt"),
        pytest.param({"prompt": ["a, b", "c", "d"]}, COMPLETIONS, 3, 0, id="prompts"),
        pytest.param({"prompt": [1, 2, 3]}, COMPLETIONS, None, 3, id="prompt as ids"),
        pytest.param({"prompt": [[1, 2], [3, 4, 5]]}, COMPLETIONS, 2, 5, id="prompts as ids"),
        pytest.param({"messages": [{"role": "user", "content": "a"}], "text": ["a", "b"]}, CHAT, None, 0, id="chat"),
        pytest.param({"input": "a"}, EMBEDDINGS, None, 0, id="one text to embed"),
        pytest.param({"input": [1, 2]}, EMBEDDINGS, None, 0, id="ids to embed"),
        pytest.param({"input": ["a", "b"]}, EMBEDDINGS, 2, 0, id="texts to embed"),
        pytest.param({"input": [[1], [2], [3]]}, EMBEDDINGS, 3, 0, id="lists of ids to embed"),
    ],
)
def test_prompts(body: dict[str, Any] | bytes, path: str, batch_size: int | None, prompt_tokens: int) -> None:
    envelope = parsed(body, path=path)
    assert (envelope.batch_size, envelope.prompt_tokens) == (batch_size, prompt_tokens)


@pytest.mark.parametrize(
    ("body", "path", "samples", "sequences"),
    [
        pytest.param({"text": "a"}, NATIVE, 1, 1, id="none named"),
        pytest.param({"text": "a", "sampling_params": {"n": 3}}, NATIVE, 3, 3, id="n"),
        pytest.param({"text": ["a", "b"], "sampling_params": {"n": 3}}, NATIVE, 3, 6, id="n of each item"),
        pytest.param({"text": ["a", "b"], "sampling_params": [{"n": 2}, {}]}, NATIVE, 2, 4, id="a list"),
        pytest.param({"text": "a", "sampling_params": {"n": None}}, NATIVE, 1, 1, id="null"),
        pytest.param({"text": "a", "sampling_params": {"n": 0}}, NATIVE, 1, 1, id="0 counts as 1"),
        pytest.param({"text": "a", "sampling_params": {"n": -3}}, NATIVE, 1, 1, id="negative"),
        pytest.param({"text": "a", "sampling_params": {"n": "2"}}, NATIVE, 1, 1, id="the engine refuses strings"),
        pytest.param(b'{"text":"a","sampling_params":{"\\u006e":2}}', NATIVE, 2, 2, id="an escaped key"),
        pytest.param({"text": "a", "sampling_params": [], "n": 5}, NATIVE, 1, 1, id="not its place"),
        pytest.param({"text": "a", "sampling_params": {"stop": '"n"'}}, NATIVE, 1, 1, id="in a string"),
        pytest.param({"messages": [], "n": 2}, CHAT, 2, 2, id="chat"),
        pytest.param({"messages": [], "n": 0}, CHAT, 1, 1, id="chat, 0"),
        pytest.param({"messages": [], "n": -1}, CHAT, 1, 1, id="chat, negative"),
        pytest.param({"messages": [], "n": "2"}, CHAT, 2, 2, id="chat, a string"),
        pytest.param({"messages": [], "n": 2.0}, CHAT, 2, 2, id="chat, a float"),
        pytest.param({"messages": [], "n": 2.5}, CHAT, 1, 1, id="chat, half a sample"),
        pytest.param({"prompt": ["a", "b"], "n": 2}, COMPLETIONS, 2, 4, id="completions"),
    ],
)
def test_samples(body: dict[str, Any] | bytes, path: str, samples: int, sequences: int) -> None:
    envelope = parsed(body, path=path)
    assert (envelope.samples, envelope.sequences) == (samples, sequences)


@pytest.mark.parametrize("count", [b"65537", b"1000000", b"100000000", b"1e9", b"1E+30", b'"100000000"', b"9" * 300])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_more_samples_than_any_engine_survives_are_refused(path: str, count: bytes) -> None:
    assert refused(b'{"messages":[],"prompt":"a","n":%b}' % count, path=path).report.param == "n"


# Headers.


@pytest.mark.parametrize(("value", "rank"), [(b"0", 0), (b"7", 7), (b"007", 7), (b"999999", 999_999)])
def test_g_4_ranks(value: bytes, rank: int) -> None:
    assert parsed({"text": "a"}, [(b"x-data-parallel-rank", value)]).dp_rank == rank


@pytest.mark.parametrize("value", [b"", b"abc", b"-1", b"1.0", b" 1", b"1000000", b"\xb2", b"0x1"])
def test_g_4_ranks_that_are_refused(value: bytes) -> None:
    assert refused({"text": "a"}, [(b"x-data-parallel-rank", value)]).report.param == "x-data-parallel-rank"


def test_headers_that_pass() -> None:
    headers = [
        (b"host", b"h"),
        (b"content-type", b"application/json"),
        (b"authorization", b"Bearer secret"),
        (b"x-request-id", b"r"),
        (b"traceparent", b"00-1"),
        (b"tracestate", b"a=b"),
        (b"x-smg-routing-key", b"k"),
        (b"x-session-id", b"s"),
        (b"x-sglext-return-input-ids", b"1"),
        (b"x-override-rid", b"victim"),
        (b"x-data-parallel-rank", b"1"),
        (b"x-forebay-worker", b"w1"),
        (b"accept", b"*/*"),
        (b"content-length", b"5"),
        (b"transfer-encoding", b"chunked"),
        (b"cookie", b"c"),
    ]
    envelope = parsed({"text": "a", "model": "m"}, headers)
    assert [name for name, _ in envelope.headers] == [
        b"content-type",
        b"traceparent",
        b"tracestate",
        b"x-smg-routing-key",
        b"x-session-id",
        b"x-sglext-return-input-ids",
    ]
    assert (envelope.worker_id, envelope.dp_rank, envelope.stickiness_key, envelope.model) == ("w1", 1, "k", "m")


@pytest.mark.parametrize("bad", [b"a\r\nx-forged: 1", b"a\nb", b"\r", b"a\0"])
@pytest.mark.parametrize("name", [b"content-type", b"traceparent", b"x-session-id", b"x-sglext-a"])
def test_header_values_with_line_breaks_are_refused(name: bytes, bad: bytes) -> None:
    error = refused({"text": "a"}, [(name, bad)])
    assert error.report.param == name.decode()
    assert refused({"text": "a"}, [(b"x-sglext-" + bad, b"1")]).report.param is not None


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ([(b"x-session-id", b"s")], "s"),
        ([(b"x-smg-routing-key", b""), (b"x-session-id", b"s")], "s"),
        ([(b"x-session-id", b"s"), (b"x-smg-routing-key", b"k")], "k"),
        ([], None),
    ],
)
def test_stickiness(headers: Headers, key: str | None) -> None:
    assert parsed({"text": "a"}, headers).stickiness_key == key


def test_of_repeated_headers_the_first_counts() -> None:
    assert read_headers([(b"a", b"1"), (b"b", b"2"), (b"a", b"3")]) == {b"a": b"1", b"b": b"2"}


def test_an_envelope_does_not_change() -> None:
    with pytest.raises(AttributeError):
        parsed({"text": "a"}).model = "x"  # type: ignore[misc]


def test_more_sequences_than_any_engine_can_run_are_refused() -> None:
    error = refused(b'{"text":"a","sampling_params":{"n":1000000}}')
    assert "sequences" in error.report.message

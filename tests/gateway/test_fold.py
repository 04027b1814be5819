"""Folding: joining JSON text, indices, errors, bounds, and equal answers from cumulative and incremental streams."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.errors import AnswerMalformed, AnswerTooLarge
from backends.types import EngineKind
from gateway.errors import EngineRefused, report_of
from gateway.fold import Fold, FoldIncomplete, fold_changes, new_fold, stays_unary
from gateway.fold_values import Joined, Latest, Members
from gateway.outcome import Outcome
from gateway.routes import Dialect

SGLANG, VLLM = EngineKind.SGLANG, EngineKind.VLLM
DONE = b"data: [DONE]\n\n"
NULL = b"null"
QUEUE_ABORT = '{"type":"abort","message":"Abort in waiting queue"}'


def event(data: str | bytes) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else data.encode()) + b"\n\n"


def native(count: int = 1, *, is_incremental: bool = False, is_list: bool | None = None, limit: int = 1 << 20) -> Fold:
    return new_fold(
        Dialect.NATIVE,
        SGLANG,
        limit_bytes=limit,
        count=count,
        is_list=count > 1 if is_list is None else is_list,
        is_incremental=is_incremental,
    )


def chat(engine: EngineKind = VLLM, count: int = 1, limit: int = 1 << 20) -> Fold:
    return new_fold(Dialect.CHAT, engine, limit_bytes=limit, count=count)


def completions(engine: EngineKind = VLLM, count: int = 1) -> Fold:
    return new_fold(Dialect.COMPLETIONS, engine, limit_bytes=1 << 20, count=count)


def answer(fold: Fold, *data: str | bytes) -> bytes:
    """The body that events fold into; the end marker is added."""
    for one in data:
        fold.feed(event(one))
    fold.feed(DONE)
    result = fold.result()
    assert isinstance(result, bytes)
    return result


def refusal(fold: Fold, *data: str) -> EngineRefused:
    for one in data:
        fold.feed(event(one))
    result = fold.result()
    assert isinstance(result, EngineRefused)
    return result


# What is asked of the engine


@pytest.mark.parametrize(
    ("dialect", "engine", "names"),
    [
        (Dialect.NATIVE, SGLANG, ["stream"]),
        (Dialect.NATIVE, VLLM, ["stream", "stream_options"]),
        (Dialect.CHAT, SGLANG, ["stream", "stream_options"]),
        (Dialect.COMPLETIONS, VLLM, ["stream", "stream_options"]),
    ],
)
def test_a_stream_to_fold_is_asked_for_with_usage(dialect: Dialect, engine: EngineKind, names: list[str]) -> None:
    changes = fold_changes(dialect, engine)
    assert list(changes) == names
    assert changes["stream"] == b"true"
    assert changes.get("stream_options", b'{"include_usage":true}') == b'{"include_usage":true}'


@pytest.mark.parametrize(
    ("dialect", "engine", "fields", "stays"),
    [
        (Dialect.NATIVE, SGLANG, {"return_flat_raw_output_top_logprobs": b"true"}, True),
        (Dialect.CHAT, VLLM, {"return_flat_raw_output_top_logprobs": b"true"}, True),
        (Dialect.COMPLETIONS, VLLM, {"return_flat_raw_output_top_logprobs": b"true"}, True),
        (Dialect.NATIVE, SGLANG, {"return_flat_raw_output_top_logprobs": b"false"}, False),
        (Dialect.NATIVE, SGLANG, {"return_logprob": b"true"}, False),
        (Dialect.CHAT, SGLANG, {"return_token_ids": b"true"}, True),
        (Dialect.CHAT, SGLANG, {"logprobs": b"true"}, True),
        (Dialect.CHAT, VLLM, {"return_token_ids": b"true", "prompt_logprobs": b"null"}, False),
        (Dialect.COMPLETIONS, VLLM, {"prompt_logprobs": b"1"}, True),
        (Dialect.COMPLETIONS, VLLM, {"echo": b"true", "logprobs": b"1"}, True),
        (Dialect.COMPLETIONS, VLLM, {"echo": b"false", "stream_options": b"null"}, False),
        (Dialect.CHAT, VLLM, {"stream_options": b"{}"}, True),
        (Dialect.COMPLETIONS, SGLANG, {"logprobs": b"1"}, False),
    ],
)
def test_what_streams_cannot_give_stays_unary(
    dialect: Dialect, engine: EngineKind, fields: dict[str, bytes], stays: bool
) -> None:
    assert stays_unary(dialect, engine, fields) is stays


def test_embeddings_have_no_streams() -> None:
    with pytest.raises(ValueError, match="never streamed"):
        new_fold(Dialect.EMBEDDINGS, SGLANG, limit_bytes=1)


# Joining JSON text


@pytest.mark.parametrize(
    ("pieces", "whole"),
    [
        pytest.param([b'"a"', b"null", b'"b"'], b'"ab"', id="strings"),
        pytest.param([b'"\\ud83d"', b'"\\ude00"'], b'"\\ud83d\\ude00"', id="surrogates meet"),
        pytest.param([b'"\\ud83d"', b'"x\\n\\""'], b'"\\ud83dx\\n\\""', id="lone surrogate and escapes"),
        pytest.param([b'"a"', b'""'], b'"a"', id="empty string"),
        pytest.param([b"[1.50]", b"[]", b"[ ]", b"[ 2e3 , 3]"], b"[1.50,2e3 , 3]", id="lists"),
        pytest.param([b"[]", b"[1]"], b"[1]", id="empty list first"),
        pytest.param([b"[ ]", b"[1]"], b"[1]", id="white space first"),
        pytest.param([b"null", b"null"], b"null", id="nulls"),
        pytest.param([], b"null", id="nothing"),
        pytest.param([b"1", b"2.0"], b"2.0", id="numbers"),
        pytest.param([b'{"a":1}', b'{"b":2}'], b'{"b":2}', id="objects"),
        pytest.param([b'"a"', b"[1]", b"[2]"], b"[1,2]", id="kind changes"),
    ],
)
def test_pieces_are_joined_as_text(pieces: list[bytes], whole: bytes) -> None:
    value = Joined()
    assert sum(map(value.add, pieces)) >= 0
    assert value.json() == whole


def test_only_what_is_named_is_joined() -> None:
    value = Joined(b"[")
    assert [value.add(piece) for piece in (b'"abc"', b'"d"')] == [5, -2]
    assert value.json() == b'"d"'


def test_the_last_or_the_first_value_wins() -> None:
    last, first = Latest(), Latest(keeps_first=True)
    assert last.json() == NULL
    for piece in (b"1", b"null", b"22", b"null"):
        last.add(piece)
        first.add(piece)
    assert (last.json(), first.json()) == (b"22", b"1")


def test_members_grow_each_in_its_own_way() -> None:
    value = Members(lambda _name: Joined())
    assert value.json() == NULL
    value.add(NULL)
    value.add(b'{"a":"x","b":[1]}')
    assert value.add(b'{"b":[2],"a":"y"}') == 3
    assert value.json() == b'{"a":"xy","b":[1,2]}'


# SGLang's native route


def test_an_item_keeps_its_bytes_but_for_the_index() -> None:
    body = answer(
        native(2),
        '{"text":"b","meta_info":{"x":1.50,"y":[ 1 ]},"index":1}',
        '{"text":"a", "meta_info":{"x":1e400} , "index": 0 }',
    )
    assert body == b'[{"text":"a", "meta_info":{"x":1e400} },{"text":"b","meta_info":{"x":1.50,"y":[ 1 ]}}]'


def test_an_index_in_an_odd_place_is_found() -> None:
    events = ['{"index":0,"text":"a"}', '{"index":1,"text":"b"}']
    assert answer(native(2), *events) == b'[{"text":"a"},{"text":"b"}]'


@pytest.mark.parametrize("is_incremental", [False, True])
def test_a_batch_of_one_is_a_list(is_incremental: bool) -> None:
    fold = native(1, is_incremental=is_incremental, is_list=True)
    assert answer(fold, '{"text":"a","index":0}') == b'[{"text":"a"}]'


@pytest.mark.parametrize("is_incremental", [False, True])
def test_fields_beside_the_known_ones_survive(is_incremental: bool) -> None:
    fold = native(is_incremental=is_incremental)
    only = '{"output_ids":[1],"meta_info":{"id":"r","new":{"a":1.0}},"prompt_token_ids":[7],"more":1234567890123456789}'
    assert answer(fold, only) == only.encode()


def test_incremental_lists_missing_in_the_last_event_are_kept() -> None:
    body = answer(
        native(is_incremental=True),
        '{"text":"a","meta_info":{"id":"r","finish_reason":null,"output_token_sampling_mask":[[1]]}}',
        '{"text":"b","meta_info":{"id":"r","finish_reason":{"type":"stop","matched":2}}}',
    )
    assert body == (
        b'{"text":"ab","meta_info":{"id":"r","finish_reason":{"type":"stop","matched":2},'
        b'"output_token_sampling_mask":[[1]]}}'
    )


@pytest.mark.parametrize("is_incremental", [False, True])
def test_an_abort_in_the_queue_keeps_what_was_there(is_incremental: bool) -> None:
    before = '{"text":"ab","output_ids":[1,2],"meta_info":{"id":"r","finish_reason":null,"prompt_tokens":3}}'
    last = (
        f'{{"text":"ab","output_ids":[2],"meta_info":{{"id":"r","finish_reason":{QUEUE_ABORT},"completion_tokens":2}}}}'
    )
    body = answer(native(is_incremental=is_incremental), before, last)
    assert body == last.replace("[2]", "[1,2]").encode()


@pytest.mark.parametrize("is_incremental", [False, True])
def test_an_abort_in_the_queue_may_be_all_there_is(is_incremental: bool) -> None:
    only = f'{{"text":"","output_ids":[],"meta_info":{{"id":"r","finish_reason":{QUEUE_ABORT},"completion_tokens":0}}}}'
    assert answer(native(is_incremental=is_incremental), only) == only.encode()


@pytest.mark.parametrize("is_incremental", [False, True])
def test_a_batch_keeps_each_items_abort(is_incremental: bool) -> None:
    fold = native(2, is_incremental=is_incremental)
    items = [
        f'{{"text":"","output_ids":[],"meta_info":{{"id":"{name}","finish_reason":{QUEUE_ABORT}}}}}' for name in "ab"
    ]
    events = [item[:-1] + f',"index":{index}}}' for index, item in enumerate(items)]
    assert answer(fold, events[1], events[0]) == f"[{','.join(items)}]".encode()


# Errors


BATCH = partial(native, 2)
DELTA = partial(native, is_incremental=True)
DELTA_BATCH = partial(native, 2, is_incremental=True)
ABORT_503 = (
    '{"text":"","output_ids":[],"meta_info":{"id":"r","finish_reason":'
    '{"type":"abort","message":"The request queue is full.","status_code":503}}}'
)
ERROR_400 = '{"error":{"message":"too long","type":"invalid_request_error","code":400,"retryable":false}}'


@pytest.mark.parametrize("is_incremental", [False, True])
def test_an_abort_with_a_status_refuses_even_after_tokens(is_incremental: bool) -> None:
    fold = native(is_incremental=is_incremental)
    result = refusal(fold, '{"text":"a","output_ids":[1],"meta_info":{"finish_reason":null}}', ABORT_503)
    assert (result.report.status, result.report.outcome) == (503, Outcome.OVERLOADED)


@pytest.mark.parametrize("is_incremental", [False, True])
def test_one_full_queue_refuses_the_whole_batch(is_incremental: bool) -> None:
    fold = native(2, is_incremental=is_incremental)
    fine = '{"text":"a","output_ids":[1],"meta_info":{"finish_reason":{"type":"length","length":1}},"index":0}'
    result = refusal(fold, fine, ABORT_503[:-1] + ',"index":1}')
    assert result.report.status == 503


@pytest.mark.parametrize(
    "new",
    [
        pytest.param(native, id="cumulative"),
        pytest.param(partial(native, 2), id="cumulative batch"),
        pytest.param(partial(native, is_incremental=True), id="incremental"),
        pytest.param(chat, id="chat"),
    ],
)
@pytest.mark.parametrize("is_spaced", [False, True])
def test_an_error_event_keeps_its_status(new: Callable[[], Fold], is_spaced: bool) -> None:
    data = ERROR_400.replace('{"error"', '{ "error"') if is_spaced else ERROR_400
    assert refusal(new(), data).report.status == 400


def test_an_error_keeps_the_engines_body_and_ends_the_fold() -> None:
    fold = native()
    fold.feed(event(ERROR_400) + event("anything") + DONE)
    result = fold.result()
    assert isinstance(result, EngineRefused)
    assert result.body == ERROR_400.encode()
    assert result.report.message == "too long"


def test_an_error_that_cannot_be_read_is_still_one() -> None:
    assert refusal(chat(), '{"error":7}').report.status == 502


def test_an_abort_whose_status_is_null_is_an_answer() -> None:
    only = '{"text":"a","meta_info":{"finish_reason":{"type":"abort","message":"Aborted","status_code":null}}}'
    assert answer(native(is_incremental=True), only) == only.encode()
    assert answer(native(), only) == only.encode()


@pytest.mark.parametrize("new", [native, partial(native, is_incremental=True), chat])
def test_an_end_without_its_marker_is_told(new: Callable[[], Fold]) -> None:
    fold = new()
    fold.feed(event('{"text":"a","meta_info":{},"choices":[{"index":0}]}'))
    with pytest.raises(FoldIncomplete, match="without its end marker") as caught:
        fold.result()
    assert not caught.value.is_terminated
    report = report_of(caught.value)
    assert (report.status, report.outcome) == (502, Outcome.TRUNCATED)


@pytest.mark.parametrize("new", [partial(native, 2), partial(native, 2, is_incremental=True), partial(chat, count=2)])
def test_an_item_that_never_came_is_told(new: Callable[[], Fold]) -> None:
    fold = new()
    fold.feed(event('{"text":"a","meta_info":{},"choices":[{"index":0}],"index":0}') + DONE)
    with pytest.raises(FoldIncomplete, match="without a whole answer") as caught:
        fold.result()
    assert caught.value.is_terminated


@pytest.mark.parametrize(
    ("new", "data"),
    [
        pytest.param(BATCH, '{"text":"a"}', id="no index"),
        pytest.param(BATCH, '{"text":"a","index":2}', id="index beyond"),
        pytest.param(BATCH, '{"index":-1,"text":"a"}', id="negative index"),
        pytest.param(BATCH, "[1]", id="no object"),
        pytest.param(DELTA_BATCH, '{"text":"a"}', id="incremental, no index"),
        pytest.param(DELTA_BATCH, '{"text":"a","index":"0"}', id="incremental, no number"),
        pytest.param(DELTA, '{"meta_info":3}', id="meta_info"),
        pytest.param(chat, '{"choices":[{"index":1}]}', id="choice beyond"),
        pytest.param(chat, '{"choices":{}}', id="choices"),
        pytest.param(chat, '{"choices":[1]}', id="choice"),
        pytest.param(chat, b'{"a\xff":1}', id="no utf-8"),
        pytest.param(chat, '{"choices":[{"index":0,"delta":{"tool_calls":[{"index":9999999}]}}]}', id="call"),
        pytest.param(chat, '{"choices":[{"index":0,"delta":"x"}]}', id="delta"),
    ],
)
def test_what_is_not_of_the_engines_shape_is_told(new: Callable[[], Fold], data: str | bytes) -> None:
    fold = new()
    with pytest.raises(AnswerMalformed):
        fold.feed(event(data))


def test_a_last_event_that_is_no_json_is_told() -> None:
    fold = native()
    fold.feed(event("<html>") + DONE)
    with pytest.raises(AnswerMalformed):
        fold.result()


# Framing and bounds


def test_named_events_and_comments_are_left_alone() -> None:
    fold = native()
    fold.feed(b": keep-alive\n\n" + b'event: sglext_ids\ndata: {"output_ids":[1]}\n\n')
    fold.feed(b'event: message\ndata: {"text":"a"}\n\n' + DONE + event("late"))
    assert fold.result() == b'{"text":"a"}'


@pytest.mark.parametrize(
    "stream",
    [
        pytest.param(b'data: {"text":"a"}\n\n' + DONE, id="usual"),
        pytest.param(b'data:{"text":"a"}\r\n\r\ndata: [DONE]\r\n\r\n', id="line ends"),
        pytest.param(b'data: {"text":\ndata: "a"}\n\n' + DONE, id="two lines"),
        pytest.param(b'data: \n\ndata:\n\ndata: {"text":"a"}\n\n' + DONE, id="empty"),
        pytest.param(b'data: {"text":"a"}\nid: 7\n\n' + DONE, id="id behind"),
        pytest.param(b'data: {"text":"b"}\n\n: x\n\ndata: {"text":"a"}\n\n\n\n' + DONE, id="comment between"),
    ],
)
def test_any_framing_of_events_is_read(stream: bytes) -> None:
    fold = native()
    fold.feed(stream)
    result = fold.result()
    assert isinstance(result, bytes)
    assert json.loads(result) == {"text": "a"}


def test_cumulative_streams_hold_one_event_of_each_item() -> None:
    fold = native(2, limit=1000)
    for size in range(400):
        fold.feed(b"".join(event(f'{{"text":"{"x" * size}","index":{index}}}') for index in (0, 1)))
    with pytest.raises(AnswerTooLarge) as caught:
        fold.feed(event(f'{{"text":"{"x" * 800}","index":0}}'))
    assert caught.value.limit_bytes == 1000


def test_incremental_streams_hold_their_pieces() -> None:
    fold = native(is_incremental=True, limit=1000)
    with pytest.raises(AnswerTooLarge):
        fold.feed(event('{"text":"0123456789","output_ids":[1]}') * 100)


def test_chunks_hold_their_pieces() -> None:
    fold = chat(limit=1000)
    with pytest.raises(AnswerTooLarge):
        fold.feed(event('{"id":"x","choices":[{"index":0,"delta":{"content":"0123456789"}}]}') * 200)


# Chunks


def choice(delta: str, rest: str = "", index: int = 0) -> str:
    return f'{{"id":"c","object":"chat.completion.chunk","choices":[{{"index":{index},"delta":{delta}{rest}}}]}}'


def message_of(body: bytes) -> Any:
    return json.loads(body)["choices"][0]["message"]


CALLS = (
    choice('{"role":"assistant","content":""}'),
    choice(
        '{"tool_calls":[{"id":"a","type":"function","index":0,"function":{"name":"f","arguments":""}},'
        '{"id":"b","type":"function","index":1,"function":{"name":"g","arguments":"{"}}]}'
    ),
    choice('{"tool_calls":[{"id":null,"index":1,"function":{"name":null,"arguments":"}"}}]}'),
    choice('{"tool_calls":[{"index":0,"function":{"arguments":"{\\"x\\": 1.0"}}]}'),
    choice('{"tool_calls":[{"index":0,"function":{"arguments":"}"}}]}', ',"finish_reason":"tool_calls"'),
)


@pytest.mark.parametrize(
    ("engine", "first_keys"),
    [(SGLANG, ["id", "index", "type", "function"]), (VLLM, ["id", "type", "function"])],
)
def test_tool_calls_are_merged_by_index(engine: EngineKind, first_keys: list[str]) -> None:
    body = answer(chat(engine), *CALLS)
    message = message_of(body)
    assert message["content"] is None
    assert [call["id"] for call in message["tool_calls"]] == ["a", "b"]
    assert list(message["tool_calls"][0]) == first_keys
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1.0}'}
    assert message["tool_calls"][1]["function"] == {"name": "g", "arguments": "{}"}
    assert json.loads(body)["choices"][0]["finish_reason"] == "tool_calls"


def test_tool_calls_without_an_index_count_by_position() -> None:
    message = message_of(answer(chat(), choice('{"content":"x","tool_calls":[{"id":"a"},{"id":"b"}]}')))
    assert [call["id"] for call in message["tool_calls"]] == ["a", "b"]
    assert message["content"] == "x"


@pytest.mark.parametrize("calls", ["null", "[]"])
def test_no_tool_calls_are_no_field(calls: str) -> None:
    message = message_of(answer(chat(), choice(f'{{"content":"","tool_calls":{calls}}}')))
    assert "tool_calls" not in message
    assert message["content"] == ""


def test_a_function_call_grows() -> None:
    message = message_of(
        answer(
            chat(),
            choice('{"function_call":{"name":"f","arguments":"{"}}'),
            choice('{"function_call":{"arguments":"}"}}'),
        )
    )
    assert message["function_call"] == {"name": "f", "arguments": "{}"}


@pytest.mark.parametrize(("engine", "name"), [(SGLANG, "reasoning_content"), (VLLM, "reasoning")])
def test_reasoning_is_concatenated(engine: EngineKind, name: str) -> None:
    deltas = [f'{{"{name}":"th","content":""}}', f'{{"{name}":"ink"}}', f'{{"{name}":null}}']
    message = message_of(answer(chat(engine), *map(choice, deltas)))
    assert (message[name], message["content"]) == ("think", None)


def test_unknown_fields_are_kept() -> None:
    body = json.loads(
        answer(
            chat(),
            choice('{"words":"a","list":[1],"number":1}', ',"more":[1],"state":"x"'),
            choice('{"words":"b","list":[2],"number":2}', ',"more":[2],"state":"y"')[:-1] + ',"new":{"a":1}}',
            '{"choices":[],"new":null}',
        )
    )
    message = body["choices"][0]["message"]
    assert (message["words"], message["list"], message["number"]) == ("ab", [1, 2], 2)
    assert (body["choices"][0]["more"], body["choices"][0]["state"]) == ([1, 2], "y")
    assert body["new"] == {"a": 1}


def test_a_delta_where_none_is_known_is_kept_too() -> None:
    body = json.loads(answer(completions(), choice('{"tool_calls":[{"index":0,"id":"a"}]}')))
    assert body["choices"][0]["delta"] == {"tool_calls": [{"index": 0, "id": "a"}]}


def test_sglang_hidden_states_stand_beside_the_message() -> None:
    body = json.loads(answer(chat(SGLANG), choice('{"content":"a"}'), choice('{"hidden_states":[0.5]}')))
    assert body["choices"][0]["hidden_states"] == [0.5]
    assert list(body["choices"][0]["message"]) == ["role", "content", "reasoning_content"]


def test_a_choice_without_a_delta_has_an_empty_message() -> None:
    message = message_of(answer(chat(SGLANG), '{"choices":[{"finish_reason":"abort"}]}'))
    assert message == {"role": "assistant", "content": "", "reasoning_content": None}


def test_the_first_choice_names_the_answer() -> None:
    fold = chat(SGLANG, 2)
    late = choice('{"content":"b"}', index=1).replace('"c"', '"second"')
    body = json.loads(answer(fold, late, choice('{"content":"a"}'), late))
    assert body["id"] == "c"
    assert [one["message"]["content"] for one in body["choices"]] == ["a", "bb"]


def test_what_a_stream_does_not_tell_is_supplied() -> None:
    fold = new_fold(
        Dialect.NATIVE, VLLM, limit_bytes=1000, supplied={"model": b'"m"', "created": b"7", "output_mode": b'"x"'}
    )
    body = json.loads(
        answer(fold, '{"request_id":"r","usage":null,"output_mode":"tokens","choices":[{"index":0,"token_ids":[1]}]}')
    )
    assert list(body)[:4] == ["request_id", "model", "created", "usage"]
    assert (body["model"], body["created"], body["output_mode"]) == ("m", 7, "tokens")


def test_the_answer_can_be_asked_for_twice() -> None:
    fold = chat()
    assert answer(fold, *CALLS) == fold.result()


# Equal answers from both kinds of stream


TEXTS = st.text(
    st.characters(codec="utf-8", exclude_categories=[])
    | st.sampled_from(['"', "\\", "\ud83d", "\ude00", "\n", "é", "😀"]),
    max_size=4,
)
NUMBERS = st.sampled_from(
    ["-1.50", "0.0", "-0.0", "1e-7", "-6.521358966827393", "123456789012345678901", "null", "1E+2"]
)


@dataclass(frozen=True)
class Token:
    text: str
    id: str
    logprob: str


TOKENS = st.builds(Token, TEXTS, st.integers(0, 1 << 40).map(str), NUMBERS)


def native_event(tokens: list[Token], start: int, end: int, *, index: int, with_index: bool, is_last: bool) -> str:
    """An event that holds ``tokens[start:end]``, and counters as of ``end``."""
    shown = tokens[start:end]
    rows = ",".join(f"[{token.logprob},{token.id},null]" for token in shown)
    top = ",".join(f"[[{token.logprob},{token.id},null]]" for token in shown)
    finish = '{"type":"stop","matched":2}' if is_last else "null"
    # The text of a whole is spelled as its pieces are: escaped to ASCII.
    text = json.dumps("".join(token.text for token in shown))
    return (
        f'{{"text":{text},"output_ids":[{",".join(token.id for token in shown)}],"meta_info":{{"id":"r{index}",'
        f'"finish_reason":{finish},"prompt_tokens":3,"input_token_logprobs":[[null,1,null],[-0.10,2,null]],'
        f'"output_token_logprobs":[{rows}],"output_token_logprobs_length":{end},"output_top_logprobs":[{top}],'
        f'"completion_tokens":{end}}}' + (f',"index":{index}}}' if with_index else "}")
    )


@given(
    st.lists(st.lists(TOKENS, min_size=1, max_size=6), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_both_kinds_of_stream_fold_into_the_same_answer(
    items: list[list[Token]], rng: random.Random, is_list: bool
) -> None:
    is_list = is_list or len(items) > 1
    steps = [
        (index, start, start + 1, start + 1 == len(tokens))
        for index, tokens in enumerate(items)
        for start in range(len(tokens))
    ]
    queues = [[step for step in steps if step[0] == index] for index in range(len(items))]
    ordered = []
    while any(queues):
        ordered.append(rng.choice([queue for queue in queues if queue]).pop(0))
    cumulative = native(len(items), is_list=is_list)
    incremental = native(len(items), is_list=is_list, is_incremental=True)
    for index, start, end, is_last in ordered:
        tokens = items[index]
        whole = native_event(tokens, 0, end, index=index, with_index=is_list, is_last=is_last)
        piece = native_event(tokens, start, end, index=index, with_index=is_list, is_last=is_last)
        cumulative.feed(event(whole))
        incremental.feed(event(piece))
    expected = [
        native_event(tokens, 0, len(tokens), index=index, with_index=False, is_last=True)
        for index, tokens in enumerate(items)
    ]
    body = f"[{','.join(expected)}]" if is_list else expected[0]
    assert answer(cumulative) == body.encode()
    assert answer(incremental) == body.encode()


@given(st.lists(st.lists(TEXTS, min_size=1, max_size=6), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_choices_are_joined_in_any_interleaving(choices: list[list[str]], rng: random.Random) -> None:
    fold = completions(SGLANG, len(choices))
    queues = [[(index, text) for text in texts] for index, texts in enumerate(choices)]
    while any(queues):
        index, text = rng.choice([queue for queue in queues if queue]).pop(0)
        raw = json.dumps(text, ensure_ascii=rng.random() < 0.5 or any("\ud800" <= c <= "\udfff" for c in text))
        fold.feed(event(f'{{"id":"c","choices":[{{"index":{index},"text":{raw},"logprobs":{{"tokens":[{raw}]}}}}]}}'))
    body = json.loads(answer(fold))
    whole = [json.loads('"' + "".join(json.dumps(text)[1:-1] for text in texts) + '"') for texts in choices]
    assert [one["text"] for one in body["choices"]] == whole
    assert [one["logprobs"]["tokens"] for one in body["choices"]] == choices

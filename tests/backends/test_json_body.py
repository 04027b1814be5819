"""JSON bodies: what is refused, and that everything else of a body survives byte by byte."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backends.json_body import JsonBody, JsonBodyError


def joined(body: JsonBody, changes: dict[str, bytes]) -> bytes:
    """The body with changes, as it goes on the wire."""
    return b"".join(body.with_fields(changes))


@pytest.mark.parametrize(
    ("raw", "changes", "expected"),
    [
        pytest.param(b'{"a":1}', {}, b'{"a":1}', id="nothing"),
        pytest.param(b'{"a":1}', {"rid": b'"x"'}, b'{"a":1,"rid":"x"}', id="added"),
        pytest.param(b"{}", {"rid": b'"x"'}, b'{"rid":"x"}', id="added to nothing"),
        pytest.param(b" { \n} \t\r\n", {"b": b"2", "c": b"3"}, b' { \n"b":2,"c":3}', id="white space around"),
        pytest.param(b'{ "a" : 1.50 , "b":[1, 2 ]}', {"c": b"3"}, b'{ "a" : 1.50 , "b":[1, 2 ],"c":3}', id="spelling"),
        pytest.param(b'{ "a" : 1.50 , "b":[1, 2 ]}', {"a": b"3"}, b'{"a":3,"b":[1, 2 ]}', id="replaced in place"),
        pytest.param(b'{"a":1,"b":2}', {"c": b"3", "b": b"4"}, b'{"a":1,"b":4,"c":3}', id="replaced and added"),
        pytest.param(b'{"b":1,"a":2,"b":3}', {"a": b"4"}, b'{"b":3,"a":4}', id="of a repeated key the last value"),
        pytest.param(b'{"r\\u0069d":1}', {"rid": b"2"}, b'{"rid":2}', id="replaced in any spelling"),
        pytest.param(
            '{"é\\"\\u0001":1,"a":2}'.encode(), {"a": b"3"}, '{"é\\"\\u0001":1,"a":3}'.encode(), id="odd keys"
        ),
        pytest.param(b'{"a":"}"}', {"b": b"1"}, b'{"a":"}","b":1}', id="brace in a string"),
        pytest.param(b'{"a":"\xff","b":1}', {"b": b"2"}, b'{"a":"\xff","b":2}', id="bytes that are no UTF-8"),
    ],
)
def test_changes(raw: bytes, changes: dict[str, bytes], expected: bytes) -> None:
    body = JsonBody.parse(raw)
    assert joined(body, changes) == expected
    assert body.raw == raw


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        pytest.param(b"", "empty", id="nothing"),
        pytest.param(b" \n", "empty", id="white space"),
        pytest.param(b"[1]", "JSON object", id="array"),
        pytest.param(b'"a"', "JSON object", id="string"),
        pytest.param(b"null", "JSON object", id="null"),
        pytest.param(b'{"a":1', "not valid JSON", id="cut"),
        pytest.param(b'{"a":1,}', "not valid JSON", id="trailing comma"),
        pytest.param(b'{"a":1}{', "not valid JSON", id="more"),
        pytest.param(b"{'a':1}", "not valid JSON", id="other quotes"),
        pytest.param(b'{"a":NaN}', "not valid JSON", id="NaN"),
        pytest.param(b'{"a":01}', "not valid JSON", id="leading zero"),
        pytest.param(b'{"a":"\n"}', "not valid JSON", id="line break in a string"),
        pytest.param(b'{"\xff":1}', "not valid JSON", id="key that is no UTF-8"),
        pytest.param(b'{"\\ud800":1}', "not valid JSON", id="key with half a surrogate pair"),
        pytest.param(b'\xef\xbb\xbf{"a":1}', "not valid JSON", id="byte order mark"),
        pytest.param(b'{"a":' + b"[" * 100_000, "nested too deeply", id="depth"),
    ],
)
def test_what_is_no_object_is_refused(raw: bytes, says: str) -> None:
    with pytest.raises(JsonBodyError, match=says) as caught:
        JsonBody.parse(raw)
    assert caught.value.key is None


@pytest.mark.parametrize("cut", range(1, 24))
def test_a_cut_object_is_refused_at_every_cut(cut: int) -> None:
    whole = b'{"a":[1,{"b":"\\u00e9"}]}'
    with pytest.raises(JsonBodyError):
        JsonBody.parse(whole[:cut])


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        pytest.param(b'{"rid":"a","rid":"b"}', "rid", id="plain"),
        pytest.param(b'{"rid" :"a", "x":1, "rid": "a"}', "rid", id="same value"),
        pytest.param(b'{"rid":"a","r\\u0069d":"b"}', "rid", id="one of them escaped"),
        pytest.param(b'{"r\\u0069d":"a","\\u0072id":"b"}', "rid", id="both escaped"),
        pytest.param(b'{"max_\\u005Fx":1,"rid":1,"stream":1,"\\u0073tream":2}', "stream", id="among other escapes"),
    ],
)
def test_a_repeated_key_is_found_in_any_spelling(raw: bytes, key: str) -> None:
    with pytest.raises(JsonBodyError, match="more than once") as caught:
        JsonBody.parse(raw, frozenset({"rid", "stream"}))
    assert caught.value.key == key


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b'{"x":"rid","rid":"\\"rid\\"","y":{"rid":1,"rid":2}}', id="the key's text elsewhere"),
        pytest.param(b'{"rid":1,"x":{"r\\u0069d":2}}', id="escaped elsewhere"),
        pytest.param(b'{"rid":1,"t":"\\u0041\\u4e2d\\u00e9"}', id="other escapes"),
        pytest.param(b'{"other":1,"other":2}', id="a key that nobody reads"),
        pytest.param(b'{"x":"\\u0072"}', id="escape without any of the keys"),
    ],
)
def test_what_is_not_repeated_passes(raw: bytes) -> None:
    assert JsonBody.parse(raw, frozenset({"rid", "stream"})).raw == raw


LARGE = [*range(5000)]


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_repeated_keys_of_large_bodies(separators: tuple[str, str]) -> None:
    raw = json.dumps({"rid": "é", "x": LARGE, "y": {"rid": 1}}, separators=separators, ensure_ascii=False).encode()
    body = JsonBody.parse(raw, frozenset({"rid"}))
    assert body.text("x") == json.dumps(LARGE, separators=separators).encode()
    assert body.text("x") is body.text("x")
    for more in (b',"rid":2}', b',"r\\u0069d":2}', b', "rid": 2}'):
        with pytest.raises(JsonBodyError, match="more than once"):
            JsonBody.parse(raw[:-1] + more, frozenset({"rid"}))
    assert JsonBody.parse(b" " + raw, frozenset({"rid"})).fields.keys() == {"rid", "x", "y"}


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        pytest.param(b'{"rid":1,"x":"\xff","rid":2}', "UTF-8", id="bytes that are no UTF-8"),
        pytest.param(b'{"rid":1,"x":' + b"[" * 990 + b"]" * 990 + b',"rid":2}', "nested too deeply|more than once",
                     id="depth"),
    ],
)  # fmt: skip
def test_looking_for_repeated_keys_never_fails_in_another_way(raw: bytes, says: str) -> None:
    with pytest.raises(JsonBodyError, match=says):
        JsonBody.parse(raw, frozenset({"rid"}))


def test_depth_that_only_the_second_look_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_deep(*args: object, **kwargs: object) -> None:
        raise RecursionError

    monkeypatch.setattr(json, "loads", too_deep)
    with pytest.raises(JsonBodyError, match="nested too deeply"):
        JsonBody.parse(b'{"rid":1,"rid":2}', frozenset({"rid"}))


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        pytest.param(b'{"a": 1 }', b"1", id="value"),
        pytest.param(b'{"a" : null}', b"", id="null"),
        pytest.param(b"{}", b"", id="absent"),
        pytest.param(b'{"a":"null"}', b'"null"', id="the word"),
        pytest.param(b'{"a":[ 1 , 2 ]}', b"[ 1 , 2 ]", id="as spelt"),
    ],
)
def test_text_of_a_field(raw: bytes, text: bytes) -> None:
    assert JsonBody.parse(raw).text("a") == text


# Explicit, since Hypothesis takes seconds to list all characters on a first run.
ALPHABET = 'abé\u0001\n\r\t\0"\\/% \u2028\uffff\U0001f600{}[]:,0'
TEXT = st.text(ALPHABET, max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
EXTRAS = st.dictionaries(TEXT.filter(lambda key: key not in ("rid", "routed_dp_rank")), VALUES, max_size=6)


@given(
    EXTRAS, st.booleans(), st.sampled_from([None, 1]), st.sampled_from([(",", ":"), (" , ", "\t:\n")]), st.booleans()
)
@example({"big": 2**63 + 1, "deep": [[[{"é": "\u2028"}]]]}, True, None, (",", ":"), True)
def test_a2_14_extras_survive_unchanged(
    extras: dict[str, Any], ascii_only: bool, indent: int | None, separators: tuple[str, str], has_rid: bool
) -> None:
    fields = {**extras, "rid": "public"} if has_rid else extras
    raw = json.dumps(fields, ensure_ascii=ascii_only, indent=indent, separators=separators).encode()
    body = JsonBody.parse(raw, frozenset({"rid"}))
    sent = joined(body, {"rid": b'"engine"', "routed_dp_rank": b"3"})
    after = msgspec.json.decode(sent, type=dict[str, msgspec.Raw])
    before = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    assert (bytes(after.pop("rid")), bytes(after.pop("routed_dp_rank"))) == (b'"engine"', b"3")
    before.pop("rid", None)
    assert {key: bytes(value) for key, value in after.items()} == {key: bytes(value) for key, value in before.items()}
    assert list(after) == list(before)
    assert json.loads(sent) == {**fields, "rid": "engine", "routed_dp_rank": 3}
    if not has_rid:
        assert sent.startswith(raw.rstrip()[:-1].rstrip(b"\n"))


@given(st.binary(max_size=40))
def test_arbitrary_bytes_are_parsed_or_refused(raw: bytes) -> None:
    try:
        body = JsonBody.parse(raw, frozenset({"a", "rid"}))
    except JsonBodyError:
        return
    assert isinstance(json.loads(raw.decode("utf-8", "replace")), dict)
    assert joined(body, {}) == raw

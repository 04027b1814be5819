"""Long lists of ids: what passes is a JSON list of short numbers, and everything else is left to the parser."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backends.json_body import JsonBody, JsonBodyError
from backends.plain_ids import find_plain_ids

LONG = list(range(999, 6000))


def is_plain(inside: str) -> bool:
    """What the search promises, by other means."""
    try:
        ids = json.loads(f"[{inside}]")
    except ValueError:
        return False
    if not ids or not all(type(one) is int and 0 <= one < 10**9 for one in ids):
        return False
    return any(separator.join(map(str, ids)) == inside for separator in (",", ", "))


@given(st.text("0129, ", max_size=200) | st.lists(st.integers(0, 10**10)).map(lambda ids: ",".join(map(str, ids))))
@example("0")
@example("00")
@example("0,01")
@example("1,,2")
@example("1, 2,3")
@example("1,2 ")
@example("1" * 9 + ",5")
@example("1" * 10)
@example("-0")
def test_exactly_lists_of_short_numbers_are_found(inside: str) -> None:
    found = find_plain_ids(b'{"input_ids":[%b]}' % inside.encode())
    assert (found is not None) == is_plain(inside)
    if found is not None:
        assert found.length == len(json.loads(f"[{inside}]"))


@pytest.mark.parametrize("before", [0, 8190, 8191, 8192, 20_000])
@pytest.mark.parametrize(
    ("tail", "length"),
    [("5,7,8", 3), ("57,8", 2), ("5", 1), ("5x7", 0), ("5,,7", 0), ("5,01,7", 0), ("5,-1,7", 0), ("5,", 0), ("", 0)],
)
def test_lists_of_several_pieces(before: int, tail: str, length: int) -> None:
    found = find_plain_ids(b'{"input_ids":[%b%b]}' % (b"1234567," * before, tail.encode()))
    assert (found.length if found else 0) == (before + length if length else 0)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("key", ["input_ids", "prompt"])
def test_a_long_list_stays_the_clients_bytes(key: str, separators: tuple[str, str]) -> None:
    raw = json.dumps({"a": 1, key: LONG, "b": ["]"]}, separators=separators).encode()
    body = JsonBody.parse(raw, frozenset({key}))
    assert body.id_counts == {key: len(LONG)}
    assert (list(body.fields), body.raw) == (["a", key, "b"], raw)
    assert json.loads(body.text(key)) == LONG
    assert json.loads(b"".join(body.with_fields({"rid": b'"x"'}))) == {"a": 1, key: LONG, "b": ["]"], "rid": "x"}
    assert json.loads(b"".join(body.with_fields({"a": b"2"}))) == {"a": 2, key: LONG, "b": ["]"]}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('{"a":{"input_ids":IDS}}', id="not at the top level"),
        pytest.param('{"a":{"input_ids":IDS},"input_ids":[]}', id="below the top level and at it"),
        pytest.param('{"a":{"input_ids":IDS},"input\\u005fids":[]}', id="at the top level in another spelling"),
        pytest.param('{"a\\"input_ids":IDS,"b":1}', id="the end of another key"),
        pytest.param('{"a":"input_ids","input_ids":IDS}', id="named in a value"),
        pytest.param('{"input_ids":[IDS,IDS]}', id="a batch"),
        pytest.param('{"input_ids":IDS,"text":"IDS"}', id="digits in a text"),
    ],
)
def test_the_fields_are_those_of_a_plain_parse(text: str) -> None:
    raw = text.replace("IDS", json.dumps(LONG)).encode()
    body = JsonBody.parse(raw)
    expected = json.loads(raw)
    assert {name: json.loads(body.text(name)) for name in body.fields} == expected
    assert all(len(expected[name]) == count for name, count in body.id_counts.items())


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('{"input_ids":IDS', id="cut"),
        pytest.param('{"a""input_ids":IDS}', id="no comma"),
        pytest.param('{"input_ids":IDS]}', id="one bracket too many"),
        pytest.param('{"a":"x"input_ids":IDS}', id="a quote too few"),
        pytest.param('{"input_ids":IDS,"input_ids":1}', id="twice"),
        pytest.param('{"input_ids":IDS,"rid":1,"rid":2}', id="another one twice"),
    ],
)
def test_what_is_no_json_beside_the_ids_is_refused(text: str) -> None:
    raw = text.replace("IDS", json.dumps(LONG)).encode()
    with pytest.raises(JsonBodyError):
        JsonBody.parse(raw, frozenset({"input_ids", "rid"}))

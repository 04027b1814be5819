"""Bodies of legs: what is changed, and what stays the client's bytes."""

import pytest

from backends.body_edit import edited
from backends.json_body import JsonBody

BODY = b'{ "a": 1.0e5, "b": {"x" : 12345678901234567890}, "\xc3\xa9": null }'


@pytest.mark.parametrize(
    ("changes", "removed", "expected"),
    [
        pytest.param({}, (), BODY, id="nothing"),
        pytest.param({}, ("c",), BODY, id="what is not there"),
        pytest.param({"c": b"2"}, (), BODY[:-2] + b' ,"c":2}', id="added"),
        pytest.param({"a": b"2"}, (), b'{"a":2,"b":{"x" : 12345678901234567890},"\xc3\xa9":null}', id="replaced"),
        pytest.param({}, ("a", "\u00e9"), b'{"b":{"x" : 12345678901234567890}}', id="removed"),
        pytest.param({"b": b"[]", "c": b"1"}, ("a", "\u00e9"), b'{"b":[],"c":1}', id="all of it"),
        pytest.param({}, ("a", "b", "\u00e9"), b"{}", id="nothing left"),
    ],
)
def test_edits(changes: dict[str, bytes], removed: tuple[str, ...], expected: bytes) -> None:
    body = JsonBody.parse(BODY)
    made = edited(body, changes, removed)
    assert made.raw == expected
    assert {name: bytes(value) for name, value in made.fields.items()} == {
        name: bytes(value) for name, value in JsonBody.parse(expected).fields.items()
    }
    assert body.raw == BODY
    assert len(body.fields) == 3


def test_the_number_of_ids_stays_known() -> None:
    body = JsonBody.parse(b'{"input_ids":[%b],"x":1}' % b",".join([b"12345"] * 4000))
    assert body.id_counts == {"input_ids": 4000}
    assert edited(body, {"y": b"1"}, ("x",)).id_counts == {"input_ids": 4000}
    assert edited(body, {}, ("input_ids",)).id_counts == {}
    assert edited(body, {"input_ids": b"[1]"}).id_counts == {}
    assert b"".join(edited(body, {"y": b"1"}).with_fields({"rid": b'"r"'})) == body.raw[:-1] + b',"y":1,"rid":"r"}'

"""Heads of requests: what is written, and that no value can end its line."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backends.errors import RequestUnsendable
from backends.upstream.base import Headers, Origin, UpstreamRequest
from backends.upstream.h1_request import request_head

ORIGIN = Origin("http", "h", 30000)


@pytest.mark.parametrize(
    ("origin", "request_", "head"),
    [
        pytest.param(
            ORIGIN,
            UpstreamRequest("GET", "/ready", [], []),
            b"GET /ready HTTP/1.1\r\nhost: h:30000\r\n\r\n",
            id="GET without a body says no length",
        ),
        pytest.param(
            ORIGIN,
            UpstreamRequest("POST", "/abort?x=1", [(b"a", b"1"), (b"a", b"2")], []),
            b"POST /abort?x=1 HTTP/1.1\r\nhost: h:30000\r\na: 1\r\na: 2\r\ncontent-length: 0\r\n\r\n",
            id="POST without a body says 0",
        ),
        pytest.param(
            ORIGIN,
            UpstreamRequest("GET", "/x", [], [b"ab", memoryview(b"cde")]),
            b"GET /x HTTP/1.1\r\nhost: h:30000\r\ncontent-length: 5\r\n\r\n",
            id="the pieces' lengths are summed",
        ),
        pytest.param(
            Origin("http", "::1", 80, "/engines/a"),
            UpstreamRequest("PUT", "/generate", [(b"x", b"\xc3\xa9\t \xff")], []),
            b"PUT /engines/a/generate HTTP/1.1\r\nhost: [::1]\r\nx: \xc3\xa9\t \xff\r\ncontent-length: 0\r\n\r\n",
            id="IPv6, prefix, bytes beyond ASCII",
        ),
    ],
)
def test_heads(origin: Origin, request_: UpstreamRequest, head: bytes) -> None:
    assert request_head(origin, request_) == head


@pytest.mark.parametrize(
    "bad", [b"\r", b"\n", b"\r\n", b"\r\nx-evil: 1", b"\n\n", b"\0", b"\r\n\r\nGET / HTTP/1.1\r\n"]
)
@pytest.mark.parametrize("place", ["name", "value", "before", "after"])
def test_no_header_ends_its_line(bad: bytes, place: str) -> None:
    header = {
        "name": (b"a" + bad, b"v"),
        "value": (b"a", bad),
        "before": (b"a", bad + b"v"),
        "after": (b"a", b"v" + bad),
    }[place]
    with pytest.raises(RequestUnsendable, match="line break or NUL"):
        request_head(ORIGIN, UpstreamRequest("POST", "/x", [(b"fine", b"1"), header], [b"{}"]))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        pytest.param("GET", "/a b", id="space in the path"),
        pytest.param("GET", "/a\r\nx: 1", id="line break in the path"),
        pytest.param("GET", "/é", id="not ASCII"),
        pytest.param("GET ", "/a", id="space in the method"),
        pytest.param("GET", "/a\x7f", id="control character"),
    ],
)
def test_request_lines_have_three_parts(method: str, path: str) -> None:
    with pytest.raises(RequestUnsendable, match="request line"):
        request_head(ORIGIN, UpstreamRequest(method, path, [], []))


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=4), st.binary(max_size=6)), max_size=3))
@example([(b"a\n", b""), (b"b", b"\r")])
def test_a_head_has_as_many_lines_as_it_should_or_is_refused(headers: Headers) -> None:
    request = UpstreamRequest("GET", "/x", headers, [])
    if any(set(name + value) & {0, 10, 13} for name, value in headers):
        with pytest.raises(RequestUnsendable):
            request_head(ORIGIN, request)
    else:
        lines = request_head(ORIGIN, request).split(b"\r\n")
        assert lines[2:-2] == [b"%b: %b" % header for header in headers]

"""Origins: URLs taken apart, and the ``Host`` that comes of them."""

import pytest

from backends.upstream.base import Origin


@pytest.mark.parametrize(
    ("url", "origin", "authority"),
    [
        pytest.param("http://h:30000", Origin("http", "h", 30000), "h:30000", id="port"),
        pytest.param("http://h", Origin("http", "h", 80), "h", id="default port"),
        pytest.param("http://h:80/", Origin("http", "h", 80), "h", id="default port given"),
        pytest.param("https://h", Origin("https", "h", 443), "h", id="https"),
        pytest.param("https://h:80", Origin("https", "h", 80), "h:80", id="other scheme's port"),
        pytest.param("http://[::1]:5", Origin("http", "::1", 5), "[::1]:5", id="IPv6"),
        pytest.param("http://[::1]", Origin("http", "::1", 80), "[::1]", id="IPv6 without port"),
        pytest.param("http://h:5/a/b/", Origin("http", "h", 5, "/a/b"), "h:5", id="path prefix"),
        pytest.param("http://u:p@h:5", Origin("http", "h", 5), "h:5", id="userinfo does not show"),
    ],
)
def test_urls_are_taken_apart(url: str, origin: Origin, authority: str) -> None:
    assert Origin.from_url(url) == origin
    assert origin.authority == authority


@pytest.mark.parametrize("url", ["ftp://h", "h:5", "http://", "http://:5", "http://h:65536", "", "unix:/x"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 -- the messages are urllib's as well as ours
        Origin.from_url(url)

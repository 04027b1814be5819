"""Keys and networks: who may do what."""

from ipaddress import ip_network

import pytest

from gateway.auth import Keys, bearer_of


def bearer(value: str) -> dict[bytes, bytes]:
    """Headers with a credential."""
    return {b"authorization": value.encode()}


@pytest.mark.parametrize(
    ("value", "token"),
    [
        pytest.param("Bearer key", b"key", id="plain"),
        pytest.param("bearer key", b"key", id="scheme in any case"),
        pytest.param("Bearer   key ", b"key", id="white space"),
        pytest.param("Bearer a b", b"a b", id="space inside"),
        pytest.param("Bearer None", None, id="the word None"),
        pytest.param("Bearer none", b"none", id="but not in lower case"),
        pytest.param("Bearer", None, id="no token"),
        pytest.param("Bearer ", None, id="empty token"),
        pytest.param("Basic key", None, id="other scheme"),
        pytest.param("key", None, id="no scheme"),
        pytest.param("", None, id="nothing"),
        pytest.param("Bearer é", "é".encode(), id="not ASCII"),
    ],
)
def test_bearer_tokens(value: str, token: bytes | None) -> None:
    assert bearer_of(bearer(value)) == token


def test_no_header_no_token() -> None:
    assert bearer_of({}) is None


@pytest.mark.parametrize(
    ("client_keys", "admin_keys", "value", "may"),
    [
        pytest.param([], [], "", True, id="open"),
        pytest.param([], ["a"], "", True, id="open beside an admin key"),
        pytest.param([], [], "Bearer whatever", True, id="open with a token"),
        pytest.param(["k"], [], "", False, id="needs one"),
        pytest.param(["k"], [], "Bearer k", True, id="right"),
        pytest.param(["k"], [], "Bearer K", False, id="wrong"),
        pytest.param(["k"], [], "Bearer None", False, id="None"),
        pytest.param(["None"], [], "Bearer None", False, id="None is no key even if configured"),
        pytest.param(["k", "é"], [], "Bearer é", True, id="second of two"),
        pytest.param(["k"], ["a"], "Bearer a", True, id="the admin key opens it too"),
    ],
)
def test_client_routes(client_keys: list[str], admin_keys: list[str], value: str, may: bool) -> None:
    assert Keys(client_keys, admin_keys).may_use(bearer(value)) is may


@pytest.mark.parametrize(
    ("headers", "may"),
    [
        pytest.param({b"x-api-key": b"k"}, True, id="right"),
        pytest.param({b"x-api-key": b"a"}, True, id="the admin key opens it too"),
        pytest.param({b"x-api-key": b"wrong"}, False, id="wrong"),
        pytest.param({b"x-api-key": b"Bearer k"}, False, id="no scheme in this one"),
        pytest.param({b"x-api-key": b""}, False, id="empty"),
        pytest.param({b"x-api-key": b"None"}, False, id="the word None"),
        pytest.param({b"x-api-key": b"k", b"authorization": b"Bearer None"}, True, id="beside no bearer token"),
        pytest.param({b"x-api-key": b"wrong", b"authorization": b"Bearer k"}, True, id="beside the right token"),
        pytest.param({b"x-api-key": b"wrong", b"authorization": b"Bearer wrong"}, False, id="both wrong"),
    ],
)
def test_client_routes_take_the_key_in_a_header_of_its_own(headers: dict[bytes, bytes], may: bool) -> None:
    assert Keys(["k", "None"], ["a"]).may_use(headers) is may
    assert Keys().may_use(headers)


def test_the_admin_routes_take_a_bearer_token_only() -> None:
    assert not Keys(["k"], ["a"]).may_administer({b"x-api-key": b"a"}, "127.0.0.1")


@pytest.mark.parametrize(
    ("host", "may"),
    [
        pytest.param("127.0.0.1", True, id="loopback"),
        pytest.param("127.9.9.9", True, id="all of loopback"),
        pytest.param("::1", True, id="IPv6 loopback"),
        pytest.param("::ffff:127.0.0.1", True, id="mapped"),
        pytest.param("::ffff:8.8.8.8", False, id="mapped, outside"),
        pytest.param("fe80::1%eth0", True, id="zone"),
        pytest.param("10.0.0.1", False, id="outside"),
        pytest.param("2001:db8::1", False, id="IPv6 outside"),
        pytest.param(None, False, id="no address"),
        pytest.param("", False, id="empty"),
        pytest.param("localhost", False, id="a name"),
    ],
)
def test_admin_routes_without_a_key_are_for_places(host: str | None, may: bool) -> None:
    networks = [ip_network("127.0.0.0/8"), ip_network("::1/128"), ip_network("fe80::/10")]
    keys = Keys(["k"], [], networks)
    assert not keys.has_admin_keys
    assert keys.may_administer(bearer("Bearer wrong"), host) is may


@pytest.mark.parametrize(
    ("value", "may"),
    [("Bearer a", True), ("Bearer b", True), ("Bearer k", False), ("", False), ("Bearer None", False)],
)
def test_admin_routes_with_keys_are_for_keys(value: str, may: bool) -> None:
    keys = Keys(["k"], ["a", "b"], [ip_network("0.0.0.0/0")])
    assert keys.has_admin_keys
    assert keys.may_administer(bearer(value), "127.0.0.1") is may

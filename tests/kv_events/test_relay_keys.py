"""Key files, and addresses that need no keys."""

import stat
from pathlib import Path

import pytest

from kv_events.errors import KeyFileRefused, SourceMisconfigured
from kv_events.relay_keys import (
    generate_keys,
    is_local_endpoint,
    read_authorized_keys,
    read_key_pair,
    seen_from,
    write_key_file,
)

KEYS = generate_keys()
PUBLIC, SECRET = KEYS.public_key.decode(), KEYS.secret_key.decode()


def test_what_is_written_can_be_read_by_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "relay.key"
    keys = write_key_file(path)
    assert read_key_pair(path) == keys
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys.secret_key.decode() not in repr(keys)
    with pytest.raises(KeyFileRefused, match="exists"):
        write_key_file(path)
    assert read_key_pair(path) == keys


def test_gateways_can_be_pinned(tmp_path: Path) -> None:
    path = tmp_path / "relay.key"
    other = generate_keys().public_key
    write_key_file(path)
    path.write_text(path.read_text() + f"gateway-key = {other.decode()}\n")
    assert read_key_pair(path).gateway_keys == {other}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "must have one public-key", id="empty"),
        pytest.param(f"public-key = {PUBLIC}", "must have one public-key", id="no secret"),
        pytest.param(f"public-key = {SECRET}\nsecret-key = {SECRET}", "are no pair", id="no pair"),
        pytest.param("public-key = abc", ":1: no key of 40", id="short"),
        pytest.param(f"\n# x\npubic-key = {PUBLIC}", ":3: write public-key", id="misspelt"),
        pytest.param("public-key = " + "ä" * 40, ":1: no key of 40", id="not ascii"),
        pytest.param("public-key = " + "~" * 40, ":1: no key of 40", id="not z85"),
    ],
)
def test_a_file_without_a_pair_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "relay.key"
    path.write_text(text)
    with pytest.raises(KeyFileRefused, match=message) as refused:
        read_key_pair(path)
    assert SECRET not in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for read in (read_key_pair, read_authorized_keys):
        with pytest.raises(KeyFileRefused, match="cannot be read"):
            read(tmp_path / "none")
    with pytest.raises(KeyFileRefused, match="cannot be written"):
        write_key_file(tmp_path / "none" / "key")


def test_authorized_keys_have_names(tmp_path: Path) -> None:
    path = tmp_path / "relays"
    others = [generate_keys().public_key for _ in range(2)]
    path.write_text(f"# relays\n\n{others[0].decode()}  node 1 \n{others[1].decode()}\n")
    assert read_authorized_keys(path) == {others[0]: "node 1", others[1]: ""}
    path.write_text("# none\n")
    with pytest.raises(KeyFileRefused, match="holds no key"):
        read_authorized_keys(path)


@pytest.mark.parametrize(
    ("endpoint", "is_local"),
    [
        ("tcp://127.0.0.1:5600", True),
        ("tcp://127.1.2.3:0", True),
        ("tcp://localhost:*", True),
        ("tcp://[::1]:5600", True),
        ("tcp://[::ffff:127.0.0.1]:5600", True),
        ("ipc:///run/forebay", True),
        ("ipc://@forebay", True),
        ("tcp://*:5600", False),
        ("tcp://0.0.0.0:5600", False),
        ("tcp://[::]:5600", False),
        ("tcp://10.0.0.1:5600", False),
        ("tcp://127.0.0.1.example.org:5600", False),
    ],
)
def test_what_can_be_reached_from_elsewhere_is_told(endpoint: str, is_local: bool) -> None:
    assert is_local_endpoint(endpoint) is is_local


@pytest.mark.parametrize(
    "endpoint", ["", "5600", "tcp://h", "tcp://h:70000", "tcp://u@h:1", "ipc://rel", "ipc:///a\0b", "http://h:1"]
)
def test_what_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(SourceMisconfigured):
        is_local_endpoint(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "seen"),
    [
        ("tcp://*:1", "tcp://gw:1"),
        ("tcp://0.0.0.0:1", "tcp://gw:1"),
        ("tcp://[::]:1", "tcp://gw:1"),
        ("tcp://10.0.0.1:1", "tcp://10.0.0.1:1"),
        ("tcp://[::ffff:10.0.0.1]:1", "tcp://10.0.0.1:1"),
        ("tcp://[fd00::1]:1", "tcp://[fd00::1]:1"),
        ("ipc:///run/x", "ipc:///run/x"),
    ],
)
def test_a_wildcard_is_the_gateways_host(endpoint: str, seen: str) -> None:
    assert seen_from(endpoint, "gw") == seen

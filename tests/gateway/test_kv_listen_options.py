"""The options of the listener for relays: what does not fit together is told before anything runs."""

from pathlib import Path
from typing import Any

import pytest

from gateway.kv_listen_options import read_listen_options
from gateway.settings import Settings, SettingsError
from kv_events.relay_keys import generate_keys, write_key_file


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    write_key_file(tmp_path / "key")
    (tmp_path / "relays").write_bytes(generate_keys().public_key + b" node 1\n")
    (tmp_path / "empty").write_text("")
    return {name: tmp_path / name for name in ("key", "relays", "empty", "none")}


def settings(files: dict[str, Path], **options: str) -> Settings:
    values: dict[str, Any] = {name: value if name == "kv_listen" else files[value] for name, value in options.items()}
    return Settings(**values)


def test_without_a_listener_there_is_nothing(files: dict[str, Path]) -> None:
    assert read_listen_options(settings(files)) is None


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5600", "tcp://localhost:0", "tcp://[::1]:5600", "ipc:///run/x"])
def test_inside_the_machine_no_keys_are_needed(files: dict[str, Path], endpoint: str) -> None:
    found = read_listen_options(settings(files, kv_listen=endpoint))
    assert found is not None
    assert (found.endpoint, found.keys, found.authorized) == (endpoint, None, {})


def test_with_keys_any_address_will_do(files: dict[str, Path]) -> None:
    found = read_listen_options(
        settings(files, kv_listen="tcp://*:5600", kv_key_file="key", kv_authorized_keys="relays")
    )
    assert found is not None
    assert found.keys is not None
    assert list(found.authorized.values()) == ["node 1"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        pytest.param({"kv_key_file": "key"}, "--kv-key-file: nothing listens", id="key without listener"),
        pytest.param({"kv_authorized_keys": "relays"}, "--kv-authorized-keys: nothing listens", id="relays alone"),
        pytest.param({"kv_listen": "tcp://0.0.0.0:1"}, "--kv-listen: .* --kv-key-file", id="plain for everybody"),
        pytest.param({"kv_listen": "tcp://10.0.0.1:1"}, "--kv-listen: .* 127.0.0.1", id="plain on a network"),
        pytest.param({"kv_listen": "5600"}, "--kv-listen: .* tcp://HOST:PORT", id="no address"),
        pytest.param(
            {"kv_listen": "tcp://*:1", "kv_key_file": "key"}, "give --kv-authorized-keys too", id="nobody is let in"
        ),
        pytest.param(
            {"kv_listen": "tcp://*:1", "kv_authorized_keys": "relays"}, "give --kv-key-file too", id="no own key"
        ),
        pytest.param(
            {"kv_listen": "tcp://*:1", "kv_key_file": "none", "kv_authorized_keys": "relays"},
            "--kv-key-file: .*cannot be read",
            id="no key file",
        ),
        pytest.param(
            {"kv_listen": "tcp://*:1", "kv_key_file": "key", "kv_authorized_keys": "empty"},
            "--kv-authorized-keys: .*holds no key",
            id="no relay's key",
        ),
    ],
)
def test_what_does_not_fit_is_refused(files: dict[str, Path], options: dict[str, str], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        read_listen_options(settings(files, **options))

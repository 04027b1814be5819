"""What is told before the port is taken: files of credentials, addresses that cannot be had, doubtful workers."""

import errno
import socket
from pathlib import Path

import pytest

from backends.worker_spec import WorkerSpec, parse_worker_spec
from gateway.server import bind
from gateway.settings import Settings, SettingsError
from gateway.start_checks import check_files, check_tls, doubtful, why_not_listening

TLS = Path(__file__).parents[1] / "data" / "tls"
CERT, KEY = TLS / "localhost.crt", TLS / "localhost.key"


def test_a_certificate_and_its_key_are_taken(tmp_path: Path) -> None:
    check_tls(CERT, KEY)
    both = tmp_path / "both.pem"
    both.write_bytes(CERT.read_bytes() + KEY.read_bytes())
    check_tls(both, None)
    check_tls(None, None)


@pytest.mark.parametrize(
    ("cert", "key", "parts"),
    [
        pytest.param(None, KEY, ["--tls-key-file: ", "give --tls-cert-file"], id="a key alone"),
        pytest.param(CERT, None, ["--tls-cert-file: ", "localhost.crt", "give that with --tls-key-file"], id="no key"),
        pytest.param(Path("/no.crt"), KEY, ["--tls-cert-file: /no.crt", "No such file"], id="no certificate file"),
        pytest.param(CERT, Path("/no.key"), ["--tls-key-file: /no.key", "No such file"], id="no key file"),
        pytest.param(CERT, TLS, ["--tls-key-file: ", "directory"], id="a directory"),
        pytest.param(CERT, TLS / "other.key", ["--tls-key-file: ", "not the key of", "localhost.crt"], id="other key"),
        pytest.param(KEY, CERT, ["--tls-cert-file: ", "PEM certificate"], id="the wrong way round"),
        pytest.param(TLS / "README.md", KEY, ["--tls-cert-file: ", "README.md"], id="no PEM"),
        pytest.param(CERT, TLS / "passphrase.key", ["--tls-key-file: ", "passphrase"], id="a key with a passphrase"),
    ],
)
def test_files_that_cannot_serve_tls(cert: Path | None, key: Path | None, parts: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        check_tls(cert, key)
    message = str(caught.value)
    assert [part for part in parts if part not in message] == []
    assert "\n" not in message


@pytest.mark.parametrize("field", ["api_key_file", "admin_api_key_file"])
def test_key_files_are_named_with_their_option(field: str, tmp_path: Path) -> None:
    flag = "--" + field.replace("_", "-")
    for path in (tmp_path / "missing", tmp_path):
        settings = Settings.model_validate({field: path})
        with pytest.raises(SettingsError, match=f"^{flag}: key file {path}: cannot be read"):
            check_files(settings)
    (tmp_path / "keys").write_text("key\n")
    check_files(Settings.model_validate({field: tmp_path / "keys"}))


def test_a_workers_missing_variable_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(SettingsError, match="http://h:1: api_key_env: environment variable SOME_KEY is not set"):
        check_files(Settings(workers=(WorkerSpec("http://h:1", api_key_env="SOME_KEY"),)))


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use") as caught:
            bind("127.0.0.1", port)
    message = why_not_listening("127.0.0.1", port, caught.value)
    assert message.startswith(f"cannot listen on 127.0.0.1:{port}: ")
    assert "choose another --port" in message


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        pytest.param(OSError(errno.EACCES, "Permission denied"), ["Permission denied", "--port from 1024"], id="low"),
        pytest.param(OSError(errno.EADDRNOTAVAIL, "No"), ["--host is no address of this machine"], id="not ours"),
        pytest.param(socket.gaierror(-2, "Name unknown"), ["Name unknown", "--host is a name"], id="no such name"),
        pytest.param(OSError(errno.EIO, "Odd"), ["Odd", "--host and --port"], id="anything else"),
    ],
)
def test_addresses_that_cannot_be_had(error: OSError, parts: list[str]) -> None:
    message = why_not_listening("::1", 80, error)
    assert [part for part in ["[::1]:80", *parts] if part not in message] == []


@pytest.mark.parametrize(
    ("urls", "twice"),
    [
        pytest.param(["http://localhost:1", "http://127.0.0.1:1"], [2], id="name and address"),
        pytest.param(["http://[::1]:1", "http://127.0.0.2:1", "http://localhost:1"], [3], id="three of one"),
        pytest.param(["http://a.localhost:1", "http://127.0.0.1:1"], [2], id="a name below localhost"),
        pytest.param(["https://localhost", "https://127.0.0.1"], [2], id="the scheme's own port"),
        pytest.param(["http://localhost:1", "http://127.0.0.1:2"], [], id="other ports"),
        pytest.param(["http://localhost:1/a", "http://127.0.0.1:1/b"], [], id="other prefixes"),
        pytest.param(["http://10.0.0.1:1", "http://10.0.0.2:1", "http://localhost:1"], [], id="other machines"),
    ],
)
def test_one_engine_under_several_names(urls: list[str], twice: list[int]) -> None:
    warnings = doubtful([parse_worker_spec(url) for url in urls])
    assert [f"{count} names" in warning for count, warning in zip(twice, warnings, strict=True)] == [True] * len(twice)
    assert all(url in warning for warning in warnings for url in urls)


def test_no_workers() -> None:
    (warning,) = doubtful([])
    assert "--worker URL" in warning

"""Arguments of ``forebay relay``: every mistake names the option and what to do, before anything is connected."""

from pathlib import Path

import pytest

from kv_events.relay_keys import write_key_file
from relay.errors import SettingsRefused
from relay.settings import build_parser, load_settings

LEAST = ["--engine", "http://127.0.0.1:30000", "--gateway", "http://10.0.0.1:8000"]


def test_the_least_that_is_needed() -> None:
    found = load_settings(LEAST, {})
    assert (found.engine_url, found.engine_target) == ("http://127.0.0.1:30000", "")
    assert found.gateways == ("http://10.0.0.1:8000",)
    assert (found.worker_url, found.registers, found.keys, found.health_port) == (None, False, None, None)
    assert (found.startup_deadline_s, found.overall_deadline_s, found.failure_limit_s) == (1800.0, None, 60.0)


def test_all_of_it(tmp_path: Path) -> None:
    pair = write_key_file(tmp_path / "pair")
    key = tmp_path / "key"
    key.write_text("# comment\n\nsecret\n", "utf-8")
    argv = [*LEAST, "--gateway", "HTTP://10.0.0.2:8000/", "--worker-url", "http://10.0.0.3:30000/", "--register"]
    argv += ["--admin-api-key-file", str(key), "--engine-api-key-file", str(key), "--key-file", str(tmp_path / "pair")]
    argv += ["--health-host", "0.0.0.0", "--health-port", "0", "--startup-deadline-s", "10"]
    argv += ["--overall-deadline-s", "20", "--relay-failure-limit-s", "5", "--log-format", "json"]
    found = load_settings(argv, {})
    assert found.gateways == ("http://10.0.0.1:8000", "http://10.0.0.2:8000")
    assert (found.worker_url, found.registers) == ("http://10.0.0.3:30000", True)
    assert (found.admin_key, found.engine_key, found.keys) == ("secret", "secret", pair)
    assert (found.health_host, found.health_port) == ("0.0.0.0", 0)
    assert (found.startup_deadline_s, found.overall_deadline_s, found.failure_limit_s) == (10.0, 20.0, 5.0)
    assert "secret" not in repr(found)
    assert pair.secret_key.decode() not in repr(found)


def test_a_followers_grpc_address() -> None:
    found = load_settings(["--engine", "grpc://127.0.0.1:30001", *LEAST[2:]], {})
    assert (found.engine_url, found.engine_target) == ("", "127.0.0.1:30001")


def test_the_environment_comes_under_the_command_line() -> None:
    environ = {
        "FOREBAY_RELAY_ENGINE": "http://h:1",
        "FOREBAY_RELAY_GATEWAY": "http://a:1 http://b:1",
        "FOREBAY_RELAY_REGISTER": "true",
        "FOREBAY_RELAY_HEALTH_PORT": "",
        "FOREBAY_PORT": "8000",
    }
    found = load_settings(["--engine", "http://127.0.0.1:2"], environ)
    assert found.engine_url == "http://127.0.0.1:2"
    assert found.gateways == ("http://a:1", "http://b:1")
    assert found.registers
    assert found.health_port is None


def test_making_keys_needs_nothing_else() -> None:
    assert load_settings(["--keygen", "f"], {}).keygen == Path("f")


def test_a1_8_help_tells_of_every_option_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_settings(["--help"], {})
    assert caught.value.code == 0
    page = capsys.readouterr().out
    flags = [action.option_strings[-1] for action in build_parser()._actions]
    assert [flag for flag in flags if flag not in page] == []
    assert "Exit codes: 0 stopped" in " ".join(page.split())
    assert "FOREBAY_RELAY_HEALTH_PORT" in page


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        pytest.param([], "--engine: missing", id="nothing"),
        pytest.param(LEAST[:2], "--gateway: missing", id="no gateway"),
        pytest.param([*LEAST[:1], "127.0.0.1:30000", *LEAST[2:]], "--engine: '127.0.0.1:30000': url", id="no scheme"),
        pytest.param([*LEAST[:1], "tcp://h:1", *LEAST[2:]], "or grpc://HOST:PORT for a follower", id="engine's scheme"),
        pytest.param(
            [*LEAST[:1], "grpc://h", *LEAST[2:]], "or grpc://HOST:PORT for a follower", id="gRPC without a port"
        ),
        pytest.param([*LEAST[:1], "http://u:pw@h:1", *LEAST[2:]], "'http://***@h:1': url holds", id="password"),
        pytest.param([*LEAST, "--gateway", "ftp://x:1"], "--gateway: 'ftp://x:1': url", id="gateway's scheme"),
        pytest.param(
            [*LEAST, "--gateway", "http://10.0.0.1:8000/"], "--gateway: http://10.0.0.1:8000 is given", id="twice"
        ),
        pytest.param([*LEAST, "--worker-url", ""], "--worker-url: is empty", id="empty"),
        pytest.param([*LEAST, "--worker-url", "x"], "--worker-url", id="worker's address"),
        pytest.param(
            [*LEAST[:1], "grpc://h:1", *LEAST[2:], "--register"], "--register: is for the leader", id="register"
        ),
        pytest.param(
            [*LEAST[:1], "grpc://h:1", *LEAST[2:], "--worker-url", "http://h:1"],
            "--worker-url: is for",
            id="worker url",
        ),
        pytest.param([*LEAST, "--health-port", "65536"], "--health-port: '65536' is no port", id="port too high"),
        pytest.param([*LEAST, "--health-port", "-1"], "--health-port: '-1'", id="port below 0"),
        pytest.param([*LEAST, "--startup-deadline-s", "0"], "--startup-deadline-s: '0' is out", id="no time"),
        pytest.param([*LEAST, "--overall-deadline-s", "nan"], "--overall-deadline-s: 'nan'", id="not a number"),
        pytest.param([*LEAST, "--relay-failure-limit-s", "soon"], "--relay-failure-limit-s: 'soon'", id="words"),
        pytest.param(
            [*LEAST, "--admin-api-key-file", "/no/k"], "--admin-api-key-file: /no/k cannot be read", id="no key"
        ),
        pytest.param([*LEAST, "--key-file", "/no/k"], "--key-file: /no/k", id="no key pair"),
        pytest.param([*LEAST, "--log-format", "xml"], "--log-format: 'xml'", id="log format"),
        pytest.param([*LEAST, "--gatway", "x"], "--gatway: unknown option; did you mean --gateway?", id="near one"),
        pytest.param([*LEAST, "--xyzzy"], "--xyzzy: unknown option; see forebay relay --help", id="far one"),
        pytest.param([*LEAST, "stray"], "stray: unexpected argument", id="stray"),
        pytest.param([*LEAST, "--register=yes"], "--register", id="switch with a value"),
        pytest.param(["--engine"], "--engine: expected one argument", id="no value"),
    ],
)
def test_a1_8_mistakes_are_told_by_option(argv: list[str], names: str) -> None:
    with pytest.raises(SettingsRefused) as caught:
        load_settings(argv, {})
    assert names in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"FOREBAY_RELAY_GATWAY": "x"}, "FOREBAY_RELAY_GATWAY: unknown environment variable; did you mean"),
        ({"FOREBAY_RELAY_REGISTER": "yes"}, "--register: 'yes' is neither true nor false"),
    ],
)
def test_a1_8_mistakes_in_the_environment_are_told(environ: dict[str, str], names: str) -> None:
    with pytest.raises(SettingsRefused) as caught:
        load_settings(LEAST, environ)
    assert names in str(caught.value)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "two words\n", "schlüssel\n"])
def test_a_key_file_without_a_key_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text, "utf-8")
    with pytest.raises(SettingsRefused, match=r"--engine-api-key-file: .* must have a key"):
        load_settings([*LEAST, "--engine-api-key-file", str(path)], {})

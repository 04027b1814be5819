"""Settings: precedence of the sources, refusals that name option, source and remedy, key files."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import ValidationError

from backends.worker_spec import WorkerSpec
from gateway.key_files import read_key_file, resolve_worker_keys
from gateway.settings import (
    NOT_YET,
    TUNED,
    Settings,
    SettingsError,
    build_parser,
    describe,
    describe_changed,
    load_settings,
    options,
    read_config_workers,
)

# Every option of the public interface.
CONTRACT = [
    "config",
    "host",
    "port",
    "worker",
    "policy",
    "upstream-mode",
    "api-key-file",
    "admin-api-key-file",
    "max-body-bytes",
    "max-response-bytes",
    "drain-timeout-s",
    "log-format",
    "processes",
    "max-attempts",
    "request-timeout-s",
    "first-token-timeout-s",
    "stall-timeout-s",
    "client-timeout-s",
    "upstream-client",
    "native-n",
    "connect-timeout-s",
    "prefill-header-timeout-s",
    "handoff-drain-timeout-s",
    "handoff-max-age-s",
    "prefill-hold-timeout-s",
    "prefill-overlap",
    "tokenizer",
    "kv-listen",
    "kv-key-file",
    "kv-authorized-keys",
    "admin-allow",
    "sse-keepalive-s",
    "sse-done-after-error",
    "queue-max-requests",
    "queue-max-age-s",
    "max-in-flight-per-worker",
    "pause-hold-s",
    "tls-cert-file",
    "tls-key-file",
]


def write(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path


def refusal(argv: list[str], environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(argv, environ or {})
    return str(caught.value)


def test_defaults_are_those_of_the_interface() -> None:
    settings = load_settings([], {})
    assert settings == Settings()
    assert (settings.host, settings.port, settings.workers, settings.policy) == ("127.0.0.1", 8000, (), None)
    assert settings.max_body_bytes == settings.max_response_bytes == 64 * 1024 * 1024
    assert (settings.drain_timeout_s, settings.connect_timeout_s, settings.pause_hold_s) == (30, 5, 300)
    assert (settings.handoff_max_age_s, settings.queue_max_requests, settings.max_attempts) == (20, 2048, 3)
    assert (settings.prefill_header_timeout_s, settings.prefill_hold_timeout_s) == (30, 30)
    assert (settings.prefill_overlap, settings.short_prompt_tokens) == ("headers", 0)
    assert settings.request_timeout_s is settings.first_token_timeout_s is settings.stall_timeout_s is None
    assert settings.sse_done_after_error
    assert settings.admin_allow == ("127.0.0.0/8", "::1/128")


def test_the_hold_may_be_unlimited() -> None:
    assert load_settings(["--prefill-hold-timeout-s", "0"], {}).prefill_hold_timeout_s == 0
    for option in ("prefill-header-timeout-s", "handoff-max-age-s", "handoff-drain-timeout-s"):
        assert "above 0" in refusal([f"--{option}", "0"])


@pytest.mark.parametrize("text", ["0", "0.5", "86400"])
def test_the_client_may_get_any_time(text: str) -> None:
    assert Settings().client_timeout_s == 60
    assert load_settings([], {"FOREBAY_CLIENT_TIMEOUT_S": text}).client_timeout_s == float(text)
    assert "client-timeout-s" in refusal(["--client-timeout-s", "-1"])


def test_settings_are_immutable() -> None:
    with pytest.raises(ValidationError):
        Settings().port = 1  # type: ignore[misc]


def test_every_option_has_its_three_names_and_a_text() -> None:
    by_flag = {option.flag: option for option in options()}
    assert {f"--{name}" for name in CONTRACT} <= set(by_flag)
    assert by_flag["--max-body-bytes"].env == "FOREBAY_MAX_BODY_BYTES"
    assert by_flag["--worker"].field == "workers"
    assert all(option.description for option in options())
    assert all(option.unit == "s" for option in options() if option.field.endswith("_s"))
    assert all(option.unit == "bytes" for option in options() if option.field.endswith("_bytes"))


def test_defaults_are_shown_as_an_operator_would_write_them() -> None:
    shown = {option.field: option.default for option in options()}
    expected = {"processes": "1", "sse_keepalive_s": "0", "native_n": "false", "sse_done_after_error": "true"}
    assert {name: shown[name] for name in expected} == expected
    assert (shown["stall_timeout_s"], shown["abort_delay_s"], shown["api_key_file"]) == ("off", "0.02", "none")


def test_help_names_unit_default_and_environment() -> None:
    text = " ".join(build_parser().format_help().split())
    assert "running requests get after SIGTERM (s; at least 0, at most 86400; default: 30; environment:" in text
    assert all(option.env in text for option in options())


def test_command_line_over_environment_over_file_over_default(tmp_path: Path) -> None:
    path = write(tmp_path / "f.toml", "[server]\nport = 1\nhost = '127.0.0.2'\nmax-attempts = 5\n")
    environ = {"FOREBAY_CONFIG": str(path), "FOREBAY_PORT": "2", "FOREBAY_HOST": "127.0.0.3"}
    settings = load_settings(["--port", "3"], environ)
    assert (settings.port, settings.host, settings.max_attempts) == (3, "127.0.0.3", 5)
    assert settings.config == path


# The profile.

COST = {name: Settings.model_fields[name].default for name in TUNED}


def cost(settings: Settings) -> dict[str, object]:
    """The options that a profile is about."""
    return {name: getattr(settings, name) for name in TUNED}


@pytest.mark.parametrize("argv", [[], ["--kv-profile", "plain"]])
def test_the_plain_profile_is_the_default(argv: list[str]) -> None:
    settings = load_settings(argv, {})
    assert settings.kv_profile == "plain"
    assert cost(settings) == COST
    assert settings == Settings()


def test_the_tuned_profile_differs_in_what_it_names_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "f.toml", "[server]\nkv-profile = 'tuned'")
    for settings in (
        load_settings(["--kv-profile", "tuned"], {}),
        load_settings([], {"FOREBAY_KV_PROFILE": "tuned"}),
        load_settings(["--config", str(path)], {}),
        Settings(kv_profile="tuned"),
    ):
        assert cost(settings) == TUNED
        plain = settings.model_dump(exclude={"kv_profile", "config", *TUNED})
        assert plain == Settings().model_dump(exclude={"kv_profile", "config", *TUNED})
    assert all(COST[name] != value for name, value in TUNED.items())


def test_every_value_of_the_tuned_profile_could_be_given() -> None:
    argv = [text for name, value in TUNED.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    assert cost(load_settings(argv, {})) == TUNED


@pytest.mark.parametrize("profile_from", ["file", "environment", "command line"])
@pytest.mark.parametrize("given_by", ["file", "environment", "command line"])
@pytest.mark.parametrize("name", TUNED)
def test_an_option_that_is_given_wins_over_the_profile(
    tmp_path: Path, name: str, given_by: str, profile_from: str
) -> None:
    argv: list[str] = []
    environ: dict[str, str] = {}
    lines = ["[server]"]
    for source, key, value in ((profile_from, "kv_profile", "tuned"), (given_by, name, COST[name])):
        if source == "file":
            lines.append(f"{key} = {value!r}")
        elif source == "environment":
            environ[f"FOREBAY_{key.upper()}"] = str(value)
        else:
            argv += [f"--{key.replace('_', '-')}", str(value)]
    path = write(tmp_path / "f.toml", "\n".join(lines))
    settings = load_settings(["--config", str(path), *argv], environ)
    assert settings.kv_profile == "tuned"
    assert cost(settings) == {**TUNED, name: COST[name]}


def test_the_last_word_on_the_profile_counts() -> None:
    settings = load_settings(["--kv-profile", "plain"], {"FOREBAY_KV_PROFILE": "tuned", "FOREBAY_KV_GUARD": "shared"})
    assert cost(settings) == {**COST, "kv_guard": "shared"}


PROFILE_REFUSALS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "no profile": (["--kv-profile", "best"], ("--kv-profile (command line): 'best'", "plain")),
    "beside the profile": (["--kv-profile", "tuned", "--kv-max-wait-ratio", "-1"], ("--kv-max-wait-ratio", "'-1'")),
    "no ratio": (["--kv-max-wait-ratio", "nan"], ("--kv-max-wait-ratio", "'nan'")),
    "no tokens": (["--kv-coalesce-tokens", "-1"], ("--kv-coalesce-tokens", "'-1'")),
    "parts of tokens": (["--kv-coalesce-tokens", "0.5"], ("--kv-coalesce-tokens", "'0.5'")),
}


@pytest.mark.parametrize("case", PROFILE_REFUSALS)
def test_refusals_beside_a_profile(case: str) -> None:
    argv, parts = PROFILE_REFUSALS[case]
    text = refusal(argv)
    assert all(part in text for part in parts), text


def test_the_file_named_on_the_command_line_wins(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", "[server]\nport = 1"), write(tmp_path / "b", "[server]\nport = 2")
    assert load_settings(["--config", str(second)], {"FOREBAY_CONFIG": str(first)}).port == 2


def test_workers_come_from_every_source(tmp_path: Path) -> None:
    path = write(
        tmp_path / "f.toml",
        '[server]\nworker = ["http://a:1"]\n[[workers]]\nurl = "http://b:2"\nrole = "prefill"\nbootstrap_port = 8998\n',
    )
    from_file = (WorkerSpec("http://a:1"), WorkerSpec("http://b:2", role="prefill", bootstrap_port=8998))
    assert load_settings(["--config", str(path)], {}).workers == from_file
    assert read_config_workers(path) == from_file
    environ = {"FOREBAY_CONFIG": str(path), "FOREBAY_WORKER": " http://c:3;http://d:4,role=decode\n http://e:5; "}
    assert [spec.url for spec in load_settings([], environ).workers] == ["http://c:3", "http://d:4", "http://e:5"]
    argv = ["--worker", "http://f:6", "--worker=http://g:7,engine=sglang"]
    assert load_settings(argv, environ).workers == (WorkerSpec("http://f:6"), WorkerSpec("http://g:7", "sglang"))


def test_a_file_without_workers_has_none(tmp_path: Path) -> None:
    assert read_config_workers(write(tmp_path / "f.toml", "")) == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("true", True), ("false", False), ("1", True), ("off", False), ("yes", True)],
)
def test_switches(text: str, expected: bool) -> None:
    assert load_settings([f"--sse-done-after-error={text}"], {}).sse_done_after_error is expected
    assert load_settings([], {"FOREBAY_SSE_DONE_AFTER_ERROR": text}).sse_done_after_error is expected
    assert load_settings(["--sse-done-after-error"], {}).sse_done_after_error


@pytest.mark.parametrize("text", ["0", "0.0"])
def test_a_deadline_of_zero_is_off(text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "f.toml", f"[server]\nstall_timeout_s = {text}\n")
    settings = load_settings(["--config", str(path), "--request-timeout-s", text], {})
    assert settings.request_timeout_s is settings.stall_timeout_s is None


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load_settings([], {"FOREBAY_PORT": "", "FOREBAY_WORKER": " ", "FOREBAY_CONFIG": ""}) == Settings()


def test_links_that_an_orchestrator_sets_are_ignored() -> None:
    environ = {
        "FOREBAY_PORT": "tcp://10.0.0.1:8000",
        "FOREBAY_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "FOREBAY_PORT_8000_TCP_ADDR": "10.0.0.1",
        "FOREBAY_SERVICE_HOST": "10.0.0.1",
        "FOREBAY_SERVICE_PORT_HTTP": "8000",
        "FOREBAY_ADMIN_SERVICE_HOST": "10.0.0.2",
        "FOREBAY_ADMIN_PORT": "tcp://10.0.0.2:80",
    }
    assert load_settings([], environ) == Settings()


def test_a_variable_that_holds_a_workers_key_is_known() -> None:
    environ = {"FOREBAY_WORKER": "http://a:1,api_key_env=FOREBAY_A_KEY", "FOREBAY_A_KEY": "k"}
    (spec,) = load_settings([], environ).workers
    assert resolve_worker_keys(spec, environ) == ("k", None)


@pytest.mark.parametrize(
    ("argv", "environ", "parts"),
    [
        pytest.param(["--prot", "1"], {}, ["--prot", "did you mean --port?"], id="unknown option"),
        pytest.param(["--xyzzyxyzzy=1"], {}, ["--xyzzyxyzzy:", "--help"], id="unknown option far off"),
        pytest.param(["--drain", "1"], {}, ["--drain:"], id="no abbreviations"),
        pytest.param(["http://h:1"], {}, ["http://h:1"], id="stray argument"),
        pytest.param(["--port"], {}, ["--port", "expected one argument"], id="no value"),
        pytest.param(["--port", ""], {}, ["--port (command line)", "65535"], id="empty value"),
        pytest.param(["--port", "x"], {}, ["--port (command line)", "'x'", "65535"], id="no number"),
        pytest.param([], {"FOREBAY_PORT": "65536"}, ["FOREBAY_PORT", "at most 65535"], id="out of range"),
        pytest.param([], {"FOREBAY_PROT": "1"}, ["FOREBAY_PROT", "did you mean FOREBAY_PORT?"], id="unknown variable"),
        pytest.param(["--log-format", "xml"], {}, ["text|json"], id="bad choice"),
        pytest.param(["--drain-timeout-s", "nan"], {}, ["finite", "(s)"], id="not a number"),
        pytest.param(["--drain-timeout-s", "-1"], {}, ["at least 0"], id="negative"),
        pytest.param(["--connect-timeout-s", "0"], {}, ["above 0"], id="zero where zero is not off"),
        pytest.param(["--sse-done-after-error", "maybe"], {}, ["true|false"], id="bad switch"),
        pytest.param(["--worker", "http://h:0"], {}, ["--worker (command line)", "port"], id="bad worker"),
        pytest.param([], {"FOREBAY_WORKER": "http://a;b"}, ["FOREBAY_WORKER", "http://"], id="bad worker in variable"),
        pytest.param(["--worker=http://a", "--worker=http://A:80/"], {}, ["given twice"], id="worker given twice"),
        pytest.param(["--admin-allow", "10.0.0.1/8"], {}, ["--admin-allow", "host bits"], id="bad network"),
        pytest.param(["--tokenizer", "m"], {}, ["MODEL=DIR"], id="bad tokenizer"),
        pytest.param(["--config", "/nonexistent/f"], {}, ["--config", "/nonexistent/f"], id="no such file"),
    ],
)
def test_refusals_name_option_source_and_remedy(argv: list[str], environ: dict[str, str], parts: list[str]) -> None:
    message = refusal(argv, environ)
    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        pytest.param("[server]\nprot = 1", ["[server] prot", "did you mean port?"], id="unknown key"),
        pytest.param("[server]\nconfig = 'x'", ["[server] config"], id="file in a file"),
        pytest.param("[serve]\nport = 1", ["'serve'", "did you mean server?"], id="unknown table"),
        pytest.param("port = 1", ["'port'", "[server]"], id="key outside a table"),
        pytest.param("server = 1", ["'server'", "[server]"], id="table of another type"),
        pytest.param("[workers]\nurl = 'http://h'", ["[[workers]]"], id="workers not an array"),
        pytest.param("workers = [1]", ["--worker", "http://"], id="worker of another type"),
        pytest.param("[server]\nworker = 'http://h'", ["list of SPECs"], id="worker not a list"),
        pytest.param("[[workers]]\nurl = 'http://h'\nrolle = 'x'", ["did you mean 'role'?"], id="unknown worker key"),
        pytest.param("[server]\nport = true", ["--port", "True"], id="boolean port"),
        pytest.param("[server]\nport = [1]", ["--port", "[1]"], id="list for one value"),
        pytest.param("[server]\nhost = ''", ["--host", "no value"], id="empty text"),
        pytest.param("[server]\nhost = 1", ["--host", "string"], id="number for text"),
        pytest.param("[server]\nlog-format='text'\nlog_format='text'", ["given twice"], id="two spellings"),
        pytest.param("[server", ["f.toml", "cannot be read"], id="not TOML"),
    ],
)
def test_refusals_of_files(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = write(tmp_path / "f.toml", text)
    message = refusal(["--config", str(path)])
    assert [part for part in [str(path), *parts] if part not in message] == []
    with pytest.raises(SettingsError):
        read_config_workers(path)


EXAMPLES = {
    "processes": "2",
    "native_n": "true",
    "tokenizer": "m=/d",
    "kv_listen": "tcp://*:1",
}


@pytest.mark.parametrize("entry", NOT_YET)
def test_what_is_not_there_yet_is_refused(entry: str) -> None:
    field, _, value = entry.partition("=")
    flag = "--" + field.replace("_", "-")
    message = refusal([f"{flag}={value or EXAMPLES.get(field, '5')}"])
    assert message.startswith(f"{flag} (command line)")
    assert "not available in this release" in message


def test_what_is_there_is_taken() -> None:
    assert load_settings(["--policy", "least-loaded", "--processes", "1"], {}).policy == "least-loaded"


def test_help_exits_with_success(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_settings(["--help"], {})
    assert caught.value.code == 0
    assert "FOREBAY_PORT" in capsys.readouterr().out


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_PORT", "4321")
    monkeypatch.setenv("A_KEY", "k")
    assert load_settings([]).port == 4321
    assert resolve_worker_keys(WorkerSpec("http://h", admin_api_key_env="A_KEY")) == (None, "k")


def test_description_is_json(tmp_path: Path) -> None:
    keys = write(tmp_path / "keys", "secret-1\n")
    settings = load_settings([f"--api-key-file={keys}", "--worker", "http://h:1,api_key_env=SECRET_ENV"], {})
    described = json.loads(json.dumps(describe(settings)))
    assert described["api_key_file"] == str(keys)
    assert described["workers"][0]["url"] == "http://h:1"
    assert "secret-1" not in json.dumps(described)


def test_changed_settings_are_described_in_short() -> None:
    settings = load_settings(["--port", "0", "--worker", "http://h:1", "--admin-allow", "10.0.0.0/8"], {})
    assert describe_changed(settings) == "port=0 admin_allow=['10.0.0.0/8']"
    assert describe_changed(Settings()) == "all at their defaults"


def test_key_files(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", "# who: why\n\n  key-1  \r\nkey-2\nkey-1\n")
    assert read_key_file(path) == ("key-1", "key-2")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param(b"", "holds no key", id="empty"),
        pytest.param(b"# only\n\n", "holds no key", id="comments only"),
        pytest.param(b"a b\n", "has a space", id="space inside"),
        pytest.param("schlüssel".encode(), "outside ASCII", id="not ASCII"),
        pytest.param(b"\xff\xfe", "cannot be read", id="not UTF-8"),
        pytest.param(None, "cannot be read (No such file", id="missing"),
    ],
)
def test_bad_key_files(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        read_key_file(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        pytest.param({}, "KEY is not set", id="missing"),
        pytest.param({"KEY": " "}, "KEY is not set", id="empty"),
        pytest.param({"KEY": "a b"}, "KEY holds a space", id="space inside"),
    ],
)
def test_bad_worker_keys(environ: dict[str, str], says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve_worker_keys(WorkerSpec("http://h:1", api_key_env="KEY"), environ)
    assert says in str(caught.value)
    assert "http://h:1: api_key_env" in str(caught.value)

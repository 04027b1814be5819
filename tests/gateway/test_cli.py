"""The command line: dispatch, exit codes, and one line in place of a traceback for users' errors."""

import http.server
import io
import json
import re
import runpy
import socket
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.cli import main
from gateway.settings import Settings


def stub(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    """Put a module with ``members`` in the place of one that would start servers."""
    module = types.ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("argv", [["--help"], []])
def test_help_lists_the_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert [name for name in ("serve", "simulate", "demo", "relay", "workers", "explain") if name not in text] == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("forebay 0.")


def test_serve_help_shows_environment_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    assert "FOREBAY_DRAIN_TIMEOUT_S" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        pytest.param(["serv"], "serv: unknown command; did you mean serve?", id="unknown command"),
        pytest.param(["xyzzy"], "see forebay --help", id="unknown command far off"),
        pytest.param(["--vers"], "--vers: unknown option; did you mean --version?", id="unknown option"),
        pytest.param(["relay"], "--engine: missing; give the local engine's address", id="relay"),
        pytest.param(["explain"], "required: FILE; see forebay explain --help", id="nothing to explain"),
        pytest.param(["explain", "--url", "x", "-"], "--url: 'x' is not", id="address of explain without a scheme"),
        pytest.param(["explain", "/nonexistent/r"], "/nonexistent/r: No such file", id="no request file"),
        pytest.param(["explain", "--pth", "x", "-"], "did you mean --path?", id="near one of explain"),
        pytest.param(["serve", "--prot", "1"], "did you mean --port?", id="unknown option of serve"),
        pytest.param(["workers", "--url", "h:1"], "--url", id="address without a scheme"),
        pytest.param(["workers", "--url", "http://[::1"], "--url", id="broken address"),
        pytest.param(["workers", "--admin-api-key-file", "/nonexistent/k"], "/nonexistent/k", id="no key file"),
        pytest.param(["workers", "--admin-api-key-file", "/nonexistent/k"], "--admin-api-key-file: ", id="its option"),
        pytest.param(["workers", "--xyzzy"], "--xyzzy", id="unknown option of workers"),
        pytest.param(["workers", "--ulr", "x"], "--ulr: unknown option; did you mean --url?", id="near one of workers"),
        pytest.param(["workers", "http://h:1"], "http://h:1: unexpected argument", id="stray argument of workers"),
        pytest.param(["workers", "--timeout-s", "x"], "--timeout-s: invalid float value", id="no number"),
        pytest.param(["workers", "--timeout-s", "-1"], "--timeout-s: -1 is out of range", id="negative"),
        pytest.param(["workers", "--timeout-s", "nan"], "--timeout-s: nan is out of range", id="not a number"),
        pytest.param(["demo", "--prot", "1"], "--prot: unknown option; did you mean --port?", id="near one of demo"),
        pytest.param(["demo", "--port", "65536"], "--port: 65536 is out of range", id="port out of range"),
        pytest.param(["serve", "http://h:1"], "http://h:1: unexpected argument", id="stray argument"),
        pytest.param(["serve", "--api-key-file", "/no/k"], "--api-key-file: key file /no/k: cannot", id="no keys"),
        pytest.param(["serve", "--tls-cert-file", "/no/c"], "--tls-cert-file: /no/c cannot be read", id="no cert"),
    ],
)
def test_bad_arguments_exit_with_2(
    argv: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gateway.server.configure_logging", lambda *args: None)
    assert main(argv) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("forebay: ")
    assert says in line
    assert captured.out == ""


@pytest.mark.parametrize("command", ["serve", "demo", "workers", "explain"])
def test_every_option_has_its_default_on_the_help_page(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    page = capsys.readouterr().out.partition("options:")[2]
    texts = {text.split()[0]: " ".join(text.split()) for text in re.split(r"\n  (?=-)", page) if text.startswith("--")}
    assert len(texts) >= 2
    assert [flag for flag, text in texts.items() if "default: " not in text] == []
    units = {"-s": "(s; ", "-bytes": "(bytes; "}
    lacking = [
        flag for flag, text in texts.items() for end, unit in units.items() if flag.endswith(end) and unit not in text
    ]
    assert lacking == []


def test_a_taken_port_is_one_line_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gateway.server.configure_logging", lambda *args: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", port]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"cannot listen on 127.0.0.1:{port}" in line
    assert "choose another --port" in line


def test_serve_hands_over_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def run(settings: Settings) -> int:
        seen.append(settings)
        return 1

    stub(monkeypatch, "gateway.server", run=run)
    monkeypatch.setattr(sys, "argv", ["forebay", "serve", "--port", "0"])
    assert main() == 1
    assert [settings.port for settings in seen] == [0]


@pytest.mark.parametrize(("command", "module"), [("simulate", "simulator.command"), ("demo", "gateway.demo")])
def test_other_commands_get_their_arguments(monkeypatch: pytest.MonkeyPatch, command: str, module: str) -> None:
    seen: list[list[str]] = []

    def entry(argv: list[str]) -> int:
        seen.append(argv)
        return 0

    stub(monkeypatch, module, main=entry, run=entry)
    assert main([command, "--port", "0"]) == 0
    assert seen == [["--port", "0"]]


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(settings: Settings) -> int:
        raise KeyboardInterrupt

    stub(monkeypatch, "gateway.server", run=run)
    assert main(["serve"]) == 1


def test_the_package_runs_as_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gateway", "--version"])
    monkeypatch.delitem(sys.modules, "gateway.__main__", raising=False)
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("gateway", run_name="__main__")
    assert caught.value.code == 0


class Gateway(http.server.ThreadingHTTPServer):
    """Answers every request in one way and keeps what it was asked."""

    answer = (200, b"{}")

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self.posted: list[bytes] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Gateway

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["authorization"]))
        status, body = self.server.answer
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.server.posted.append(self.rfile.read(int(self.headers["content-length"])))
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


WORKERS = {
    "workers": [
        {"id": "h:1", "role": "regular", "engine": "sglang", "engine_version": "0.5.23", "model_id": "m",
         "state": "ready", "detail": "ready", "in_flight": 3, "dp_size": 2},
        {"id": "host-2:30000", "role": "prefill", "engine": "vllm", "model_id": "\x1b[2J", "state": "ready",
         "detail": "prefill worker without a ready decode worker"},
        {"id": "h:3", "state": "unidentified", "detail": "cannot connect\nto h:3"},
        {"id": "h:4"},
    ]
}  # fmt: skip


def test_workers_are_printed_as_a_table(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answer = (200, json.dumps(WORKERS).encode())
    assert main(["workers", "--url", gateway.url + "/"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ID            ROLE     ENGINE         MODEL  STATE         IN FLIGHT  DP SIZE  DETAIL",
        "h:1           regular  sglang 0.5.23  m      ready         3          2        -",
        "host-2:30000  prefill  vllm           ?[2J   ready         -          -        prefill worker without a "
        "ready decode worker",
        "h:3           -        -              -      unidentified  -          -        cannot connect?to h:3",
        "h:4           -        -              -      -             -          -        -",
    ]
    assert gateway.asked == [("/workers", None)]


def test_workers_are_printed_as_json(gateway: Gateway, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("# admin\nsecret\n")
    gateway.answer = (200, json.dumps(WORKERS).encode())
    assert main(["workers", "--url", gateway.url, "--json", "--admin-api-key-file", str(key_file)]) == 0
    assert json.loads(capsys.readouterr().out) == WORKERS
    assert gateway.asked == [("/workers", "Bearer secret")]


def test_no_workers(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    gateway.answer = (200, b'{"workers": []}')
    assert main(["workers", "--url", gateway.url]) == 0
    assert capsys.readouterr().out == "no workers\n"


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        pytest.param(401, b"", "--admin-api-key-file", id="no key"),
        pytest.param(403, b"", "--admin-api-key-file", id="not allowed"),
        pytest.param(404, b"", "is this a gateway?", id="other server"),
        pytest.param(200, b"<html>", "is this a gateway?", id="not JSON"),
        pytest.param(200, b"[]", "is this a gateway?", id="other JSON"),
        pytest.param(200, b'{"workers": [1]}', "is this a gateway?", id="not a worker"),
    ],
)
def test_workers_explains_what_went_wrong(
    gateway: Gateway, status: int, body: bytes, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway.answer = (status, body)
    assert main(["workers", "--url", gateway.url]) == 1
    assert says in capsys.readouterr().err


def test_workers_without_a_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound_only:
        bound_only.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound_only.getsockname()[1]}"
        assert main(["workers", "--url", url]) == 1
    assert f"no answer from {url}" in capsys.readouterr().err


EXPLANATION = {
    "chosen": {"worker_id": "h:1", "dp_rank": 1},
    "candidates": [
        {"worker_id": "h:1", "dp_rank": 0, "overlap_blocks": 0, "prompt_blocks": 10, "active_blocks": 3,
         "active_prefill_tokens": 160, "in_flight": 1, "cost": 33.0, "excluded": None},
        {"worker_id": "h:1", "dp_rank": 1, "overlap_blocks": 8, "prompt_blocks": 10, "active_blocks": 0,
         "active_prefill_tokens": 0, "in_flight": 0, "cost": 12.0625, "excluded": None},
        {"worker_id": "host-2:30000", "dp_rank": None, "in_flight": 0, "cost": None, "excluded": "paused\x1b[2J"},
    ],
    "policy": "kv-aware", "blocks_hashed": 10, "reason": "the lowest cost",
}  # fmt: skip


@pytest.fixture
def request_file(tmp_path: Path) -> str:
    path = tmp_path / "request.json"
    path.write_bytes(b'{"input_ids": [1, 2]}')
    return str(path)


def test_an_explanation_is_printed_as_a_table(
    gateway: Gateway, capsys: pytest.CaptureFixture[str], request_file: str
) -> None:
    gateway.answer = (200, json.dumps(EXPLANATION).encode())
    assert main(["explain", "--url", gateway.url, request_file]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "   WORKER        RANK  OVERLAP  IN FLIGHT  ACTIVE BLOCKS  PREFILL TOKENS  COST   EXCLUDED",
        "   h:1           0     0/10     1          3              160             33.00  -",
        "*  h:1           1     8/10     0          0              0               12.06  -",
        "   host-2:30000  -     -        0          -              -               -      paused?[2J",
        "to h:1 rank 1: the lowest cost (policy kv-aware, 10 block(s) hashed)",
    ]
    assert gateway.asked == [("/route/explain", None)]
    assert gateway.posted == [b'{"input_ids": [1, 2]}']


def test_both_workers_of_a_pair_are_marked(
    gateway: Gateway, capsys: pytest.CaptureFixture[str], request_file: str
) -> None:
    prefill = {"worker_id": "p:1", "dp_rank": 0, "role": "prefill", "in_flight": 0, "cost": 2.0, "excluded": None}
    decode = {**prefill, "worker_id": "d:1", "dp_rank": 1, "role": "decode"}
    other = {**prefill, "worker_id": "q:1", "excluded": "paused"}
    shown = {**EXPLANATION, "chosen": {**decode, "prefill": prefill}, "candidates": [prefill, other, decode]}
    gateway.answer = (200, json.dumps(shown).encode())
    assert main(["explain", "--url", gateway.url, request_file]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][-2:] == ["ROLE", "EXCLUDED"]
    assert [(line[0], line[-2], line[-1]) for line in lines[1:4]] == [
        ("*", "prefill", "-"),
        ("q:1", "prefill", "paused"),
        ("*", "decode", "-"),
    ]
    assert " ".join(lines[4]).startswith("to p:1 rank 0 and d:1 rank 1: the lowest cost")


def test_an_explanation_is_printed_as_json_and_the_request_read_from_standard_input(
    gateway: Gateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.answer = (200, json.dumps(EXPLANATION).encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": [1]}')))
    assert main(["explain", "--url", gateway.url, "--json", "--path", "/v1/completions", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == EXPLANATION
    assert gateway.asked == [("/route/explain?path=%2Fv1%2Fcompletions", None)]
    assert gateway.posted == [b'{"prompt": [1]}']


def test_a_request_that_goes_nowhere_is_explained_too(
    gateway: Gateway, capsys: pytest.CaptureFixture[str], request_file: str
) -> None:
    nothing: dict[str, object] = {"chosen": None, "candidates": [], "policy": "kv-aware", "blocks_hashed": 0}
    nothing["reason"] = "no such model"
    gateway.answer = (200, json.dumps(nothing).encode())
    assert main(["explain", "--url", gateway.url, request_file]) == 0
    assert "to no worker: no such model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        pytest.param(401, b"", "--admin-api-key-file", id="no key"),
        pytest.param(404, b"{}", "is this a gateway", id="other server"),
        pytest.param(400, b'{"error": {"message": "no JSON"}}', "refused the request: no JSON", id="refused"),
        pytest.param(413, b"<html>", "is this a gateway?", id="refused by something else"),
        pytest.param(200, b"<html>", "is this a gateway?", id="not JSON"),
        pytest.param(200, b"{}", "is this a gateway?", id="other JSON"),
        pytest.param(200, b'{"chosen": 1, "candidates": {}}', "is this a gateway?", id="no explanation"),
    ],
)
def test_explain_says_what_went_wrong(
    gateway: Gateway, status: int, body: bytes, says: str, capsys: pytest.CaptureFixture[str], request_file: str
) -> None:
    gateway.answer = (status, body)
    assert main(["explain", "--url", gateway.url, request_file]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line

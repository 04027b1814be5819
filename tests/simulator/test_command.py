"""The command: options, refusals, and a process that starts and stops."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import sys

import pytest

from simulator.command import build_parser, main, options_from_args, serve
from simulator.options import EngineOptions, OptionError
from tests.simulator.wire import ask


def test_no_arguments_mean_the_defaults() -> None:
    assert options_from_args(build_parser().parse_args([])) == EngineOptions()


def test_every_option_can_be_given_and_names_its_default() -> None:
    text = " ".join(build_parser().format_help().split())
    for field in dataclasses.fields(EngineOptions):
        if field.name != "die_on_bad_input":
            assert "--" + field.name.replace("_", "-") in text
    assert text.count("(default: ") == len(dataclasses.fields(EngineOptions))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "other"], "unknown, known are sglang, vllm"),
        (["--role", "router"], "unknown"),
        (["--bootstrap-port", "65536"], "--bootstrap-port"),
        (["--lost-prefill-s", "-1"], "--lost-prefill-s"),
        (["--kv-events", "*:5557"], "tcp://HOST:PORT"),
        (["--kv-events", "ipc:///kv"], "tcp://HOST:PORT"),
        (["--kv-events", "tcp://*:65535", "--dp-size", "2"], "no port is left"),
        (["--replay", "tcp://*:5558"], "needs --kv-events"),
        (["--kv-events", "tcp://*:0", "--kv-replay-framing", "odd"], "new or old"),
        (["--kv-events", "tcp://*:0", "--kv-hwm", "0"], "at least 1"),
        (["--node-rank", "1"], "--node-rank must be in 0 to 0"),
        (["--nnodes", "2"], "--nnodes above 1 needs --dist-init-addr"),
        (["--nnodes", "0"], "--nnodes must be at least 1"),
        (["--nnodes", "2", "--engine", "vllm", "--dist-init-addr", "h:1"], "needs --engine sglang"),
        (["--nnodes", "2", "--dist-init-addr", "nowhere"], "is not of the form HOST:PORT"),
        (["--dp-size", "0"], "--dp-size must be at least 1"),
        (["--speedup", "0"], "--speedup"),
        (["--vocab-size", "100"], "--vocab-size"),
        (["--port", "70000"], "--port"),
        (["--max-queued", "-1"], "--max-queued"),
        (["--frobnicate"], "unrecognized"),
        (["--port", "x"], "invalid int"),
    ],
)
def test_bad_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_option_errors_name_the_option() -> None:
    with pytest.raises(OptionError, match="--page-size"):
        EngineOptions(page_size=0)


def test_an_address_that_cannot_be_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--host", "192.0.2.1"]) == 1
    assert "cannot listen on 192.0.2.1:0" in capsys.readouterr().err


async def test_serving_until_a_signal(capsys: pytest.CaptureFixture[str]) -> None:
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        served = group.create_task(serve(EngineOptions()))
        shown = ""
        while "http://" not in shown:
            await asyncio.sleep(0)
            shown += capsys.readouterr().out
        assert (await ask(int(shown.rsplit(":", 1)[1]), "/ready", method="GET")).status == 200
        signal.raise_signal(signal.SIGTERM)
    assert served.done()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_process(number: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "simulator", "--port", "0", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(20):
            line = (await process.stdout.readline()).decode()
            assert line.startswith("simulated sglang engine on http://127.0.0.1:")
            port = int(line.rsplit(":", 1)[1])
            assert (await ask(port, "/ready", method="GET")).status == 200
            process.send_signal(number)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

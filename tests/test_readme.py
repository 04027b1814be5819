"""The README's commands do what the README says."""

import asyncio
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import PATIENCE_S, running_gateway

README = (Path(__file__).parent.parent / "README.md").read_text()
COMMANDS = [block for block in re.findall(r"```sh\n(.*?)```", README, re.S) if block.startswith("curl")]
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_there_are_commands() -> None:
    assert len(COMMANDS) == 7
    assert len(PROGRAMS) == 1


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("command", COMMANDS)
async def test_the_commands_give_exact_answers(command: str) -> None:
    engine = SimulatedEngine(EngineOptions(model="demo"))
    await engine.start()
    try:
        async with running_gateway(engine.url) as gateway:
            arguments = shlex.split(command.replace("\\\n", " ").replace("http://127.0.0.1:8000", gateway.url))
            process = await asyncio.create_subprocess_exec(
                arguments[0], "--fail", "--noproxy", "*", *arguments[1:], stdout=asyncio.subprocess.PIPE
            )
            async with asyncio.timeout(PATIENCE_S):
                output, _ = await process.communicate()
            assert process.returncode == 0
            _check(command, output.decode())
    finally:
        await engine.stop()


@pytest.mark.parametrize("program", PROGRAMS)
async def test_the_program_gets_answers(program: str) -> None:
    engine = SimulatedEngine(EngineOptions(model="demo"))
    await engine.start()
    try:
        async with running_gateway(engine.url) as gateway:
            assert "http://127.0.0.1:8000" in program
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", program.replace("http://127.0.0.1:8000", gateway.url),
                stdout=asyncio.subprocess.PIPE, env={**os.environ, "NO_PROXY": "*"},
            )  # fmt: skip
            async with asyncio.timeout(3 * PATIENCE_S):
                output, _ = await process.communicate()
            assert process.returncode == 0
            models, whole, streamed = output.decode().split("\n")
            assert models == "['demo']"
            assert whole == f"{streamed} 8" != " 8"
            assert [record.outcome for record in gateway.records] == ["complete", "complete"]
    finally:
        await engine.stop()


def _check(command: str, output: str) -> None:
    if "/metrics" in command:
        assert "forebay_requests_total" in output
    elif '"stream": true' in command:
        *events, done = [line[6:] for line in output.split("\n\n") if line.startswith("data: ")]
        assert done == "[DONE]"
        assert all(json.loads(event) for event in events)
        assert len(events) >= 8
    elif "/generate" in command:
        answer = json.loads(output)
        assert len(answer["output_ids"]) == 8
        assert len(answer["meta_info"]["output_token_logprobs"]) == 8
        assert answer["meta_info"]["prompt_tokens"] == 3
    elif "/chat" in command:
        assert json.loads(output)["usage"]["completion_tokens"] == 8
    elif "/v1/models" in command:
        assert [model["id"] for model in json.loads(output)["data"]] == ["demo"]
    else:
        assert json.loads(output)["workers"][0]["is_ready"] is True

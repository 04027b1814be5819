"""A pair of two processes, the way it is run by hand; prefill is killed."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.simulator.conftest import StartEngine
from tests.simulator.wire import ask

ROOT = Path(__file__).parents[2]
TEXT = "two processes"


@contextlib.asynccontextmanager
async def prefill_process(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """Run ``forebay simulate --role prefill``; yields the process and its HTTP port."""
    command = [sys.executable, "-m", "simulator", "--role", "prefill", "--bootstrap-port", "0", *arguments]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            line = (await process.stdout.readline()).decode()
        yield process, int(re.findall(r":(\d+)", line)[0])
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_sglang(start_engine: StartEngine) -> None:
    decode = await start_engine(role="decode", lost_prefill_s=0.01)
    async with prefill_process() as (process, port):
        info = (await ask(port, "/server_info", method="GET")).json()
        body: dict[str, Any] = {
            "text": TEXT,
            "sampling_params": {"max_new_tokens": 8},
            "bootstrap_host": "localhost",
            "bootstrap_port": info["disaggregation_bootstrap_port"],
            "bootstrap_room": 1,
        }
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(each, "/generate", body)) for each in (port, decode.port)]
        first, rest = (task.result().json() for task in tasks)
        assert rest["output_ids"][:1] == first["output_ids"]
        assert len(rest["output_ids"]) == 8
        async with asyncio.TaskGroup() as group:
            task = group.create_task(ask(decode.port, "/generate", {**body, "bootstrap_room": 2}))
            await decode.wait_for(lambda e: e.live_rooms and e.transfers["rooms"][0]["is_joined"])
            process.kill()
        assert "Lost connection with prefill instance" in task.result().json()["message"]


@pytest.mark.parametrize("is_alive", [True, False], ids=["alive", "killed"])
async def test_vllm(start_engine: StartEngine, is_alive: bool) -> None:
    decode = await start_engine(engine="vllm", role="decode", lost_prefill_s=0.01)
    async with prefill_process("--engine", "vllm") as (process, port):
        keep = {"prompt": TEXT, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        params = (await ask(port, "/v1/completions", keep)).json()["kv_transfer_params"]
        assert (await ask(port, "/_transfers", method="GET")).json()["pinned_blocks"] == 1
        if not is_alive:
            process.kill()
            await process.wait()
        fetch = {"prompt": TEXT, "max_tokens": 8, "kv_transfer_params": params}
        answer = await ask(decode.port, "/v1/completions", fetch)
        assert answer.status == (200 if is_alive else 500)
        for _ in range(500 if is_alive else 0):  # decode tells prefill, and does not wait for it
            if not (await ask(port, "/_transfers", method="GET")).json()["pinned_blocks"]:
                return
        assert not is_alive, "the blocks are still kept"

"""vLLM pairs that hand prompts over by Mooncake, under ids that the gateway makes and the bootstrap server knows."""

import json
from typing import Any

import pytest

from tests.fakes.running import running_gateway
from tests.fakes.script_engine import Reply, SeenRequest, script_engine
from tests.fakes.scripted_pair import CHAT, DONE, VLLM_METADATA, chat_chunk
from tests.fakes.wire import call

ENGINES = {"0": {"engine_id": "e-0", "worker_addr": {}}, "1": {"engine_id": "e-1", "worker_addr": {}}}
TWO_RANKS = b"".join(
    b'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="4096"} 1.0\n' % rank for rank in range(2)
)


def params(request: SeenRequest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request.body)["kv_transfer_params"]
    return found


async def prefill(request: SeenRequest, reply: Reply) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "length"}
    await reply.whole(json.dumps({"id": "x", "choices": [choice], "kv_transfer_params": None}).encode())


async def decode(request: SeenRequest, reply: Reply) -> None:
    await reply.start_chunked()
    for event in (chat_chunk(role=True), chat_chunk("a"), chat_chunk("b", "length"), DONE):
        await reply.chunk(event)
    await reply.end_chunked()


@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
async def test_both_legs_get_the_same_transfer(is_stream: bool) -> None:
    async with script_engine(prefill) as first, script_engine(decode) as second, script_engine() as bootstrap:
        first.metadata = {**VLLM_METADATA, "/metrics": TWO_RANKS}
        second.metadata = VLLM_METADATA
        bootstrap.metadata = {"/query": ENGINES}
        port = bootstrap.url.rpartition(":")[2]
        specs = [f"{first.url},engine=vllm,role=prefill,bootstrap_port={port}", f"{second.url},engine=vllm,role=decode"]
        async with running_gateway(*specs, seed=1) as running:
            seen = set()
            for _ in range(6):
                answer = await call(running.address, "/v1/chat/completions", {**CHAT, "stream": is_stream})
                assert answer.status == 200
                asked, given = first.requests[-1], second.requests[-1]
                transfer = params(asked)["transfer_id"]
                assert params(asked) == {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
                rank = asked.header("x-data-parallel-rank")
                assert params(given) == {
                    "do_remote_decode": False,
                    "do_remote_prefill": True,
                    "transfer_id": transfer,
                    "remote_engine_id": f"e-{rank}",
                    "remote_bootstrap_addr": f"http://127.0.0.1:{port}",
                }
                assert asked.header("x-request-id") == given.header("x-request-id")
                seen.add(transfer)
            assert len(seen) == 6


async def test_a_prefill_worker_is_not_ready_before_all_its_ranks_are_known() -> None:
    async with script_engine(prefill) as first, script_engine() as bootstrap:
        first.metadata = {**VLLM_METADATA, "/metrics": TWO_RANKS}
        bootstrap.metadata = {"/query": {"0": ENGINES["0"]}}
        spec = f"{first.url},engine=vllm,role=prefill,bootstrap_port={bootstrap.url.rpartition(':')[2]}"
        async with running_gateway(spec, wait_ready=0) as running:
            (worker,) = (await running.client.get("/workers")).json()["workers"]
            while "bootstrap" not in worker["detail"]:
                (worker,) = (await running.client.get("/workers")).json()["workers"]
            assert worker["detail"].endswith("ranks [1] have not registered at the bootstrap server yet")
            bootstrap.metadata = {"/query": ENGINES}
            await running.ready(1)

"""What trainers send, call by call, for one rollout step and one update of the weights, and what must come back.

A transcript is a table of calls in the order of the trainer's own code. ``{e0}`` is the URL of an engine, ``{w0}`` its
worker's id. Calls that a trainer makes to an engine by itself go to the engine, so that the gateway has to notice.
"""

import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from routers.fleet import WorkerState
from simulator.options import EngineOptions
from simulator.server import SimulatedEngine
from tests.fakes.running import RunningGateway, running_gateway, until
from tests.fakes.wire import Answer, call, request_bytes, wire

IDS = list(range(1, 33))
GATEWAY = "gateway"
# Some trainers send this when they have no key.
NO_KEY = {"Authorization": "Bearer None"}


@dataclass(frozen=True)
class Step:
    """One call of a transcript.

    Attributes:
        what: Method and path.
        body: JSON body, ``None`` for no body.
        status: What must come back.
        shows: Regular expressions that the answer's body holds.
        to: Who is called: the gateway, or an engine by its number.
        headers: Beside the usual ones.
        until: Asked again until the status is right, as the trainer does.
    """

    what: str
    body: Any = None
    status: int = 200
    shows: Sequence[str] = ()
    to: str | int = GATEWAY
    headers: dict[str, str] = field(default_factory=dict)
    until: bool = False


class Trainer:
    """Goes through transcripts."""

    def __init__(self, engines: Sequence[SimulatedEngine], gateway: RunningGateway) -> None:
        self.engines = engines
        self.gateway = gateway
        self.names = {f"e{n}": engine.url for n, engine in enumerate(engines)}
        self.names |= {f"w{n}": engine.url.removeprefix("http://") for n, engine in enumerate(engines)}

    async def go(self, *steps: Step) -> list[Answer]:
        """Make the calls one after the other; the answers, all of which are as the transcript says."""
        return [await self._step(step) for step in steps]

    async def _step(self, step: Step) -> Answer:
        method, path = self._named(step.what).split(" ")
        body = None if step.body is None else json.loads(self._named(json.dumps(step.body)))
        port = self.gateway.address[1] if step.to == GATEWAY else self.engines[int(step.to)].port
        answers: list[Answer] = []

        async def ask() -> Answer:
            answers.append(await call(("127.0.0.1", port), path, body, method=method, headers=step.headers))
            return answers[-1]

        answer = await ask()
        for _ in range(60 if step.until else 0):
            if answer.status == step.status:
                break
            answer = await ask()
        said = f"{step.what}: {answer.status} {answer.body.decode()}"
        assert answer.status == step.status, said
        for pattern in step.shows:
            assert re.search(self._named(pattern), answer.body.decode()), f"{pattern!r} is not in {said}"
        return answer

    def _named(self, text: str) -> str:
        for name, value in self.names.items():
            text = text.replace(f"{{{name}}}", value)
        return text

    async def ready(self, count: int = 2) -> None:
        """202 was no promise: workers are used later."""
        await self.gateway.ready(count)


@asynccontextmanager
async def trainer(engine_kind: str = "sglang") -> AsyncIterator[Trainer]:
    """Two engines, and a gateway that has not heard of them yet."""
    async with AsyncExitStack() as stack:
        engines = []
        for _ in range(2):
            engine = SimulatedEngine(EngineOptions(engine=engine_kind, inter_token_ms=2.0, dev_mode=True))
            await engine.start()
            stack.push_async_callback(engine.stop)
            engines.append(engine)
        yield Trainer(engines, await stack.enter_async_context(running_gateway()))


def check_rollout(answer: Answer, tokens: int) -> None:
    """Text, log-probabilities as triples, finish reason, version and counts: what every trainer reads."""
    read = answer.json()
    meta = read["meta_info"]
    assert isinstance(read["text"], str)
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] == tokens
    assert all(len(triple) == 3 and isinstance(triple[1], int) for triple in meta["output_token_logprobs"])
    assert meta["finish_reason"]["type"] in ("stop", "length", "abort")
    assert meta["prompt_tokens"] == len(IDS)
    assert meta["weight_version"] == answer.headers["x-forebay-weight-version"]


def check_partial(answer: Answer, public_id: str) -> None:
    """What there was of a long request when it was aborted."""
    meta = answer.json()["meta_info"]
    assert (answer.status, meta["finish_reason"]["type"], meta["id"]) == (200, "abort", public_id)
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] < 5000


def added(n: int) -> list[str]:
    """What the answer to a new worker shows."""
    return ['"status":"accepted"', f'"worker_id":"{{w{n}}}"', f'"url":"{{e{n}}}"', f'"location":"/workers/{{w{n}}}"']


SLIME_SAMPLING = {
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 8, "stop": None, "stop_token_ids": None,
    "skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False, "ignore_eos": True,
}  # fmt: skip
SLIME_START = (
    Step("GET /health"),
    *(
        Step("POST /workers", {"url": f"{{e{n}}}", "worker_type": "regular"}, 202, added(n), headers=NO_KEY)
        for n in (0, 1)
    ),
    Step("GET /workers", shows=['"id":"{w0}","url":"{e0}"', '"id":"{w1}","url":"{e1}"', '"total":2']),
)
# Straight to each engine, as the URLs of GET /workers are called.
SLIME_QUIET = tuple(
    step
    for n in (0, 1)
    for step in (
        Step("POST /abort_request", {"abort_all": True}, to=n),
        Step("GET /v1/loads?include=core", to=n, shows=['"num_running_reqs":0,"num_waiting_reqs":0']),
    )
)
SLIME_UPDATE = (
    *(Step("POST /pause_generation", {}, to=n) for n in (0, 1)),
    *(Step("GET /flush_cache", to=n, until=True) for n in (0, 1)),
    *(
        Step("POST /init_weights_update_group", {"master_address": "127.0.0.1", "master_port": 29500,
             "rank_offset": 1 + n, "world_size": 3, "group_name": "slime-pp_0", "backend": "nccl"}, to=n)
        for n in (0, 1)
    ),
    *(
        Step("POST /update_weights_from_distributed", {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[1]],
             "group_name": "slime-pp_0", "flush_cache": False, "weight_version": "1"}, to=n)
        for n in (0, 1)
    ),
    *(Step("POST /continue_generation", {}, to=n) for n in (0, 1)),
)  # fmt: skip


async def test_slime() -> None:
    """Workers by the router's interface; everything else of the update past the gateway, straight to the engines."""
    async with trainer() as t:
        await t.go(*SLIME_START)
        await t.ready()
        body = {"input_ids": IDS, "sampling_params": SLIME_SAMPLING, "return_logprob": True}
        session = {"X-SMG-Routing-Key": "session-1"}
        (one, streamed) = await t.go(
            Step("POST /generate", body, headers={**session, **NO_KEY}),
            Step("POST /generate", {**body, "stream": True, "return_routed_experts": False}, headers=session),
        )
        check_rollout(one, 8)
        events = [json.loads(event) for event in streamed.events() if event != b"[DONE]"]
        assert events[-1]["meta_info"]["finish_reason"]["type"] == "length"
        # Its agents abort by id, at the router.
        async with wire(t.gateway.address) as agent:
            long = {**SLIME_SAMPLING, "max_new_tokens": 5000}
            await agent.send(request_bytes("/generate", {**body, "rid": "0a1b", "sampling_params": long}))
            await until(lambda: sum(engine.running for engine in t.engines) == 1, "it runs")
            await t.go(
                Step("POST /abort_request", {"rid": "0a1b"}, shows=['"aborted":\\["0a1b"\\]', '"status":"told"'])
            )
            check_partial(await agent.answer(), "0a1b")
        await t.go(*SLIME_QUIET)
        await t.go(*SLIME_UPDATE)
        members = list(t.gateway.gateway.services.fleet)
        await until(lambda: all(one.weight_number == 1 for one in members), "the versions that probes find")
        await until(lambda: all(one.state is WorkerState.READY for one in members), "the end of the pause")
        (after,) = await t.go(Step("POST /generate", body, headers={"x-forebay-min-weight-version": "1"}))
        check_rollout(after, 8)
        assert after.headers["x-forebay-weight-version"] == "1"
        await t.go(Step("DELETE /workers/{w0}", status=202), Step("DELETE /workers/{w1}", status=202))
        await until(lambda: not len(t.gateway.gateway.services.fleet), "their removal")


async def test_slime_with_vllm_workers() -> None:
    """The same requests as to SGLang, and the update at the gateway, since vLLM has other routes for it."""
    async with trainer("vllm") as t:
        await t.go(*SLIME_START)
        await t.ready()
        body = {"input_ids": IDS, "sampling_params": SLIME_SAMPLING, "return_logprob": True, "model": None}
        (one, streamed, batch) = await t.go(
            Step("POST /generate", body, headers={"X-SMG-Routing-Key": "session-1", **NO_KEY}),
            Step("POST /generate", {**body, "stream": True, "return_routed_experts": False}),
            Step("POST /generate", {**body, "input_ids": [IDS, IDS[1:]], "top_logprobs_num": 2, "lora_path": None}),
        )
        check_rollout(one, 8)
        events = [json.loads(event) for event in streamed.events() if event != b"[DONE]"]
        assert events[-1]["meta_info"]["finish_reason"]["type"] == "length"
        assert len(events[-1]["meta_info"]["output_token_logprobs"]) == 8  # of all events together
        assert [len(item["meta_info"]["output_top_logprobs"]) for item in batch.json()] == [8, 8]
        long = {**SLIME_SAMPLING, "max_new_tokens": 5000}
        async with wire(t.gateway.address) as agent, wire(t.gateway.address) as cut:
            await agent.send(request_bytes("/generate", {**body, "rid": "0a1b", "sampling_params": long}))
            await until(lambda: sum(engine.running for engine in t.engines) == 1, "it runs")
            await t.go(
                Step("POST /abort_request", {"rid": "0a1b"}, shows=['"aborted":\\["0a1b"\\]', '"status":"told"'])
            )
            check_partial(await agent.answer(), "0a1b")
            await cut.send(request_bytes("/generate", {**body, "rid": "2c3d", "sampling_params": long}))
            await until(lambda: sum(engine.running for engine in t.engines) == 1, "the next one runs")
            await t.go(
                Step("POST /pause_generation", {"mode": "abort"}),
                Step("POST /flush_cache", {}),
                # The weights themselves come by vLLM's own routes, engine by engine.
                Step("POST /update_weights_from_disk", {"model_path": "x"}, 207, ['"status":501']),
                *(Step(f"POST /workers/{{w{n}}}/call/start_weight_update", {}) for n in (0, 1)),
                *(Step(f"POST /workers/{{w{n}}}/call/finish_weight_update", {"weight_version": "1"}) for n in (0, 1)),
                Step("POST /continue_generation", {}),
            )
            check_partial(await cut.answer(), "2c3d")
        (after,) = await t.go(Step("POST /generate", body, headers={"x-forebay-min-weight-version": "1"}))
        check_rollout(after, 8)
        assert after.headers["x-forebay-weight-version"] == "1"
        await t.go(Step("DELETE /workers/{w0}", status=202), Step("DELETE /workers/{w1}", status=202))
        await until(lambda: not len(t.gateway.gateway.services.fleet), "their removal")


async def test_miles() -> None:
    """The older router's interface, urls with a rank behind them, batches, aborts by adapter, a flush at the router."""
    async with trainer() as t:
        await t.go(
            Step("POST /add_worker?url={e0}@0", status=202, shows=added(0)),
            Step("POST /add_worker", {"worker_url": "{e1}"}, 202, added(1)),
            Step("GET /list_workers", shows=['{"urls":\\["{e0}","{e1}"\\]}']),
        )
        await t.ready()
        sampling = {"temperature": 1.0, "max_new_tokens": 4, "ignore_eos": True}
        flags = {
            "return_logprob": True,
            "return_routed_experts": False,
            "return_indexer_topk": False,
            "lora_path": None,
        }
        prompts = [[n, *IDS[1:]] for n in range(1, 6)]
        (_, batch) = await t.go(
            Step("POST /flush_cache", {}, shows=['"worker_id":"{w0}","status":200', '"worker_id":"{w1}","status":200']),
            Step("POST /generate", {"input_ids": prompts, "sampling_params": sampling, **flags}),
        )
        answers = batch.json()
        assert len(answers) == len(prompts)
        assert [len(answer["meta_info"]["output_token_logprobs"]) for answer in answers] == [4] * 5
        async with wire(t.gateway.address) as sampler:
            long = {"input_ids": IDS, "rid": "adapter::7", "sampling_params": {**sampling, "max_new_tokens": 5000}}
            await sampler.send(request_bytes("/generate", {**long, **flags}))
            await until(lambda: sum(engine.running for engine in t.engines) == 1, "it runs")
            await t.go(Step("POST /abort_request", {"rid": "adapter::", "prefix": True}, shows=['"adapter::7"']))
            assert (await sampler.answer()).json()["meta_info"]["finish_reason"]["type"] == "abort"
        await t.go(
            Step("POST /pause_generation", {"mode": "retract"}),
            Step("POST /update_weights_from_disk", {"model_path": "x", "weight_version": "2", "flush_cache": True}),
            # Without the field engines abort whatever runs.
            Step("POST /update_weight_version", {"new_version": "3", "abort_all_requests": False}),
            Step("POST /continue_generation", {}),
        )
        (after,) = await t.go(
            Step("POST /generate", {"input_ids": IDS, "sampling_params": sampling, **flags},
                 headers={"x-forebay-min-weight-version": "3"})
        )  # fmt: skip
        check_rollout(after, 4)
        await t.go(
            Step("POST /remove_worker?url={e0}@0", status=202),
            Step("POST /remove_worker", {"url": "{e1}"}, 202),
        )
        await until(lambda: not len(t.gateway.gateway.services.fleet), "their removal")


async def test_verl() -> None:
    """Workers by URL, requests without null fields, memory given back between rollouts, tensors engine by engine."""
    async with trainer() as t:
        await t.go(*(Step(f"POST /add_worker?url={{e{n}}}", status=202, shows=added(n)) for n in (0, 1)))
        await t.ready()
        sampling = {"n": 1, "max_new_tokens": 4, "temperature": 1, "top_k": -1, "top_p": 1, "ignore_eos": True}
        body = {"input_ids": IDS, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": -1}
        (one,) = await t.go(Step("POST /generate", {**body, "top_logprobs_num": 2}))
        check_rollout(one, 4)
        assert [len(row) for row in one.json()["meta_info"]["output_top_logprobs"]] == [2] * 4
        await t.go(
            Step("POST /abort_request", {"rid": "", "abort_all": True}, shows=['"id":"{w0}","status":200']),
            Step("GET /flush_cache"),
            Step("POST /release_memory_occupation", {"tags": ["kv_cache", "weights"]}),
            Step("POST /resume_memory_occupation", {"tags": ["weights"]}),
            # Each engine gets its own shards, so a call for all of them is refused, with the way that there is.
            Step("POST /update_weights_from_tensor", {}, 400, ["POST /workers/{id}/call/update_weights_from_tensor"]),
            *(
                Step(f"POST /workers/{{w{n}}}/call/update_weights_from_tensor",
                     {"serialized_named_tensors": ["QQ=="], "load_format": None, "flush_cache": True,
                      "weight_version": "4"}, shows=['"success":true'])
                for n in (0, 1)
            ),
            Step("POST /resume_memory_occupation", {"tags": ["kv_cache"]}),
        )  # fmt: skip
        (after,) = await t.go(Step("POST /generate", body, headers={"x-forebay-min-weight-version": "4"}))
        check_rollout(after, 4)
        await t.go(*(Step(f"POST /remove_worker?url={{e{n}}}", status=202) for n in (0, 1)))
        await until(lambda: not len(t.gateway.gateway.services.fleet), "their removal")


async def test_areal() -> None:
    """Null fields, ports in strings; a pause aborts what runs, whose partial answer is sent again with its prompt."""
    async with trainer() as t:
        await t.go(
            *(Step("POST /workers", {"url": f"{{e{n}}}", "bootstrap_port": None}, 202, added(n)) for n in (0, 1))
        )
        await t.ready()
        sampling = {
            "top_p": 1.0, "top_k": 1, "max_new_tokens": 400, "temperature": 0.0, "stop_token_ids": None,
            "ignore_eos": True, "skip_special_tokens": False, "frequency_penalty": 0.0,
        }  # fmt: skip
        body = {
            "input_ids": IDS,
            "image_data": None,
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": False,
        }
        async with wire(t.gateway.address) as rollout:
            await rollout.send(request_bytes("/generate", body))
            await until(lambda: any(engine.running for engine in t.engines), "it runs")
            await t.go(Step("GET /health"), Step("POST /pause_generation", {}, shows=['"status":200']))
            partial = (await rollout.answer()).json()["meta_info"]
        assert partial["finish_reason"]["type"] == "abort"
        done = [token for _, token, _ in partial["output_token_logprobs"]]
        assert 0 < len(done) < 400
        (shown,) = await t.go(Step("GET /workers"))
        assert [(one["state"], one["is_healthy"]) for one in shown.json()["workers"]] == [("paused", True)] * 2
        # The rest, with what there is; it waits in the gateway until the update is over.
        again = {**body, "input_ids": IDS + done, "sampling_params": {**sampling, "max_new_tokens": 400 - len(done)}}
        async with wire(t.gateway.address) as rollout:
            await rollout.send(request_bytes("/generate", again))
            await until(lambda: t.gateway.state()["queued_requests"] == 1, "it waits")
            group = {"master_address": "127.0.0.1", "master_port": "29501", "world_size": 3, "group_name": "areal",
                     "backend": "nccl", "pp_rank": 0}  # fmt: skip
            await t.go(
                Step("POST /init_weights_update_group", group, 400, ["/workers/{id}/call/init_weights_update_group"]),
                *(
                    Step(f"POST /workers/{{w{n}}}/call/init_weights_update_group", {**group, "rank_offset": 1 + n})
                    for n in (0, 1)
                ),
                Step("POST /update_weights_from_disk", {"model_path": "x", "abort_all_requests": True,
                     "weight_version": "5"}, shows=['"num_paused_requests":0']),
                Step("POST /continue_generation", {}),
            )  # fmt: skip
            rest = await rollout.answer()
        meta = rest.json()["meta_info"]
        assert (rest.status, meta["finish_reason"]["type"], meta["weight_version"]) == (200, "length", "5")
        assert len(done) + len(meta["output_token_logprobs"]) == 400
        await t.go(
            Step("POST /load_lora_adapter", {"lora_name": "a", "lora_path": "x"}, 207, ["LoRA is not enabled"]),
            Step("POST /release_memory_occupation", {}),
            Step("POST /resume_memory_occupation", {"tags": None}),
        )


@pytest.mark.parametrize("who", ["trainer", "engine"])
async def test_what_dies_in_an_update_leaves_its_state_to_be_seen(who: str) -> None:
    """The next call finds in GET /workers how far it has come."""
    async with trainer() as t:
        await t.go(*(Step(f"POST /add_worker?url={{e{n}}}", status=202) for n in (0, 1)))
        await t.ready()
        await t.go(Step("POST /pause_generation", {}))
        slow: SimulatedEngine = t.engines[1]
        update = {"model_path": "x", "weight_version": "6"}
        if who == "engine":
            slow.add_fault(at="headers", do="reset", match={"path": "/update_weights_from_disk"})
            await t.go(Step("POST /update_weights_from_disk", update, 207, ['"worker_id":"{w1}","status":503']))
            expected = ["6", "default"]
        else:
            slow.add_fault(at="headers", do="delay:200", match={"path": "/update_weights_from_disk"})
            async with wire(t.gateway.address) as dying:
                await dying.send(request_bytes("/update_weights_from_disk", update))
                await slow.wait_for(lambda engine: bool(engine.log.requests_to("/update_weights_from_disk")))
                dying.reset()
            await until(lambda: not len(t.gateway.gateway.fan_outs), "the update's end")
            expected = ["6", "6"]
        (shown,) = await t.go(Step("GET /workers"))
        listed = shown.json()["workers"]
        assert [one["weight_version"] for one in listed] == expected
        assert {one["state"] for one in listed} == {"paused"}
        await t.go(Step("POST /continue_generation", {}))

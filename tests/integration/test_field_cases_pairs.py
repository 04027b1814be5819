"""Reported faults of requests over prefill and decode workers, each as the experiment that would show it here.

Named by the number of the case, like those of ``test_field_cases``; those of retries are in ``test_pairs_retry``.
"""

import pytest

from tests.fakes.pair_fleet import IDS, pair_fleet
from tests.fakes.running import running_gateway
from tests.fakes.script_engine import Reply, SeenRequest, script_engine
from tests.fakes.scripted_pair import BODY, DONE, answer_of, scripted_pair, terminal, token
from tests.fakes.wire import call

# Text so far, as SGLang streams it by default; the last ones are longer than what readers of lines take.
TEXTS = ["a" * (5_000 * (at + 1)) for at in range(60)]


async def test_field_case_23_long_cumulative_events_pass_over_a_pair() -> None:
    async with scripted_pair() as s:
        client = s.begin("/generate", {**BODY, "stream": True})
        p = await s.prefill.turn()
        await p.open()
        d = await s.decode.turn()
        blocks = [*[token(d.rid, text) for text in TEXTS], terminal(d.rid, TEXTS[-1])]
        await p.finish(terminal(p.rid), DONE)
        await d.stream(*blocks, DONE)
        answer = await answer_of(client)
        assert answer.body == b"".join([*blocks, DONE]).replace(d.rid.encode(), b"public")
        assert (await s.gateway.record()).outcome == "complete"


async def test_field_case_23_long_cumulative_events_pass_from_one_worker() -> None:
    async def script(request: SeenRequest, reply: Reply) -> None:
        await reply.start_chunked()
        for text in TEXTS:
            await reply.chunk(token(request.rid, text))
        await reply.chunk(terminal(request.rid, TEXTS[-1]) + DONE)
        await reply.end_chunked()

    async with script_engine(script) as engine, running_gateway(engine.url) as gateway:
        answer = await call(gateway.address, "/generate", {**BODY, "stream": True})
        expected = [*[token("public", text) for text in TEXTS], terminal("public", TEXTS[-1]), DONE]
        assert answer.body == b"".join(expected)


@pytest.mark.parametrize("do", ["reset", "close"])
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
async def test_field_case_32_a_decode_that_breaks_off_is_an_error_and_lets_prefill_go(engine: str, do: str) -> None:
    async with pair_fleet(engine=engine, inter_token_ms=2) as fleet:
        fleet.decodes[0].add_fault(at="event:10", do=do)
        body = {"model": "model", "prompt": IDS, "max_tokens": 30, "ignore_eos": True, "stream": True}
        answer = await fleet.call("/v1/completions", body)
        assert answer.status == 200
        *_, error, done = answer.events()
        assert (b'"error"' in error, done) == (True, b"[DONE]")
        assert (await fleet.gateway.record()).outcome == "truncated"
        await fleet.settle()  # prefill's room and blocks too

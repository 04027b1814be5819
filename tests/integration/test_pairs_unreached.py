"""One half of an SGLang pair says that it cannot reach the other one: that one is at fault, and others are tried."""

from typing import Any

import pytest

from backends.pair_types import Part
from backends.sglang.pd import part_at_fault
from tests.fakes.scripted_pair import BODY, DONE, Stage, Turn, aborted, answer_of, scripted_pair, terminal, token
from tests.integration.test_pairs_retry import first_of, other

STREAM: dict[str, Any] = {**BODY, "stream": True}
# As recorded, the first from a prefill worker whose decode worker was killed.
UNSENT = (
    "Prefill transfer failed for request rank=0 req.rid='r' req.bootstrap_room=6894854611740683554 with exception "
    "KVTransferError(bootstrap_room=6894854611740683554): Failed to send kv chunk of 6894854611740683554 to 10.0.0.2:1"
)
LOST = "Decode transfer failed for request rank=0 with exception KVTransferError: Lost connection with prefill instance"
UNMET = "Decode handshake failed for request rank=0 decode_req.req.rid='r' decode_req.req.bootstrap_room=1"

FAULTS = [
    pytest.param(Part.PREFILL, UNSENT, Part.DECODE, id="prefill cannot send"),
    pytest.param(Part.PREFILL, "Prefill bootstrap failed", Part.PREFILL, id="prefill fails by itself"),
    pytest.param(Part.PREFILL, LOST, Part.PREFILL, id="what only decode says"),
    pytest.param(Part.DECODE, LOST, Part.PREFILL, id="decode has lost prefill"),
    pytest.param(Part.DECODE, UNMET, Part.PREFILL, id="decode cannot meet prefill"),
    pytest.param(Part.DECODE, f"{UNMET}: Aborted by AbortReq.", Part.DECODE, id="somebody has aborted it"),
    pytest.param(Part.DECODE, "out of memory", Part.DECODE, id="decode fails by itself"),
]


@pytest.mark.parametrize(("part", "message", "expected"), FAULTS)
def test_the_half_at_fault_is_told_from_what_the_other_says(part: Part, message: str, expected: Part) -> None:
    assert part_at_fault(part, message) is expected


async def _answers(p: Turn, d: Turn) -> None:
    await d.stream(token(d.rid), terminal(d.rid), DONE)
    await p.finish(terminal(p.rid), DONE)


def _holder(stages: list[Stage], turn: Turn) -> Stage:
    return next(one for one in stages if turn.request in one.engine.requests)


async def test_prefill_that_cannot_send_has_the_request_go_to_another_decode_worker() -> None:
    """Mutation tried: prefill is blamed; then no pair is left, and the client gets 502."""
    async with scripted_pair(prefills=1, decodes=2) as s:
        client = s.begin("/generate", STREAM)
        failing = await s.prefill.turn()
        await failing.open()
        dying = await first_of(s.decodes)
        await failing.finish(aborted(failing.rid, UNSENT), DONE)
        await _holder(s.decodes, dying).told(dying.rid)
        await dying.stream(aborted(dying.rid), DONE)
        p = await s.prefill.turn()
        await p.open()
        d = await other(s.decodes, dying).turn()
        await _answers(p, d)
        answer = await answer_of(client)
        assert (answer.status, answer.headers["x-forebay-attempts"]) == (200, "2")


@pytest.mark.parametrize("message", [LOST, UNMET], ids=["lost", "unmet"])
async def test_decode_that_cannot_reach_prefill_has_the_request_go_to_another_prefill_worker(message: str) -> None:
    """Mutation tried: decode is blamed; then no pair is left, and the client gets 502."""
    async with scripted_pair(prefills=2, decodes=1) as s:
        client = s.begin("/generate", STREAM)
        bad = await first_of(s.prefills)
        await bad.open()
        failing = await s.decode.turn()
        await failing.stream(aborted(failing.rid, message), DONE)
        await _holder(s.prefills, bad).told(bad.rid)
        await bad.finish(aborted(bad.rid), DONE)
        p = await other(s.prefills, bad).turn()
        await p.open()
        d = await s.decode.turn()
        await _answers(p, d)
        answer = await answer_of(client)
        assert (answer.status, answer.headers["x-forebay-attempts"]) == (200, "2")

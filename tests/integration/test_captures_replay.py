"""Every captured answer of a real SGLang 0.5.23 on its way through the gateway.

Status and body are the engine's own, byte for byte, but for the ids. What differs on purpose is in one table.
"""

import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import unquote

import pytest

from gateway.routes import ROUTES
from tests.fakes.replay_engine import (
    CapturedAnswer,
    captured_answer,
    is_batch,
    pieces_of,
    random_pieces,
    replay_engine,
    samples_of,
)
from tests.fakes.replaying import Differs, Setup
from tests.fakes.running import running_gateway
from tests.fakes.wire import Answer
from tests.simulator.wire import CAPTURES, load_capture

UNREADABLE = Differs(400, "invalid_request", "a body that is no JSON object reaches no engine")
INTERNAL_FIELD = Differs(400, "invalid_request", "routing fields are the gateway's to set")
BAD_ID = Differs(400, "invalid_request", "ids are the gateway's business, so it is the gateway that refuses them")
TRUE_STATUS = Differs(400, None, "an error event that comes first becomes the answer's status and body", is_sent=True)
FULL = Differs(503, "overloaded", "a full queue is a 503 in the gateway's shape, in streams too", is_sent=True)

EXCEPTIONS: dict[str, Differs] = {
    "http/gen_val_badjson": UNREADABLE,
    "http/gen_val_emptybody": UNREADABLE,
    "http/gen_val_array": UNREADABLE,
    "http/gen_val_nan": UNREADABLE,
    "http/chat_badjson": UNREADABLE,
    "http/gen_val_bootstrap": INTERNAL_FIELD,
    "http/gen_val_dprank": INTERNAL_FIELD,
    "http/gen_val_dprank0": INTERNAL_FIELD,
    "http/gen_val_dprank_old": INTERNAL_FIELD,
    "http_dp2/dp_batch": INTERNAL_FIELD,
    "http_dp2/dp_neg": INTERNAL_FIELD,
    "http_dp2/dp_old1": INTERNAL_FIELD,
    "http_dp2/dp_rank0": INTERNAL_FIELD,
    "http_dp2/dp_rank1": INTERNAL_FIELD,
    "http_dp2/dp_rank2": INTERNAL_FIELD,
    **{f"http_dp2/incr_retracted_{name}": INTERNAL_FIELD for name in ("0", "1", "0_logprob", "1_logprob")},
    **{f"http_dp2/incr_waiting_{name}": INTERNAL_FIELD for name in ("0", "1")},
    **{f"http_dp2/queue_{name}": INTERNAL_FIELD for name in ("0_unary", "1_unary", "2_unary", "3_unary", "4_chat")},
    "http_dp2/queue_5_chatstream": INTERNAL_FIELD,
    "http_dp2/extra_key": INTERNAL_FIELD,
    "http_dp2/too_big_for_pool": INTERNAL_FIELD,
    "http/gen_val_rid_empty": BAD_ID,
    "http/gen_val_rid_int": BAD_ID,
    "http/gen_val_rid_dup": BAD_ID,
    "http/gen_val_rid_len": BAD_ID,
    "http/gen_stream_err_flat": Differs(400, "invalid_request", "flat output and stream exclude each other"),
    "http/gen_val_toplogprob_big": Differs(400, "invalid_request", "more than a vocabulary kills the engine"),
    "http/gen_stream_err_batchmixed": TRUE_STATUS,
    "http/gen_stream_err_noinput": TRUE_STATUS,
    "http/gen_stream_err_temp": TRUE_STATUS,
    "http/gen_stream_err_toolong": TRUE_STATUS,
    "http/gen_stream_err_schema": Differs(
        400, "invalid_request", "an abort with a status that comes first is one", is_sent=True
    ),
    "http/chat_wrongmodel": Differs(404, "model_not_found", "the name chooses the pool, and none has it"),
    "http/get_generate": Differs(405, "method_not_allowed", "the gateway's own refusal"),
}
# The same requests without the fields that clients may not send: what the engine said, and what is left different.
WITHOUT_ROUTING = {name: None for name, one in EXCEPTIONS.items() if one is INTERNAL_FIELD} | dict.fromkeys(
    [f"http_dp2/{name}" for name in ("queue_2_unary", "queue_3_unary", "queue_4_chat", "queue_5_chatstream")], FULL
)
WITHOUT_ROUTING["http_dp2/incr_retracted_1_logprob"] = FULL


def _request_line(name: str) -> list[str]:
    return load_capture(name).request.split(b"\r\n", 1)[0].decode().split(" ")


ALL = [
    name
    for name in sorted(f"{path.parent.name}/{path.stem}" for path in CAPTURES.glob("http*/*.http"))
    if not name.startswith("http_pd/") and _request_line(name)[1] in ROUTES
]


@pytest.fixture(scope="module")
async def single(anyio_backend: object) -> AsyncIterator[Setup]:
    """An engine with one rank; samples stay with it, since its answers to several were captured whole."""
    async with replay_engine() as engine, running_gateway(engine.url, native_n=True, policy="least-loaded") as gateway:
        yield Setup(engine, gateway)


@pytest.fixture(scope="module")
async def two_ranks(anyio_backend: object) -> AsyncIterator[Setup]:
    """An engine with two ranks and incremental output."""
    async with (
        replay_engine(has_two_ranks=True) as engine,
        running_gateway(engine.url, policy="least-loaded") as gateway,
    ):
        yield Setup(engine, gateway)


@pytest.fixture
def setup(name: str, single: Setup, two_ranks: Setup) -> Setup:
    """The pair that stands for the server that the capture came from."""
    return two_ranks if name.startswith("http_dp2/") else single


def public_ids(answer: CapturedAnswer, request: dict[str, Any], base: str) -> list[str]:
    """What the client is to read in the place of each id in the answer."""
    rid = request.get("rid")
    if isinstance(rid, str):
        base = rid
    if samples_of(request) > 1:
        has_one_id = not answer.is_stream and "sampling_params" not in request
        return [base if has_one_id else f"{base}_{index}" for index in range(len(answer.ids))]
    if is_batch(request):
        return rid if isinstance(rid, list) else [f"{base}_{index}" for index in range(len(answer.ids))]
    return [base]


def assert_engines_answer(got: Answer, answer: CapturedAnswer, request: dict[str, Any]) -> None:
    """The client has the engine's bytes, under ids that it knows."""
    public = public_ids(answer, request, unquote(got.headers["x-request-id"]))
    ids = dict(zip(answer.ids, [json.dumps(one, ensure_ascii=False)[1:-1].encode() for one in public], strict=False))
    if answer.body.startswith((b'{"id":"msg_', b'{"id":"resp_')):
        ids = {old: old for old in answer.ids}  # the engine's own names for its answers, which are no request's id
    assert got.status == answer.status
    assert got.body == answer.with_ids(ids)
    assert got.is_whole
    kept = {name: value for name, value in answer.headers if name not in ("date", "server")}
    assert {name: got.headers[name] for name in kept} == kept


def assert_differs(got: Answer, differs: Differs, answer: CapturedAnswer | None) -> None:
    """The client has the answer that the table says."""
    assert got.status == differs.status
    assert got.headers["content-type"] == "application/json"
    assert got.is_whole
    if differs.type is None:
        assert answer is not None
        assert got.body == answer.events[0]
        return
    error = got.json()["error"]
    assert (error["type"], error["code"]) == (differs.type, differs.status)
    assert error["request_id"] == got.headers["x-request-id"]
    assert "sglang/srt" not in error["message"]


@pytest.mark.parametrize("name", ALL)
async def test_captured_request(name: str, setup: Setup) -> None:
    capture = load_capture(name)
    answer = captured_answer(capture)
    got = await setup.replay(capture, answer, random_pieces(name))
    differs = EXCEPTIONS.get(name)
    if differs is not None:
        assert_differs(got, differs, answer)
        assert len(setup.engine.bodies) == int(differs.is_sent)
        return
    assert answer is not None
    assert_engines_answer(got, answer, json.loads(capture.body))
    assert sent_without_our_fields(setup.engine.bodies[0]) == sent_without_our_fields(json.loads(capture.body))


def sent_without_our_fields(body: dict[str, Any]) -> dict[str, Any]:
    """A request's body but for what the gateway sets."""
    return {key: value for key, value in body.items() if key not in ("rid", "request_id", "routed_dp_rank")}


@pytest.mark.parametrize("name", sorted(WITHOUT_ROUTING))
async def test_captured_request_without_routing_fields(name: str, setup: Setup) -> None:
    capture = load_capture(name)
    fields = ("routed_dp_rank", "data_parallel_rank", "bootstrap_host", "bootstrap_port", "bootstrap_room")
    request = {key: value for key, value in json.loads(capture.body).items() if key not in fields}
    answer = captured_answer(capture)
    assert answer is not None
    got = await setup.replay(capture, answer, random_pieces(name), json.dumps(request).encode())
    differs = WITHOUT_ROUTING[name]
    if differs is not None:
        assert_differs(got, differs, answer)
        assert "The request queue is full." in got.json()["error"]["message"]
    else:
        assert_engines_answer(got, answer, request)


@pytest.mark.parametrize("name", ["http/gen_stream_batch2", "http/chat_n2_stream"])
@pytest.mark.parametrize("size", [1, 5, 33, 511, 100_000])
async def test_framing_makes_no_difference(name: str, size: int, setup: Setup) -> None:
    capture = load_capture(name)
    answer = captured_answer(capture)
    assert answer is not None
    got = await setup.replay(capture, answer, pieces_of(size))
    assert_engines_answer(got, answer, json.loads(capture.body))


@pytest.mark.parametrize("name", ["http/gen_text", "http/gen_stream_text", "http/chat_unary"])
async def test_an_engine_that_closes_without_a_byte_is_told_as_unavailable(name: str, setup: Setup) -> None:
    got = await setup.replay(load_capture(name), None, pieces_of(1))
    assert_differs(got, Differs(503, "unavailable", "no byte came"), None)
    assert got.headers["retry-after"] == "1"


def test_every_capture_of_a_forwarded_route_is_replayed() -> None:
    assert set(EXCEPTIONS) <= set(ALL)
    assert len(ALL) > 170

"""vLLM's part of a request over a pair: the bodies of the two legs, and the handoff in prefill's answer. Pure.

With NIXL, prefill is a unary request for one token, and its answer names the blocks that decode fetches. Mooncake needs
nothing of the answer but a transfer id, which the gateway makes and gives to both. Both legs carry the same id in
``x-request-id``, which releases before 0.13 need.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
import orjson

from backends.body_edit import edited
from backends.errors import AnswerMalformed
from backends.json_body import JsonBody

GENERATE: Final = "/inference/v1/generate"
PAIRED_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", GENERATE})
PARAMS: Final = "kv_transfer_params"
# What NIXL's prefill is asked with.
NIXL_PREFILL: Final = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)
# Whatever could end prefill in another way than by its length, or asks for something of its output.
_LONGER = ("min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output")
_OF_OUTPUT = ("logprobs", "top_logprobs", "echo", "stream_options", "stream_interval")
_OFF = (b"", b"false")


class HandoffUnusable(AnswerMalformed):
    """Prefill's answer has a handoff that would end the decode worker's process, or cannot be one."""


class _Params(msgspec.Struct):
    do_remote_prefill: bool
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_block_ids: list[list[int]]


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_answer = msgspec.json.Decoder(_Answer)
_params = msgspec.json.Decoder(_Params)


def needs_one_worker(path: str, body: JsonBody, *, is_batch: bool) -> str:
    """Why a request is to be served by one worker alone; empty if it may go over a pair.

    Args:
        path: The engine's route.
        body: The client's, for one sample.
        is_batch: It has several prompts.
    """
    if path not in PAIRED_PATHS:
        return "the route has no fields for a pair"
    if is_batch:
        return "one answer can hand over one prompt"
    if body.text("echo") not in _OFF and (body.text("logprobs") or body.text("prompt_logprobs")):
        return "decode cannot tell the log-probabilities of a prompt that it echoes"
    if body.text("use_beam_search") not in _OFF:
        return "a beam's sequences cannot share one handoff"
    return ""


def prefill_body(path: str, body: JsonBody, params: bytes = NIXL_PREFILL) -> JsonBody:
    """The prefill leg's body: one token, in one document, since only those hold a handoff.

    Args:
        path: One of ``PAIRED_PATHS``.
        body: The client's, for one sample.
        params: JSON of ``kv_transfer_params``.

    Raises:
        JsonBodyError: The sampling parameters are no object.
    """
    changes = {"stream": b"false", PARAMS: params}
    one_token = {"n": b"1", "max_tokens": b"1", "ignore_eos": b"true"}
    if path == GENERATE:
        changes["sampling_params"] = _sampling(body, one_token, (*_LONGER, "logprobs"))
        return edited(body, changes, ("stream_options",))
    if path == "/v1/chat/completions":
        one_token["max_completion_tokens"] = b"1"
    return edited(body, {**changes, **one_token}, (*_LONGER, *_OF_OUTPUT, "best_of"))


def decode_body(path: str, body: JsonBody, handoff: bytes, *, is_release: bool = False) -> JsonBody:
    """The decode leg's body, but for the mode of its answer: the client's, with prefill's handoff as it came.

    The prompt's log-probabilities are prefill's to tell. A client that wants them in a stream is left to the engine,
    which refuses that.

    Args:
        path: One of ``PAIRED_PATHS``.
        body: The client's, for one sample.
        handoff: JSON of ``kv_transfer_params``.
        is_release: Nobody gets the answer: one token, only so that the blocks are taken over.

    Raises:
        ValueError: There is no handoff.
        JsonBodyError: The sampling parameters are no object.
    """
    if not handoff:
        raise ValueError("decode without a handoff would prefill by itself")
    changes, inner = {PARAMS: handoff}, dict[str, bytes]()
    is_streamed = body.text("stream").lower() == b"true"
    removed = [] if is_streamed else ["prompt_logprobs"]
    if is_release:
        removed.append("min_tokens")
        inner = {"n": b"1", "max_tokens": b"1"}
    if path == GENERATE:
        if inner or body.text("sampling_params"):
            changes["sampling_params"] = _sampling(body, inner, removed)
        return edited(body, changes, removed)
    if is_release and path == "/v1/chat/completions":
        inner["max_completion_tokens"] = b"1"
    return edited(body, {**changes, **inner}, removed)


def _sampling(body: JsonBody, changes: dict[str, bytes], removed: Sequence[str]) -> bytes:
    return edited(JsonBody.parse(body.text("sampling_params") or b"{}", frozenset(changes)), changes, removed).raw


def handoff_in(answer: bytes) -> bytes:
    """The handoff in prefill's whole answer, as it stands there; empty if it has none.

    Args:
        answer: The body, which has ended well.

    Raises:
        HandoffUnusable: It has one that decode must not be given: engines do not check it, and die.
    """
    try:
        params = bytes(_answer.decode(answer).kv_transfer_params)
        if params == b"null":
            return b""
        found = _params.decode(params)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise HandoffUnusable(f"the prefill worker's handoff cannot be used: {exc}") from exc
    if not (found.do_remote_prefill and found.remote_engine_id and found.remote_request_id and found.remote_host):
        raise HandoffUnusable("the prefill worker's handoff cannot be used: it is incomplete")
    return params


# Mooncake.

# For so long prefill keeps a prompt (VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT of 0.32.0, seconds); then the transfer fails.
MOONCAKE_LEASE_S: Final = 480.0


class _MooncakeRank(msgspec.Struct):
    engine_id: str


_ranks = msgspec.json.Decoder(dict[int, _MooncakeRank])


def mooncake_engine_ids(answer: bytes, dp_size: int) -> tuple[str, ...]:
    """Engine ids by rank, from what a prefill worker's bootstrap server says at ``/query``.

    Args:
        answer: JSON by rank.
        dp_size: Ranks of the worker.

    Raises:
        msgspec.DecodeError: It is not of that shape.
        ValueError: A rank is missing: it has not registered yet.
    """
    ranks = _ranks.decode(answer)
    if missing := [rank for rank in range(dp_size) if rank not in ranks or not ranks[rank].engine_id]:
        raise ValueError(f"ranks {missing} have not registered at the bootstrap server yet")
    return tuple(ranks[rank].engine_id for rank in range(dp_size))


def transfer_id(fresh_id: str) -> str:
    """The id under which both legs know a transfer, made from a fresh one."""
    return f"xfer-{fresh_id}"


def mooncake_prefill(transfer: str) -> bytes:
    """What Mooncake's prefill is asked with."""
    return orjson.dumps({"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer})


def mooncake_handoff(transfer: str, *, engine_id: str, bootstrap_address: str) -> bytes:
    """What Mooncake's decode is asked with, which is known before prefill has answered.

    Args:
        transfer: What prefill was given.
        engine_id: Of the prefill worker's rank, as its bootstrap server tells it, else ``<id>_dp<rank>``.
        bootstrap_address: ``http://host:port`` of that server.

    Raises:
        ValueError: One of them is missing.
    """
    if not (transfer and engine_id and bootstrap_address):
        raise ValueError("decode cannot fetch a prompt from nowhere")
    return orjson.dumps(
        {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer,
            "remote_engine_id": engine_id,
            "remote_bootstrap_addr": bootstrap_address,
        }
    )

"""A stream of engine events folded into the unary answer that the engine would have given. Pure.

Used where the engine is asked for a stream although the client wants one JSON document. While it lasts nothing has
been sent to the client, so an error keeps its true status however late it comes.
"""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from backends.types import EngineKind
from gateway.errors import EngineRefused
from gateway.fold_native import CumulativeFold, IncrementalFold
from gateway.fold_openai import ChunkFold
from gateway.fold_values import FoldIncomplete
from gateway.routes import Dialect

__all__ = ["Fold", "FoldIncomplete", "fold_changes", "new_fold", "stays_unary"]

# Refused or incomplete in streams. SGLang leaves out of a chat stream the logprobs of tokens that gave no text. vLLM
# leaves out the prompt's logprobs beside echoed text, and refuses stream_options where the client asks for no stream.
_UNARY_ONLY: Mapping[tuple[EngineKind, Dialect], frozenset[str]] = {
    (EngineKind.SGLANG, Dialect.NATIVE): frozenset({"return_flat_raw_output_top_logprobs"}),
    (EngineKind.SGLANG, Dialect.CHAT): frozenset(
        {
            "logprobs",
            "return_flat_raw_output_top_logprobs",
            "return_meta_info",
            "return_prompt_token_ids",
            "return_token_ids",
        }
    ),
    (EngineKind.VLLM, Dialect.CHAT): frozenset(
        {"prompt_logprobs", "return_flat_raw_output_top_logprobs", "stream_options"}
    ),
    (EngineKind.VLLM, Dialect.COMPLETIONS): frozenset(
        {"echo", "prompt_logprobs", "return_flat_raw_output_top_logprobs", "stream_options"}
    ),
}


class Fold(Protocol):
    """One stream on its way to become one answer.

    Ids stay as they are in the events, so either the blocks or the answer go through the id map.
    """

    def feed(self, block: bytes) -> None:
        """Take a block of whole events; anything behind the end marker or an error is ignored.

        Raises:
            AnswerTooLarge: What has to be held passes the limit.
            AnswerMalformed: An event is not of the engine's shape.
        """

    def result(self) -> bytes | EngineRefused:
        """The unary body, once the stream has ended, or the engine's error.

        An error event, and an abort that carries a status, refuse the whole answer, whatever came before. An abort
        without a status is an answer: what was generated until then.

        Raises:
            FoldIncomplete: The end marker is missing, or an item of the answer never came.
            AnswerMalformed: The last event is not of the engine's shape.
        """


def fold_changes(dialect: Dialect, engine: EngineKind) -> dict[str, bytes]:
    """JSON of the fields that the gateway sets in the request for a stream that can be folded.

    A unary answer always holds the usage, so a stream of chunks is always asked for it, whatever the client's
    ``stream_options`` say.
    """
    changes = {"stream": b"true"}
    if dialect is not Dialect.NATIVE or engine is EngineKind.VLLM:
        changes["stream_options"] = b'{"include_usage":true}'
    return changes


def stays_unary(dialect: Dialect, engine: EngineKind, fields: Mapping[str, bytes | msgspec.Raw]) -> bool:
    """Whether a request asks for something that the engine gives in unary answers only.

    Args:
        dialect: Shapes of request and answer.
        engine: Who answers.
        fields: Raw JSON of the request's top-level fields.
    """
    names = _UNARY_ONLY.get((engine, dialect), frozenset())
    return any(bytes(fields[name]) not in (b"null", b"false") for name in names if name in fields)


def new_fold(
    dialect: Dialect,
    engine: EngineKind,
    *,
    limit_bytes: int,
    count: int = 1,
    is_list: bool = False,
    is_incremental: bool = False,
    supplied: Mapping[str, bytes] | None = None,
) -> Fold:
    """A fold for one stream.

    Args:
        dialect: Shapes of request and answer; native on vLLM is its token route ``/inference/v1/generate``.
        engine: Who answers.
        limit_bytes: Bound of what is held, which is about the size of the answer.
        count: Items of the answer: prompts times samples.
        is_list: SGLang's native answer is a list: a batch, even of one, or more than one sample.
        is_incremental: SGLang's native events hold deltas, as its ``/server_info`` tells.
        supplied: JSON of top-level fields that a stream of chunks does not tell; what it tells wins.

    Raises:
        ValueError: The dialect has no streams.
    """
    if dialect is Dialect.EMBEDDINGS:
        raise ValueError("embeddings are never streamed")
    if dialect is not Dialect.NATIVE or engine is EngineKind.VLLM:
        return ChunkFold(dialect, engine, count, limit_bytes, supplied or {})
    if is_incremental:
        return IncrementalFold(count, limit_bytes, is_list=is_list)
    return CumulativeFold(count, limit_bytes, is_list=is_list)

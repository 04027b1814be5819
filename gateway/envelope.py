"""What the gateway reads from a request before it is placed. Pure.

One parse of the top level; everything else of the body stays the client's bytes. What is refused here reaches no
worker.
"""

import re
from collections.abc import Mapping, Sequence
from urllib.parse import quote

import msgspec
import numpy as np

from backends.json_body import JsonBody, JsonBodyError
from backends.upstream.base import Headers
from gateway.errors import InvalidRequest
from gateway.native_request import NativeRequest
from gateway.routes import Dialect, Route
from gateway.screening import (
    INTERNAL_FIELDS,
    Sampling,
    refuse_deadly,
    refuse_internal,
    refuse_oversized_logprobs,
)
from routers.member import MAX_VERSION_DIGITS

FLAT_OUTPUT = "return_flat_raw_output_top_logprobs"
# Keys that the gateway reads or writes, so that two parsers must not disagree on their value.
READ_FIELDS = INTERNAL_FIELDS | {
    "rid",
    "stream",
    "model",
    "n",
    "text",
    "input_ids",
    "input_embeds",
    "prompt",
    "sampling_params",
    "logprobs",
    "return_logprob",
    "top_logprobs",
    "top_logprobs_num",
    "seed",
    "best_of",
    "use_beam_search",
    "background",
    "priority",
    "session_id",
    "session_params",
    "return_spec_tokens_details",
    FLAT_OUTPUT,
}

_NATIVE = Dialect.NATIVE
PASSED_HEADERS = frozenset({b"content-type", b"traceparent", b"tracestate", b"x-smg-routing-key", b"x-session-id"})
PASSED_HEADER_PREFIX = b"x-sglext-"
MIN_WEIGHT_VERSION = b"x-forebay-min-weight-version"
MAX_ID_CHARS = 256
# No batch of a trainer is near it, and an engine that is asked for a million samples is gone for everybody.
MAX_SEQUENCES = 65_536
_LAX_COUNT = re.compile(rb'"?\s*\+?(\d{1,400})(?:\.0*)?([eE]\+?\d+)?\s*"?')
_COUNT_DIGITS = 6
_LAX_TRUE = frozenset({b"true", b'"true"', b'"1"', b'"yes"', b'"on"', b'"y"', b'"t"', b"1", b"1.0"})
_strings = msgspec.json.Decoder(list[str])
_items = msgspec.json.Decoder(list[msgspec.Raw])
_string = msgspec.json.Decoder(str)
_LIST_OF_LISTS = re.compile(rb"\[\s*\[")
_LIST_OF_ITEMS = re.compile(rb'\[\s*["\[{]')
_LINE_BREAK = re.compile(rb"[\r\n\0]")
# Shorter texts are counted sooner without numpy.
_COUNT_WITH_NUMPY_BYTES = 4096
_LIST_OF_STRINGS = re.compile(rb'\[\s*"')


_sampling = msgspec.json.Decoder(Sampling)
_samplings = msgspec.json.Decoder(list[Sampling])


class Envelope(msgspec.Struct, frozen=True):
    """What routing and answering need to know of a request.

    Attributes:
        body: The body, parsed at its top level only.
        is_stream: The client wants events.
        model: The requested model, ``None`` if it names none.
        public_id: The id that the client knows.
        item_ids: Public ids of a batch's items; the public id alone for a single request.
        batch_size: Items of a batch, ``None`` for a single request.
        samples: Samples per prompt, ``n``.
        prompt_tokens: Tokens of all prompts where they came as ids, else 0.
        dp_rank: Rank that the request is pinned to.
        worker_id: Worker that the request is pinned to.
        stickiness_key: Session key.
        headers: The client's headers that go to the engine.
        min_weight_version: Version below which a worker's weights must not be, ``None`` for any.
        native: The request in vLLM's terms; ``None`` where no vLLM worker may serve it.
    """

    body: JsonBody
    is_stream: bool
    model: str | None
    public_id: str
    item_ids: tuple[str, ...]
    batch_size: int | None
    samples: int
    prompt_tokens: int
    dp_rank: int | None
    worker_id: str | None
    stickiness_key: str | None
    headers: Headers
    min_weight_version: int | None = None
    native: NativeRequest | None = None

    @property
    def sequences(self) -> int:
        """Sequences that the engine runs for it."""
        return (self.batch_size or 1) * self.samples

    @property
    def header_id(self) -> bytes:
        """The public id as a header value; characters outside of printable ASCII are percent-encoded."""
        return header_value(self.public_id)


def header_value(text: str) -> bytes:
    """``text`` as a header value."""
    if text.isascii() and text.isprintable():
        return text.encode()
    return quote(text, safe="!\"#$&'()*+,/:;<=>?@[]^`{|}~ ").encode()


def read_headers(headers: Headers) -> dict[bytes, bytes]:
    """Headers by name; of repeated ones the first."""
    return dict(reversed(headers))


def request_id_of(headers: Mapping[bytes, bytes]) -> str | None:
    """The client's ``x-request-id``.

    Raises:
        InvalidRequest: Empty, too long, or not printable.
    """
    value = headers.get(b"x-request-id")
    if value is None:
        return None
    return _checked_id(value.decode("latin-1"), "x-request-id")


def parse_envelope(
    route: Route,
    raw: bytes,
    headers: Headers,
    by_name: Mapping[bytes, bytes],
    *,
    fallback_id: str,
    max_response_bytes: int,
) -> Envelope:
    """Read a request.

    Args:
        route: The route that was asked for.
        raw: The whole body.
        headers: All headers, lower-case names.
        by_name: The same by name.
        fallback_id: Public id when the client gives none.
        max_response_bytes: Bound of the answer, for refusing requests that are sure to pass it.

    Raises:
        InvalidRequest: The message says what is wrong; nothing was sent anywhere.
    """
    try:
        body = JsonBody.parse(raw, READ_FIELDS)
    except JsonBodyError as exc:
        raise InvalidRequest(str(exc), param=exc.key) from exc
    refuse_internal(body)
    is_stream = _is_stream(body, route)
    if is_stream and FLAT_OUTPUT in body.fields and body.text(FLAT_OUTPUT).lower() in _LAX_TRUE:
        raise InvalidRequest(f"{FLAT_OUTPUT} needs an answer in one piece, so not with stream", param=FLAT_OUTPUT)
    refuse_deadly(body, route)
    batch_size, prompt_tokens = _prompt(body, route)
    public_id, item_ids = _public_ids(body, by_name, batch_size, fallback_id)
    samples = _samples(body, route)
    if (batch_size or 1) * samples > MAX_SEQUENCES:
        raise InvalidRequest(f"the request asks for more than {MAX_SEQUENCES} sequences", param="n")
    if route.dialect is _NATIVE and not is_stream:
        refuse_oversized_logprobs(body, prompt_tokens if batch_size is None else 0, max_response_bytes)
    return Envelope(
        body=body,
        is_stream=is_stream,
        model=_model(body),
        public_id=public_id,
        item_ids=item_ids,
        batch_size=batch_size,
        samples=samples,
        prompt_tokens=prompt_tokens,
        dp_rank=_dp_rank(by_name),
        worker_id=_pinned_worker(by_name),
        stickiness_key=_stickiness(by_name),
        headers=_passed(headers),
        min_weight_version=_min_weight_version(by_name),
    )


def _is_stream(body: JsonBody, route: Route) -> bool:
    if "stream" not in body.fields:
        return False
    text = body.text("stream")
    if route.dialect is _NATIVE:
        return text == b"true"
    return text.lower() in _LAX_TRUE  # the engines' OpenAI routes read these as true


def _model(body: JsonBody) -> str | None:
    text = body.text("model") if "model" in body.fields else b""
    if not text:
        return None
    try:
        return _string.decode(text)
    except msgspec.DecodeError as exc:
        raise InvalidRequest("'model' must be a string", param="model") from exc


def _checked_id(value: str, where: str) -> str:
    if not value:
        raise InvalidRequest(f"{where} is empty; leave it out to have one made", param=where)
    if len(value) > MAX_ID_CHARS or not value.isprintable():
        raise InvalidRequest(f"{where} must be 1 to {MAX_ID_CHARS} printable characters", param=where)
    return value


def _public_ids(
    body: JsonBody, by_name: Mapping[bytes, bytes], batch_size: int | None, fallback_id: str
) -> tuple[str, tuple[str, ...]]:
    """The request's public id, and one for each item."""
    text = body.text("rid") if "rid" in body.fields else b""
    header_id = request_id_of(by_name)
    if text.startswith(b"["):
        return header_id or fallback_id, _listed_ids(text, batch_size)
    base = header_id or fallback_id
    if text:
        try:
            base = _checked_id(_string.decode(text), "rid")
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise InvalidRequest("'rid' must be a string, or a list of them for a batch", param="rid") from exc
    if batch_size is None:
        return base, (base,)
    return base, tuple(f"{base}_{index}" for index in range(batch_size))


def _listed_ids(text: bytes, batch_size: int | None) -> tuple[str, ...]:
    try:
        ids = _strings.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise InvalidRequest("'rid' must be a string, or a list of them for a batch", param="rid") from exc
    if batch_size is None or len(ids) != batch_size:
        count = "no batch" if batch_size is None else f"{batch_size} items"
        raise InvalidRequest(f"'rid' is a list of {len(ids)}, the request has {count}", param="rid")
    if len(set(ids)) != len(ids):
        raise InvalidRequest("'rid' holds the same id more than once", param="rid")
    return tuple(_checked_id(one, "rid") for one in ids)


def _prompt(body: JsonBody, route: Route) -> tuple[int | None, int]:
    """Items of a batch (``None`` for a single request), and tokens where the prompts came as ids."""
    if route.dialect is _NATIVE:
        return _native_prompt(body)
    if route.dialect is Dialect.COMPLETIONS:
        if "prompt" in body.id_counts:
            return None, body.id_counts["prompt"]
        text = body.text("prompt")
        if _LIST_OF_STRINGS.match(text) or _LIST_OF_LISTS.match(text):
            return _count(text), _commas(text) + 1 if _LIST_OF_LISTS.match(text) else 0
        return None, _commas(text) + 1 if text.startswith(b"[") else 0
    if route.dialect is Dialect.EMBEDDINGS:
        text = body.text("input")
        return (_count(text) if _LIST_OF_ITEMS.match(text) else None), 0
    return None, 0


def _native_prompt(body: JsonBody) -> tuple[int | None, int]:
    fields = body.fields
    tokens = body.id_counts.get("input_ids", 0)
    ids = b"" if tokens or "input_ids" not in fields else body.text("input_ids")
    text = body.text("text") if "text" in fields else b""
    if ids.startswith(b"["):
        tokens = _commas(ids) + 1
    if text:
        return (_count(text) if text.startswith(b"[") else None), tokens
    if _LIST_OF_LISTS.match(ids):
        return _count(ids), tokens
    embeddings = body.text("input_embeds") if "input_embeds" in fields else b""
    if embeddings and not tokens and not ids and re.match(rb"\[\s*\[\s*\[", embeddings):
        return _count(embeddings), 0
    return None, tokens


def _commas(text: bytes) -> int:
    """Number of commas in ``text``."""
    if len(text) < _COUNT_WITH_NUMPY_BYTES:
        return text.count(b",")
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == ord(",")))


def _count(text: bytes) -> int:
    """Items of a list, at least one; what is a list here was seen to be valid before."""
    return max(len(_items.decode(text)), 1)


def _samples(body: JsonBody, route: Route) -> int:
    """``n`` where it can be read, in any of the spellings that the engines take; they judge what cannot."""
    if route.dialect is not _NATIVE:
        if "n" not in body.fields:
            return 1
        match = _LAX_COUNT.fullmatch(body.text("n"))
        if match is None:
            return 1
        digits = match[1].lstrip(b"0")
        if len(digits) > _COUNT_DIGITS or (digits and match[2]):
            return MAX_SEQUENCES + 1
        return max(int(digits or b"0"), 1)
    text = body.text("sampling_params")
    if text.find(b'"n"') < 0 and text.find(b"\\") < 0:
        return 1
    try:
        found: Sequence[Sampling] = _samplings.decode(text) if text.startswith(b"[") else [_sampling.decode(text)]
    except msgspec.DecodeError:
        return 1
    return max([sampling.n or 1 for sampling in found] + [1])


def _passed(headers: Headers) -> Headers:
    """The headers that go on to the engine."""
    passed = [h for h in headers if h[0] in PASSED_HEADERS or h[0].startswith(PASSED_HEADER_PREFIX)]
    for name, value in passed:
        if _LINE_BREAK.search(value) or _LINE_BREAK.search(name):
            where = name.decode("latin-1")
            raise InvalidRequest(f"the header {where!r} holds a line break or NUL", param=where)
    return passed


def _dp_rank(by_name: Mapping[bytes, bytes]) -> int | None:
    value = by_name.get(b"x-data-parallel-rank")
    if value is None:
        return None
    if not value.isdigit() or len(value) > 6:
        raise InvalidRequest("x-data-parallel-rank must be a rank, 0 or above", param="x-data-parallel-rank")
    return int(value)


def _min_weight_version(by_name: Mapping[bytes, bytes]) -> int | None:
    value = by_name.get(MIN_WEIGHT_VERSION)
    if value is None:
        return None
    if not value.isdigit() or len(value) > MAX_VERSION_DIGITS:
        name = MIN_WEIGHT_VERSION.decode()
        raise InvalidRequest(f"{name} must be a version in decimal digits, {MAX_VERSION_DIGITS} at most", param=name)
    return int(value)


def _pinned_worker(by_name: Mapping[bytes, bytes]) -> str | None:
    value = by_name.get(b"x-forebay-worker")
    return None if value is None else value.decode("latin-1")


def _stickiness(by_name: Mapping[bytes, bytes]) -> str | None:
    value = by_name.get(b"x-smg-routing-key") or by_name.get(b"x-session-id")
    return None if value is None else value.decode("latin-1")

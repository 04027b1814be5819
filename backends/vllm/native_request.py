"""SGLang's native request as requests to vLLM's token route, ``/inference/v1/generate``. Pure.

That route takes one prompt in ids, so a batch becomes one request for each prompt, here called a leg. The samples of a
prompt stay one leg, but for greedy ones, of which vLLM refuses more than one. Values go as the client wrote them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import orjson

from backends.json_body import JsonBody, JsonBodyError
from backends.vllm.native_fields import SAMPLING_FIELDS, TOP_FIELDS, Fate, NativeField, NativeRefused
from backends.vllm.native_values import as_ids, as_int, as_items, as_switch, as_text, as_texts, pick, render
from backends.vllm.native_wanted import Wanted, read_wanted

PATH = "/inference/v1/generate"
DEFAULT_MAX_NEW_TOKENS = 128
# Below this vLLM takes the likeliest token.
_GREEDY_BELOW = 1e-5
_LEAST_PRIORITY = -(1 << 63)
_GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}


@dataclass(frozen=True, slots=True)
class NativeLeg:
    """One request to the engine.

    Attributes:
        body: Its body, for ``POST /inference/v1/generate``.
        headers: Beside those that every request has.
        wanted: What its answers are to show.
        first: Position in the whole answer of its first sample; the others follow.
        samples: How many those are.
    """

    body: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    wanted: Wanted
    first: int
    samples: int


@dataclass(frozen=True, slots=True)
class NativePlan:
    """A native request in vLLM's terms.

    Attributes:
        legs: Requests to one worker, at least one, in the order of the answer.
        count: Items of the answer: prompts times samples.
        is_list: The answer is a list, and events tell their position.
        is_stream: The client wants events, and the legs ask for them.
    """

    legs: tuple[NativeLeg, ...]
    count: int
    is_list: bool
    is_stream: bool


def translate(body: JsonBody, *, prompt_ids: Sequence[bytes] = (), with_text: bool = True) -> NativePlan:
    """Translate a request.

    Args:
        body: The client's.
        prompt_ids: Ids of the prompts that came as ``text``, four bytes each, little-endian; empty if nothing here
            knows them. Not looked at where the client gives ids.
        with_text: The worker has a tokenizer, so that its answers can hold text. They do unless likeliest tokens or
            chosen ids are asked for: vLLM tells either the text or the ids of those.

    Raises:
        NativeRefused: A field has no counterpart, or a value is none that SGLang takes; names the field.
    """
    _refuse_fields(body, TOP_FIELDS, "")
    prompts, is_batch = _prompts(body, prompt_ids)
    is_stream = as_switch(body.text("stream"), "stream")
    samplings = list(_samplings(body, len(prompts)))
    samples = [_samples(sampling) for sampling in samplings]
    if len(set(samples)) > 1:
        raise NativeRefused("'n' is not the same in all of 'sampling_params'", "sampling_params")
    legs: list[NativeLeg] = []
    for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        item = _Item(body, sampling, prompt, index, is_stream=is_stream, with_text=with_text)
        legs += item.legs(first=index * samples[0], samples=samples[0])
    return NativePlan(tuple(legs), len(prompts) * samples[0], is_batch or samples[0] > 1, is_stream)


def _refuse_fields(body: JsonBody, known: Mapping[str, NativeField], prefix: str) -> None:
    """Refuse what has no counterpart; SGLang looks at the top level only at what it knows, so others pass there."""
    for name in body.fields:
        field = known.get(name)
        if field is None and prefix:
            raise NativeRefused(f"unknown field {name[:100]!r} in 'sampling_params'", prefix + name[:100])
        if field is not None and field.fate is Fate.REFUSED and field.asks(body.text(name)):
            raise NativeRefused(f"{name!r} has no counterpart on a vLLM worker: {field.note}", prefix + name)


def _prompts(body: JsonBody, prompt_ids: Sequence[bytes]) -> tuple[list[tuple[bytes, int]], bool]:
    """Ids of the prompts as JSON with their numbers, and whether they are a batch."""
    text = body.text("text")
    if not body.text("input_ids"):
        if not text:
            raise NativeRefused("one of 'input_ids' and 'text' is needed", "input_ids")
        if not prompt_ids:
            as_texts(text, "text")  # of anything else no tokenizer would help
            raise NativeRefused(
                "a vLLM worker takes token ids: send 'input_ids', or give the gateway the model's tokenizer", "text"
            )
        return [_packed(ids) for ids in prompt_ids], text.startswith(b"[")
    prompts, is_batch = _listed_prompts(body)
    # Beside ids the text is not looked at but for the number of prompts.
    if text and (len(as_items(text, "text")) if text.startswith(b"[") else None) != (
        len(prompts) if is_batch else None
    ):
        raise NativeRefused("'text' and 'input_ids' are not as many prompts", "input_ids")
    return prompts, is_batch


def _listed_prompts(body: JsonBody) -> tuple[list[tuple[bytes, int]], bool]:
    text = body.text("input_ids")
    if "input_ids" in body.id_counts:
        return [(text, body.id_counts["input_ids"])], False
    items = as_items(text, "input_ids")
    if not items:
        raise NativeRefused("'input_ids' is empty", "input_ids")
    if items[0].startswith(b"["):
        return [_listed(item) for item in items], True
    return [_listed(text)], False


def _listed(text: bytes) -> tuple[bytes, int]:
    count = len(as_ids(text, "input_ids"))
    if not count:
        raise NativeRefused("'input_ids' holds a prompt without a token", "input_ids")
    return text, count


def _packed(ids: bytes) -> tuple[bytes, int]:
    numbers = np.frombuffer(ids, "<u4")
    if not len(numbers):
        raise NativeRefused("'text' holds a prompt without a token", "text")
    return orjson.dumps(numbers.tolist()), len(numbers)


def _samplings(body: JsonBody, count: int) -> Iterator[JsonBody]:
    text = body.text("sampling_params") or b"{}"
    texts = [text] * count
    if text.startswith(b"["):
        texts = as_items(text, "sampling_params")
        if len(texts) != count:
            raise NativeRefused(f"'sampling_params' has {len(texts)} items instead of {count}", "sampling_params")
    for one in texts:
        try:
            sampling = JsonBody.parse(b"{}" if one == b"null" else one, frozenset(SAMPLING_FIELDS))
        except JsonBodyError as exc:
            raise NativeRefused(f"'sampling_params': {exc}", "sampling_params") from exc
        _refuse_fields(sampling, SAMPLING_FIELDS, "sampling_params.")
        yield sampling


def _samples(sampling: JsonBody) -> int:
    return max(as_int(sampling.text("n"), "sampling_params.n") or 1, 1)


class _Item:
    """The translation of one prompt."""

    def __init__(
        self,
        body: JsonBody,
        sampling: JsonBody,
        prompt: tuple[bytes, int],
        index: int,
        *,
        is_stream: bool,
        with_text: bool,
    ) -> None:
        self._body = body
        self._sampling = sampling
        self._index = index
        self._is_stream = is_stream
        limit = as_int(sampling.text("max_new_tokens"), "sampling_params.max_new_tokens")
        self._limit = DEFAULT_MAX_NEW_TOKENS if limit is None else limit
        if self._limit < 0:
            raise NativeRefused("'max_new_tokens' is negative", "sampling_params.max_new_tokens")
        self._wanted = read_wanted(
            body, prompt, index, is_stream=is_stream, with_text=with_text, has_output=self._limit > 0
        )

    def legs(self, *, first: int, samples: int) -> list[NativeLeg]:
        """The requests for all samples of the prompt."""
        temperature = self._sampling.text("temperature")
        is_greedy = samples > 1 and temperature != b"" and _number(temperature) < _GREEDY_BELOW
        each, count = (1, samples) if is_greedy else (samples, 1)
        body = self._render(each)
        headers = self._headers()
        return [NativeLeg(body, headers, self._wanted, first + number * each, each) for number in range(count)]

    def _headers(self) -> tuple[tuple[bytes, bytes], ...]:
        session = self._body.text("session_id")
        if not session:
            return ()
        text = as_text(session, "session_id")
        if not (text.isascii() and text.isprintable()):
            raise NativeRefused("'session_id' cannot be sent as a header", "session_id")
        return ((b"x-session-id", text.encode()),)

    def _render(self, samples: int) -> bytes:
        wanted = self._wanted
        fields: dict[str, bytes] = {"token_ids": wanted.prompt, "sampling_params": render(self._params(samples))}
        if wanted.has_text:
            fields["output_mode"] = b'"text"'
        if self._is_stream:
            fields["stream"] = b"true"
            fields["stream_options"] = b'{"include_usage":true}'
        if (adapter := pick(self._body, "lora_path", self._index)) not in (b"", b'""'):
            fields["model"] = adapter
        if priority := as_int(self._body.text("priority"), "priority"):
            fields["priority"] = b"%d" % -max(priority, _LEAST_PRIORITY + 1)
        if salt := self._salt():
            fields["cache_salt"] = salt
        return render(fields)

    def _salt(self) -> bytes:
        salts = {
            name: text
            for name in ("cache_salt", "extra_key")
            if (text := pick(self._body, name, self._index)) not in (b"", b'""')
        }
        if len(salts) > 1:
            raise NativeRefused("a vLLM worker has one salt, so 'cache_salt' stands alone", "extra_key")
        return next(iter(salts.values()), b"")

    def _params(self, samples: int) -> dict[str, bytes]:
        sampling = self._sampling
        params = {
            field.target: text
            for name, field in SAMPLING_FIELDS.items()
            if field.is_copied and (text := sampling.text(name))
        }
        params["max_tokens"] = b"%d" % max(self._limit, 1)
        if not self._wanted.has_output:
            params.pop("min_tokens", None)
        if samples > 1:
            params["n"] = b"%d" % samples
        seed = as_int(sampling.text("sampling_seed"), "sampling_params.sampling_seed")
        if seed == -1:
            raise NativeRefused("a vLLM worker takes -1 for no seed", "sampling_params.sampling_seed")
        if seed is not None:
            params["seed"] = b"%d" % seed
        if budget := self._body.text("max_thinking_tokens"):
            params["thinking_token_budget"] = budget
        return params | self._grammar() | self._logprobs()

    def _grammar(self) -> dict[str, bytes]:
        asked = {name: text for name in _GRAMMARS if (text := self._sampling.text(name)) not in (b"", b'""')}
        if len(asked) > 1:
            raise NativeRefused(
                "only one of json_schema, regex, ebnf, or structural_tag can be set",
                f"sampling_params.{list(asked)[1]}",
            )
        if not asked:
            return {}
        return {"structured_outputs": render({_GRAMMARS[name]: text for name, text in asked.items()})}

    def _logprobs(self) -> dict[str, bytes]:
        wanted = self._wanted
        if not wanted.has_logprobs:
            return {}
        params: dict[str, bytes] = {"logprobs": b"0"}
        if wanted.top:
            # The sampled token comes first and counts, whether or not it is one of the likeliest.
            params["logprobs"] = b"%d" % (wanted.top + 1)
        elif wanted.token_ids:
            # The same here, so that the last of them would be left out. Named twice it counts twice and is told once.
            ids = [*wanted.token_ids, wanted.token_ids[-1]]
            params["logprobs"] = b"%d" % len(ids)
            params["logprob_token_ids"] = orjson.dumps(ids)
        if wanted.logprob_start is not None:
            params["prompt_logprobs"] = b"%d" % wanted.top
        return params


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return 1.0  # the engine says what is wrong


def refuses_text(status: int, body: bytes) -> bool:
    """Whether a leg's answer says that the worker has no tokenizer, so that ``with_text`` has to be false for it."""
    return status == 400 and b"output_mode='text' requires a tokenizer" in body


def lacks_token_route(status: int, body: bytes) -> bool:
    """Whether a leg's answer says that the worker does not serve token ids: it was not started for that."""
    return status == 403 and b"only available with --enable-scale-out" in body

"""A request for n samples as n requests for one each, which are its legs here. Pure.

SGLang runs the samples of ``n > 1`` under ids of its own, so that nothing but their end stops them in a unary request.
Requests for one sample each run under ids that an abort can name. Over prefill and decode workers n samples cannot be
one request at all, on either engine, since one handoff of a prompt's KV serves one sample. A batch of B prompts
becomes n batches of B: leg i has sample i of every prompt. ``gateway.merge`` makes one answer of theirs, and
``gateway.merge_stream`` one stream.
"""

import re
from collections.abc import Iterable, Iterator

import msgspec

from backends.json_body import JsonBody, JsonBodyError
from backends.types import EngineIds, EngineKind
from gateway.envelope import Envelope
from gateway.ids import IdMap, id_map
from gateway.routes import Dialect, Route

# Each leg is a connection of its own. No OpenAI client asks for more, since its own service takes no more.
MAX_LEGS = 128
_OPENAI_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
_PATHS = {
    EngineKind.SGLANG: _OPENAI_PATHS | {"/generate"},
    EngineKind.VLLM: _OPENAI_PATHS | {"/inference/v1/generate"},
}
# Where a leg would do something else than a sample does in the engine. Sessions of vLLM are nothing but names.
_WHOLE = {
    EngineKind.SGLANG: ("best_of", "use_beam_search", "session_params", "session_id", "background"),
    EngineKind.VLLM: ("best_of", "use_beam_search", "prompt_embeds"),
}
# One value for each prompt, which the engine refuses beside n > 1, and for one sample would not.
_NEVER_LISTS = (
    "custom_logit_processor",
    "logprob_start_len",
    "return_logprob",
    "return_sampling_mask",
    "sampling_logprobs_mode",
    "top_logprobs_num",
)
# One value for each prompt too. With n > 1 the engine takes a lone prompt for a batch of one, and so it takes these.
_BATCH_LISTS = (
    "cache_salt",
    "extra_key",
    "lora_path",
    "mm_content_hashes",
    "mm_hashes",
    "return_hidden_states",
    "sampling_params",
    "watermark",
)
_BATCH_NESTED = ("audio_data", "image_data", "video_data")
_NESTED = re.compile(rb"\[\s*\[")
_INTEGER = re.compile(rb"-?\d{1,19}")
# The engine takes seeds of 64 bits with a sign.
_SEEDS = 1 << 64
_LEAST_SEED = -(1 << 63)
_WRITTEN = frozenset({"n", "seed", "sampling_seed", "beam_width", "temperature"})
_NATIVE_SEED = {EngineKind.SGLANG: "sampling_seed", EngineKind.VLLM: "seed"}
# To vLLM this seed is none, and a temperature below this one is 0.
_NO_SEED = -1
_LEAST_TEMPERATURE = 1e-5

_items = msgspec.json.Decoder(list[msgspec.Raw])


def expands(route: Route, engine: EngineKind, envelope: Envelope, *, is_streamed: bool, native_n: bool) -> bool:
    """Whether the request is sent as one request for each sample.

    What cannot be told apart exactly goes to the engine as it is, which then also says what is wrong with it:

    - ``n`` that is not written as a plain integer, or differs between the items of ``sampling_params``, or is above
      ``MAX_LEGS``; seeds that are not plain integers of 64 bits; any of them given twice;
    - ``beam_width`` above 1, where ``n`` is the number of sequences that one search returns, under the id that it was
      given; ``best_of`` and ``use_beam_search``, which SGLang ignores: whoever heeds them makes one choice among all
      samples;
    - ``session_params`` and ``session_id``: n requests would go on with one conversation n times;
    - ``background``, which the engine heeds in single requests only;
    - lists with one value for each prompt where the engine refuses them beside ``n > 1``, or where it takes a lone
      prompt for a batch of one because of ``n``;
    - ``return_spec_tokens_details`` for a batch of completions: without ``n`` the engine tells those of the first
      prompt alone.

    ``echo``, logprobs, hidden states and tools are each sample's own matter, so they do not stand in the way. Fields
    that the engine forgets beside ``n > 1``, such as ``images_config``, are heeded then.

    Args:
        route: The route that was asked for.
        engine: Engine of the worker that was chosen.
        envelope: The request.
        is_streamed: The engine is asked to stream, for whichever reason; closing then stops all samples.
        native_n: The operator wants ``n`` to stay one request.
    """
    if envelope.samples == 1 or native_n or is_streamed or engine is not EngineKind.SGLANG:
        return False
    if route.dialect is not Dialect.NATIVE and envelope.body.text("n") != b"%d" % envelope.samples:
        return False
    return pair_expands(route, engine, envelope)


def pair_expands(route: Route, engine: EngineKind, envelope: Envelope) -> bool:
    """Whether a request over prefill and decode workers is sent as one request for each sample, streams too.

    Args:
        route: The route that was asked for.
        engine: Engine of both workers.
        envelope: The request.
    """
    return envelope.samples > 1 and pair_obstacle(route, engine, envelope) is None


def pair_obstacle(route: Route, engine: EngineKind, envelope: Envelope) -> str | None:
    """Why a request for several samples cannot be taken apart, ``None`` if it can, or asks for one sample only.

    Over prefill and decode workers it is to be refused then, before any worker sees it. On SGLang the reasons are those
    that ``expands`` tells, but for the spelling of ``n`` in OpenAI's routes. On vLLM they are ``best_of`` and
    ``use_beam_search``; ``prompt_embeds``, since nobody knows how many prompts they hold; a temperature of 0, which the
    engine refuses beside ``n > 1``; and seeds that are not plain integers of 64 bits, or of which a sample would get
    the one that means none.

    Args:
        route: The route that was asked for.
        engine: Engine of both workers.
        envelope: The request.
    """
    if envelope.samples < 2:
        return None
    if envelope.samples > MAX_LEGS:
        return f"n is above {MAX_LEGS}"
    if route.path not in _PATHS[engine]:
        return "n > 1 on a route without samples"
    found = next(_obstacles(route, engine, envelope), None)
    return None if found is None else f"n > 1 with {found}"


def choice_changes(route: Route, body: JsonBody, choice: int) -> dict[str, bytes]:
    """JSON of the top-level fields to set for one leg: one sample, and its own seed where the client gave one.

    Seed s becomes s + ``choice``; behind the largest that the engine takes comes the least.

    Args:
        route: The route that was asked for.
        body: The client's body, of which ``expands`` is true.
        choice: Number of the leg, from 0.
    """
    return pair_choice_changes(route, EngineKind.SGLANG, body, choice)


def pair_choice_changes(route: Route, engine: EngineKind, body: JsonBody, choice: int) -> dict[str, bytes]:
    """The same for either engine; the seeds are those that vLLM gives to its own samples.

    Args:
        route: The route that was asked for.
        engine: Engine of both workers.
        body: The client's body, of which ``pair_expands`` is true.
        choice: Number of the leg, from 0.
    """
    if route.dialect is not Dialect.NATIVE:
        return _one_sample(engine, body, "seed", choice)
    name = _NATIVE_SEED[engine]
    changed = [b"".join(one.with_fields(_one_sample(engine, one, name, choice))) for one in _samplings(body)]
    is_list = body.text("sampling_params").startswith(b"[")
    return {"sampling_params": b"[%b]" % b",".join(changed) if is_list else changed[0]}


def choice_ids(
    ids: EngineIds, public_id: str, *, batch_size: int | None, choice: int, count: int, has_one_id: bool
) -> IdMap:
    """The map for the answer of one leg.

    Args:
        ids: Ids given to the engine for this leg, made for one sample.
        public_id: The request's public id R. Sample i of prompt b is R_k with k = b * ``count`` + i.
        batch_size: Items of the batch, ``None`` for a single request.
        choice: Number of the leg, from 0.
        count: Legs in all.
        has_one_id: The merged answer is one OpenAI object, or vLLM's, streams too; it has R itself for its id.
    """
    flat = (prompt * count + choice for prompt in range(batch_size or 1))
    names = [public_id if has_one_id else f"{public_id}_{index}" for index in flat]
    return id_map(ids, names[0] if batch_size is None else public_id, names, has_one_id=has_one_id)


def _is_asked(body: JsonBody, name: str) -> bool:
    return body.text(name) not in (b"", b"false")


def _obstacles(route: Route, engine: EngineKind, envelope: Envelope) -> Iterator[str]:
    """What stands in the way of taking a request for several samples apart."""
    body, is_batch = envelope.body, envelope.batch_size is not None
    yield from (f"'{name}'" for name in _WHOLE[engine] if _is_asked(body, name))
    if engine is EngineKind.SGLANG:
        yield from _foreign_lists(body, is_batch=is_batch)
        if is_batch and _is_asked(body, "return_spec_tokens_details"):
            yield "'return_spec_tokens_details' for a batch"
    if route.dialect is not Dialect.NATIVE:
        yield from _sampling_obstacles(engine, body, "seed", envelope.samples)
        return
    try:
        samplings = _samplings(body)
    except JsonBodyError as exc:
        yield f"these 'sampling_params': {exc}"
        return
    for one in samplings:
        if one.text("n") != b"%d" % envelope.samples:
            yield "an 'n' that is not one plain integer for all prompts"
        if engine is EngineKind.SGLANG and one.text("beam_width") not in (b"", b"1"):
            yield "'beam_width'"
        yield from _sampling_obstacles(engine, one, _NATIVE_SEED[engine], envelope.samples)


def _sampling_obstacles(engine: EngineKind, sampling: JsonBody, seed_name: str, count: int) -> Iterator[str]:
    """What stands in the way among the parameters of sampling."""
    seed = sampling.text(seed_name)
    if not _is_seed(seed):
        yield f"a '{seed_name}' that is not a plain integer of 64 bits"
    elif engine is EngineKind.VLLM and seed and 0 < _NO_SEED - int(seed) < count:
        yield f"a 'seed' from {_NO_SEED - count + 1} to {_NO_SEED - 1}, of which one sample's is none"
    if engine is EngineKind.VLLM and _is_greedy(sampling.text("temperature")):
        yield "a 'temperature' of 0"


def _is_greedy(temperature: bytes) -> bool:
    try:
        return 0 <= float(temperature.strip(b'"')) < _LEAST_TEMPERATURE
    except ValueError:  # there is none, or the engine says what is wrong with it
        return False


def _foreign_lists(body: JsonBody, *, is_batch: bool) -> Iterator[str]:
    """Lists that mean something else, or nothing, beside ``n > 1``."""
    names = _NEVER_LISTS if is_batch else _NEVER_LISTS + _BATCH_LISTS
    nested = ("token_ids_logprob",) if is_batch else ("token_ids_logprob", *_BATCH_NESTED)
    for name in (*names, *nested):
        text = body.text(name)
        if _NESTED.match(text) if name in nested else text.startswith(b"["):
            yield f"a '{name}' for each prompt"


def _is_seed(text: bytes) -> bool:
    if not text:
        return True
    return _INTEGER.fullmatch(text) is not None and 0 <= int(text) - _LEAST_SEED < _SEEDS


def _samplings(body: JsonBody) -> list[JsonBody]:
    """The sampling parameters, of all items or of each.

    Raises:
        JsonBodyError: They are no objects, or repeat a field that is read here.
    """
    text = body.text("sampling_params")
    items: Iterable[bytes] = map(bytes, _items.decode(text)) if text.startswith(b"[") else [text]
    return [JsonBody.parse(item, _WRITTEN) for item in items]


def _one_sample(engine: EngineKind, fields: JsonBody, seed_name: str, choice: int) -> dict[str, bytes]:
    changes = {"n": b"1"}
    seed = fields.text(seed_name)
    if seed and (engine is EngineKind.SGLANG or int(seed) != _NO_SEED):
        changes[seed_name] = b"%d" % ((int(seed) + choice - _LEAST_SEED) % _SEEDS + _LEAST_SEED)
    return changes

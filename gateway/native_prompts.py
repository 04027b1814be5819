"""Makes a request of ``/generate`` ready for vLLM workers, which take its prompts as ids only."""

import msgspec

from backends.types import EngineKind
from gateway.envelope import Envelope
from gateway.errors import RETRY_AFTER_S, ErrorReport, GatewayError
from gateway.native_request import NativeRequest
from gateway.outcome import Outcome
from gateway.services import Services

_TOO_SLOW = ErrorReport(
    503, "unavailable", "the text could not be tokenized in time, try again", Outcome.OVERLOADED, None, RETRY_AFTER_S
)
# One token, in the place of what is not known.
_ANY_PROMPT = b"\1\0\0\0"
_texts = msgspec.json.Decoder(str | list[str])


async def ready_for_vllm(services: Services, envelope: Envelope, model: str, *, asks_engines: bool = True) -> Envelope:
    """The request with ``native``, where a vLLM worker may serve it.

    Args:
        services: The fleet and the tokenizers.
        envelope: A request of ``/generate``.
        model: Its pool.
        asks_engines: Text is tokenized, if need be by an engine; else it stays unknown, which only matters to them.

    Raises:
        GatewayError: Its text could not be tokenized now, and nobody can be given it as it is.
    """
    engines = services.fleet.engines_serving(model)
    if EngineKind.VLLM not in engines:
        return envelope
    body, tokens = envelope.body, envelope.prompt_tokens
    prompts: tuple[bytes, ...] = ()
    if not body.text("input_ids") and _is_text(body.text("text")) and not asks_engines:
        prompts = (_ANY_PROMPT,) * (envelope.batch_size or 1)
    elif not body.text("input_ids") and _is_text(body.text("text")):
        pools = services.fleet.pools(model)
        ranks = [one for pool in (pools.regular, pools.decode) for one in pool]
        asked = [one for one in ranks if one.group is not None and one.group.engine is EngineKind.VLLM]
        if envelope.worker_id is not None:
            asked = [one for one in asked if one.key.worker_id == envelope.worker_id]
        if not asked:
            return envelope  # none of them is ready
        found, is_local = await services.prefixes.text_ids(body, model, asked)
        if found is None and is_local and EngineKind.SGLANG not in engines:
            raise GatewayError(_TOO_SLOW)
        prompts = tuple(found or ())
        tokens = sum(map(len, prompts)) // 4
    native = NativeRequest(body, envelope.batch_size, prompts, services.native_workers)
    return msgspec.structs.replace(envelope, native=native, prompt_tokens=tokens)


def _is_text(text: bytes) -> bool:
    try:
        _texts.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False  # the translation says what is wrong with it
    return True

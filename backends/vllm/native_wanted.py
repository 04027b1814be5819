"""What the answers to a native request are to show, and whether vLLM can tell it. Pure."""

from dataclasses import dataclass

from backends.json_body import JsonBody
from backends.vllm.native_fields import NativeRefused
from backends.vllm.native_values import as_ids, as_int, as_items, as_switch, pick

# vLLM's bound of ``logprob_token_ids``, less the one that is named twice.
MAX_TOKEN_IDS = 127
_FLAT_INPUT = "return_flat_raw_top_logprobs"
_FLAT_OUTPUT = "return_flat_raw_output_top_logprobs"
_BASE64 = "return_flat_raw_top_logprobs_b64"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the answers to one prompt are to show.

    Attributes:
        prompt: Its ids, as JSON.
        prompt_tokens: How many those are.
        has_text: The engine is asked for text.
        has_logprobs: Log-probabilities are shown.
        logprob_start: First position of the prompt of which they are shown, ``None`` for none.
        top: Likeliest tokens of each position.
        token_ids: Tokens whose log-probabilities are shown for each position of the output.
        has_token_text: Log-probabilities come with the text of their token.
        is_flat_input: The prompt's likeliest tokens are flat arrays.
        is_flat_output: The output's are.
        is_base64: Flat arrays are in Base64.
        has_prompt_ids: The prompt's ids are shown.
        has_output: False if the one token that vLLM cannot do without is to be left out.
    """

    prompt: bytes
    prompt_tokens: int
    has_text: bool = True
    has_logprobs: bool = False
    logprob_start: int | None = None
    top: int = 0
    token_ids: tuple[int, ...] = ()
    has_token_text: bool = False
    is_flat_input: bool = False
    is_flat_output: bool = False
    is_base64: bool = False
    has_prompt_ids: bool = False
    has_output: bool = True


def read_wanted(
    body: JsonBody, prompt: tuple[bytes, int], index: int, *, is_stream: bool, with_text: bool, has_output: bool
) -> Wanted:
    """Read what is wanted of one prompt.

    Args:
        body: The client's.
        prompt: Its ids, as JSON, and how many those are.
        index: Its position in the batch.
        is_stream: The client wants events.
        with_text: The worker can tell text.
        has_output: Any output is wanted.

    Raises:
        NativeRefused: vLLM cannot tell it.
    """
    ids, tokens = prompt
    flags = {name: as_switch(body.text(name), name) for name in (_FLAT_INPUT, _FLAT_OUTPUT, _BASE64)}
    if flags[_FLAT_OUTPUT] and is_stream:
        raise NativeRefused("flat arrays are told in unary answers only", _FLAT_OUTPUT)
    if flags[_BASE64] and not (flags[_FLAT_INPUT] or flags[_FLAT_OUTPUT]):
        raise NativeRefused(f"{_BASE64!r} goes with one of the flat arrays", _BASE64)
    has_prompt_ids = as_switch(body.text("return_prompt_token_ids"), "return_prompt_token_ids")
    if not as_switch(pick(body, "return_logprob", index), "return_logprob"):
        return Wanted(ids, tokens, with_text, has_prompt_ids=has_prompt_ids, has_output=has_output)
    top = max(as_int(pick(body, "top_logprobs_num", index), "top_logprobs_num") or 0, 0)
    chosen = _chosen_ids(body, index)
    if chosen and top:
        raise NativeRefused("a vLLM worker tells either these or the likeliest tokens", "token_ids_logprob")
    has_token_text = as_switch(body.text("return_text_in_logprobs"), "return_text_in_logprobs")
    has_text = with_text and not top and not chosen
    if has_token_text and not has_text:
        why = "tells either the texts or the ids of several tokens" if with_text else "has no tokenizer"
        raise NativeRefused(f"a vLLM worker {why}", "return_text_in_logprobs")
    return Wanted(
        ids,
        tokens,
        has_text,
        has_logprobs=True,
        logprob_start=_start(body, index, tokens, is_stream=is_stream, has_chosen=bool(chosen)),
        top=top,
        token_ids=chosen,
        has_token_text=has_token_text,
        is_flat_input=flags[_FLAT_INPUT],
        is_flat_output=flags[_FLAT_OUTPUT],
        is_base64=flags[_BASE64],
        has_prompt_ids=has_prompt_ids,
        has_output=has_output,
    )


def _chosen_ids(body: JsonBody, index: int) -> tuple[int, ...]:
    """The ids that are asked for: of all prompts, or in a list of lists of this one."""
    text = body.text("token_ids_logprob")
    if not text:
        return ()
    items = as_items(text, "token_ids_logprob")
    if any(not item[:1].isdigit() for item in items):
        text = pick(body, "token_ids_logprob", index) or b"[]"
    ids = tuple(as_ids(text, "token_ids_logprob"))
    if len(ids) > MAX_TOKEN_IDS:
        raise NativeRefused(f"a vLLM worker takes {MAX_TOKEN_IDS} ids at most", "token_ids_logprob")
    return ids


def _start(body: JsonBody, index: int, tokens: int, *, is_stream: bool, has_chosen: bool) -> int | None:
    name = "logprob_start_len"
    start = as_int(pick(body, name, index), name)
    if start is None or start < 0:
        return None
    if start > tokens:
        raise NativeRefused(f"{name!r} is {start}, and the prompt has {tokens} tokens", name)
    if is_stream:
        raise NativeRefused("a vLLM worker tells the prompt's log-probabilities in unary answers only", name)
    if has_chosen:
        raise NativeRefused("a vLLM worker tells these of output tokens only", "token_ids_logprob")
    return start

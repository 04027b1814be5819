"""Token ids of requests, made in a small pool of threads: the loop never waits, and nobody waits for long."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from backends.json_body import JsonBody
from backends.types import EngineKind
from gateway.routes import Route
from gateway.tokens.cache import IdCache, cache_key
from gateway.tokens.chat import ChatPrompt, NotKnown
from gateway.tokens.files import ModelTokenizer, load_tokenizer
from gateway.tokens.prompts import CHATS, Texts, prompts_of
from gateway.tokens.template import MAX_RENDERED_CHARS, Budget, ChatTemplate

TIME_LIMIT_S = 0.5
THREADS = 2
MAX_PENDING = 64
# About a second of encoding, which cannot be stopped once it has begun.
MAX_BODY_BYTES = 4 * MAX_RENDERED_CHARS


@dataclass(frozen=True, slots=True)
class PromptIds:
    """The ids of a request's prompts.

    Attributes:
        model: Whose tokenizer made them.
        prompts: Ids of each prompt, four bytes each, little-endian; more than one only for a batch.
    """

    model: str
    prompts: tuple[bytes, ...]

    @property
    def count(self) -> int:
        """Ids of all prompts together."""
        return sum(map(len, self.prompts)) // 4


class PromptTokenizers:
    """The local tokenizers of this gateway. Used from the loop; ``close`` ends its threads.

    Args:
        tokenizers: What ``load_tokenizer`` made.
        time_limit_s: Longest wait for the ids of one request, waiting for a thread included.
        threads: Threads at most; none is started before it is needed.
        max_pending: Requests that wait or are being worked on; further ones are not taken.
        cache: Remembers ids.

    Attributes:
        tokenizers: By model.
    """

    def __init__(
        self,
        tokenizers: Iterable[ModelTokenizer],
        *,
        time_limit_s: float = TIME_LIMIT_S,
        threads: int = THREADS,
        max_pending: int = MAX_PENDING,
        cache: IdCache | None = None,
    ) -> None:
        self.tokenizers: Mapping[str, ModelTokenizer] = {one.model: one for one in tokenizers}
        self._time_limit_s = time_limit_s
        self._max_pending = max_pending
        self._cache = cache or IdCache()
        self._jobs: set[Future[PromptIds]] = set()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        self._is_closed = False

    @classmethod
    def load(cls, directories: Mapping[str, Path]) -> "PromptTokenizers":
        """Read the tokenizers of all models, at start.

        Raises:
            TokenizerError: One cannot be used.
        """
        return cls(load_tokenizer(model, directory) for model, directory in directories.items())

    @property
    def pending(self) -> int:
        """Requests that wait for a thread or have one, abandoned ones included."""
        self._jobs = {job for job in self._jobs if not job.done()}
        return len(self._jobs)

    def vocab_size(self, model: str) -> int | None:
        """Number of ids that ``model`` has, ``None`` without a local tokenizer."""
        found = self._find(model)
        return None if found is None else found.vocab_size

    def knows(self, model: str) -> bool:
        """Whether there is a tokenizer for ``model``."""
        return self._find(model) is not None

    async def token_ids(self, model: str, engine: EngineKind, route: Route, body: JsonBody) -> PromptIds | None:
        """The ids that an engine of this kind will make of the request's text.

        ``None`` means that they are not known: no tokenizer, media, prompts that are ids already, options or a
        template's complaint that only the engine can answer, too many at once, or too slow. Never raises for what is
        in a request. May be cancelled at any time; work that has begun then ends by itself, soon and unseen.

        Args:
            model: Name that the request uses; ``base:adapter`` stands for its base.
            engine: Kind of engine that the prompt is for.
            route: The request's route.
            body: The request.
        """
        tokenizer = self._find(model)
        if tokenizer is None or self._is_closed or len(body.raw) > MAX_BODY_BYTES:
            return None
        if len(self._jobs) >= self._max_pending and self.pending >= self._max_pending:
            return None
        deadline = time.monotonic() + self._time_limit_s
        job = self._pool.submit(_prompt_ids, tokenizer, engine, route, body, deadline, self._cache)
        self._jobs.add(job)
        # Not wait_for: what a native library raises when it fails is no Exception, and stays in the future here.
        answer = asyncio.wrap_future(job)
        try:
            await asyncio.wait([answer], timeout=self._time_limit_s)
        finally:
            if not answer.done():
                answer.cancel()
            if job.done():
                self._jobs.discard(job)
        return None if answer.cancelled() or answer.exception() is not None else answer.result()

    def close(self) -> None:
        """Take no more; a thread ends with the work that it has begun."""
        self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _find(self, model: str) -> ModelTokenizer | None:
        return self.tokenizers.get(model) or self.tokenizers.get(model.partition(":")[0])


def _prompt_ids(
    tokenizer: ModelTokenizer, engine: EngineKind, route: Route, body: JsonBody, deadline: float, cache: IdCache
) -> PromptIds:
    """The ids of a request, made in a thread. Raises whatever keeps them from being known."""
    budget = Budget(deadline)
    budget.step()
    prompts = prompts_of(engine, route, body)
    if isinstance(prompts, Texts):
        budget.write(sum(map(len, prompts.texts)))
        encoded = [_encode(tokenizer, text, prompts.add_special_tokens, cache) for text in prompts.texts]
    else:
        encoded = [_chat_ids(tokenizer, engine, prompts, budget, cache)]
    return PromptIds(tokenizer.model, tuple(encoded))


def _chat_ids(
    tokenizer: ModelTokenizer, engine: EngineKind, body: dict[str, Any], budget: Budget, cache: IdCache
) -> bytes:
    template = tokenizer.template(has_tools=bool(body.get("tools")))
    if template is None or engine in tokenizer.own_code:
        raise NotKnown("chat")
    content_format = template.sglang_format if engine is EngineKind.SGLANG else template.vllm_format
    prompt = CHATS[engine](body, content_format, template.source)
    text = _render(tokenizer, template, prompt, engine, budget)
    ids = _encode(tokenizer, text, prompt.add_special_tokens, cache)
    if not prompt.assistant_prefix:
        return ids
    prefix = _encode(tokenizer, prompt.assistant_prefix, True, cache)
    has_bos = tokenizer.bos_id is not None and prefix[:4] == tokenizer.bos_id.to_bytes(4, "little")
    return ids + (prefix[4:] if has_bos else prefix)


def _render(
    tokenizer: ModelTokenizer, template: ChatTemplate, prompt: ChatPrompt, engine: EngineKind, budget: Budget
) -> str:
    try:
        return template.render(prompt, tokenizer.special_tokens, budget)
    except Exception:
        budget.step()
        if engine is not EngineKind.SGLANG or prompt.tools is None:
            raise
    # SGLang then tries the tools without their wrapping, since some templates want them like that.
    return template.render(prompt.with_bare_tools(), tokenizer.special_tokens, budget)


def _encode(tokenizer: ModelTokenizer, text: str, add_special_tokens: bool, cache: IdCache) -> bytes:
    key = cache_key(tokenizer.model, text, add_special_tokens=add_special_tokens)
    ids = cache.get(key)
    if ids is None:
        # Of the library's calls, only those for batches and the asynchronous ones let other threads run.
        [encoding] = tokenizer.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids = np.asarray(encoding.ids, dtype="<u4").tobytes()
        cache.put(key, ids)
    return ids

"""What routing is told of a request's prompt: which ranks hold its beginning, by events, by prediction, by guess."""

import logging
from collections.abc import Callable, Iterable, Sequence

import msgspec

from backends.json_body import JsonBody
from backends.tokenize import engine_token_ids, tokenize_body
from backends.types import EngineKind
from backends.upstream.base import UpstreamClient
from gateway.envelope import Envelope
from gateway.kv_silence import SILENCE_S, Position, SilenceWatch
from gateway.kv_view import KvView
from gateway.parity import Parity
from gateway.prompts import Prompt, namespace_of, prompt_in_ids, prompt_of, prompt_text
from gateway.routes import ROUTES, Dialect, Route
from gateway.tokens.service import PromptTokenizers
from kv_events.index_types import Overlap, RankId
from kv_events.types import Namespace
from routers.assumed import APPROXIMATE_TTL_S, PREDICTED_TTL_S, AssumedBlocks, Assumption
from routers.fleet import Fleet
from routers.kv_aware import KvAware
from routers.prefix_approximate import BYTES_PER_TOKEN, CHUNK_BYTES, PrefixApproximate
from routers.types import BlockGroup, Candidate, Placement, PromptBlocks, RankKey, RouteRequest

logger = logging.getLogger("forebay.kv_events")

# An engine's own tokenizer is asked for this long; then the request is routed without ids.
ENGINE_TOKENIZE_TIMEOUT_S = 0.5
# An engine that did not say is not asked again for this long.
ENGINE_TOKENIZE_PAUSE_S = 30.0
# The same, where no other worker can be given the text as it is.
PROMPT_TIMEOUT_S = 5.0
# Shorter texts fill no block of the usual sizes, or so few that their ids are not worth a call.
MIN_TEXT_BYTES = 256
# Ranks of a worker that is gone.
MAX_RANKS = 64
_NATIVE = ROUTES["/generate"]
_TOKENIZED = frozenset({Dialect.NATIVE, Dialect.CHAT, Dialect.COMPLETIONS})


class Sent(msgspec.Struct, frozen=True):
    """What is assumed since a request was sent; for ``Prefixes.failed``."""

    assumed: AssumedBlocks
    assumption: Assumption


class Prefixes:
    """Finds out what a prompt is, and who holds its beginning.

    Args:
        policy: Name of the policy; others than ``kv-aware`` and ``prefix-approximate`` look at nothing.
        kv: The caches by their events.
        fleet: The workers.
        tokenizers: Local ones.
        client: Asks engines to tokenize.
        clock: Monotonic seconds.
        on_mismatch: Told of a worker whose announced blocks are not those that were hashed here.
        predicts: Blocks are assumed to be where a request with them was just sent.
    """

    def __init__(
        self,
        policy: str,
        kv: KvView,
        fleet: Fleet,
        tokenizers: PromptTokenizers,
        client: UpstreamClient,
        clock: Callable[[], float],
        on_mismatch: Callable[[str], None],
        *,
        predicts: bool = True,
    ) -> None:
        self._uses_events = policy == KvAware.name
        self._is_approximate = policy == PrefixApproximate.name
        self._kv = kv
        self._fleet = fleet
        self._tokenizers = tokenizers
        self._client = client
        self._clock = clock
        self._predicts = predicts
        self._predicted = AssumedBlocks(PREDICTED_TTL_S)
        self._approximate = AssumedBlocks(APPROXIMATE_TTL_S)
        self._not_before: dict[str, float] = {}
        self._weights: dict[str, str | None] = {}
        self._silence = SilenceWatch()
        self.parity = Parity(kv, on_mismatch)

    @property
    def are_wanted(self) -> bool:
        """The policy looks at prompts, and there is something to look for."""
        return self._is_approximate or (self._uses_events and self._kv.follows_any)

    # Prompts.

    def known(self, route: Route, envelope: Envelope, model: str) -> Prompt | None:
        """The prompt of a request that brings its token ids."""
        return prompt_in_ids(route, envelope, model)

    async def look_up(
        self,
        route: Route,
        envelope: Envelope,
        model: str,
        candidates: Sequence[Candidate],
        *,
        asks_engines: bool = True,
    ) -> Prompt | None:
        """The prompt of a request that brings text: by a local tokenizer, by an engine's, or as text.

        ``None`` if the prompt is too short to matter, or cannot be told. Never raises for what is in a request.
        """
        text = prompt_text(route, envelope.body)
        if len(text) < MIN_TEXT_BYTES:
            return None
        found: dict[EngineKind, Sequence[bytes]] = {}
        if route.dialect in _TOKENIZED and not self._is_approximate:
            engines = {candidate.group.engine: candidate for candidate in candidates if candidate.group is not None}
            for engine, candidate in engines.items():
                ids = await self._local_ids(route, envelope, model, engine)
                if ids is None and asks_engines and not self._tokenizers.knows(model):
                    ids = await self._engine_ids(route, envelope, engine, candidate)
                if ids is not None:
                    found[engine] = ids
        return prompt_of(envelope, model, found, text)

    async def _local_ids(
        self, route: Route, envelope: Envelope, model: str, engine: EngineKind
    ) -> Sequence[bytes] | None:
        found = await self._tokenizers.token_ids(model, engine, route, envelope.body)
        return None if found is None else found.prompts

    async def _engine_ids(
        self, route: Route, envelope: Envelope, engine: EngineKind, candidate: Candidate
    ) -> Sequence[bytes] | None:
        worker_id = candidate.key.worker_id
        member = self._fleet.get(worker_id)
        if member is None or self._clock() < self._not_before.get(worker_id, 0.0):
            return None
        ids = await engine_token_ids(
            self._client, member.worker, engine, route.path, envelope.body, ENGINE_TOKENIZE_TIMEOUT_S
        )
        if ids is None and tokenize_body(engine, route.path, envelope.body) is not None:
            self._not_before[worker_id] = self._clock() + ENGINE_TOKENIZE_PAUSE_S
        return ids

    async def text_ids(
        self, body: JsonBody, model: str, candidates: Sequence[Candidate]
    ) -> tuple[Sequence[bytes] | None, bool]:
        """Ids of the text of a request of ``/generate``, and whether there is a local tokenizer to make them.

        Args:
            body: The request; nothing but its text is looked at.
            model: Its pool.
            candidates: Ranks of vLLM workers, one of which is asked where there is no local tokenizer.
        """
        text = JsonBody.parse(b'{"text":%b}' % body.text("text"))
        if self._tokenizers.knows(model):
            found = await self._tokenizers.token_ids(model, EngineKind.SGLANG, _NATIVE, text)
            return (None if found is None else found.prompts), True
        for candidate in candidates:
            if (member := self._fleet.get(candidate.key.worker_id)) is not None:
                worker, timeout_s = member.worker, PROMPT_TIMEOUT_S
                return await engine_token_ids(
                    self._client, worker, EngineKind.VLLM, _NATIVE.path, text, timeout_s
                ), False
        return None, False

    # Routing.

    def request(self, prompt: Prompt, stickiness_key: str | None, candidates: Iterable[Candidate]) -> RouteRequest:
        """What the policy is told, for the candidates that there are now; what fails here costs the overlaps alone."""
        prompts: dict[BlockGroup, PromptBlocks] = {}
        try:
            prompts = self._prompts(prompt, candidates)
        except Exception:
            logger.exception("prefixes could not be looked up; the request is routed by load")
        return RouteRequest(prompt.tokens, stickiness_key, prompts)

    def _prompts(self, prompt: Prompt, candidates: Iterable[Candidate]) -> dict[BlockGroup, PromptBlocks]:
        prompts: dict[BlockGroup, PromptBlocks] = {}
        now = self._clock()
        done = None
        for candidate in candidates:
            group = candidate.group
            if group is done or group is None or group in prompts:
                continue
            namespace = self._namespace(prompt, candidate.key.worker_id)
            if namespace is None:
                continue
            hashes = prompt.hashes(group, namespace)
            is_text = group.engine not in prompt.ids
            has_events = self._uses_events and not is_text
            overlap = self._by_events(prompt, group, namespace, hashes) if has_events else Overlap()
            self._add_assumed(overlap, hashes, now, is_text=is_text)
            block_size = CHUNK_BYTES // BYTES_PER_TOKEN if is_text else group.block_size
            prompts[group] = PromptBlocks(block_size, prompt.tokens, hashes, overlap)
            done = group
        return prompts

    def _namespace(self, prompt: Prompt, worker_id: str) -> Namespace | None:
        member = self._fleet.get(worker_id)
        facts = member.facts if member is not None else None
        if facts is None:
            return None
        return namespace_of(prompt.body, prompt.model, facts, is_native=prompt.is_native)

    def _by_events(self, prompt: Prompt, group: BlockGroup, namespace: Namespace, hashes: Sequence[int]) -> Overlap:
        """Overlaps of the ranks whose events can be gone by, each by blocks cut as it cuts them."""
        index = self._kv.index
        overlap = index.overlap(hashes, namespace)
        tiers = (overlap.device, overlap.host, overlap.disk)
        if index.eagle_ranks:
            pairs = index.overlap(prompt.hashes(group._replace(is_eagle=True), namespace), namespace)
            for tier, more in zip(tiers, (pairs.device, pairs.host, pairs.disk), strict=True):
                tier.update(more)
        for tier in filter(None, tiers):
            if self.parity.has_doubts or not self._kv.trusts_all(tier):
                for rank in [rank for rank in tier if not self._follows(rank)]:
                    del tier[rank]
        return overlap

    def _add_assumed(self, overlap: Overlap, hashes: Sequence[int], now: float, *, is_text: bool) -> None:
        """Add what is assumed; guesses count only where events do not tell everything."""
        if self._approximate.blocks:  # of engines that all tell of their caches there are none
            for rank, blocks in self._approximate.overlap(hashes, now).items():
                if is_text or not self._knows_all(RankKey(*rank)):
                    overlap.device[rank] = max(blocks, overlap.device.get(rank, 0))
        if self._predicts:
            self._predicted.merge_into(overlap, hashes, now)

    def _follows(self, key: RankId) -> bool:
        """Whether what events tell of a rank can be gone by."""
        return self._uses_events and self._kv.is_trusted(key) and not self.parity.is_mismatched(key[0])

    def _knows_all(self, key: RankKey) -> bool:
        """Whether events tell all of a rank; one that has never said anything is not just an empty cache."""
        return self._follows(key) and self._kv.is_whole(key)

    def sent(self, prompt: Prompt, placement: Placement) -> Sent | None:
        """A request goes to the rank that was chosen: it will soon hold the prompt's blocks."""
        blocks, key, group = placement.prompt, placement.candidate.key, placement.candidate.group
        if blocks is None or not blocks.sequence_hashes or group is None:
            return None
        has_events = self._knows_all(key) and group.engine in prompt.ids
        if has_events and not self._predicts:
            return None
        assumed = self._predicted if has_events else self._approximate
        return Sent(assumed, assumed.add(key, blocks.sequence_hashes, self._clock()))

    def hears_of(self, prompt: Prompt, placement: Placement) -> bool:
        """Whether the rank will announce the prompt's blocks in a way that is understood here, as far as is known."""
        key, group = placement.candidate.key, placement.candidate.group
        if group is None or group.engine not in prompt.ids:
            return False
        return self._knows_all(key) or (self._follows(key) and self._kv.blocks(*key) > 0)

    def position(self, key: RankKey) -> Position:
        """Changes whenever a rank has told something; events of which nothing can be used are no better than none."""
        epoch, last_seq = self._kv.position(*key)
        return epoch, last_seq if self._kv.blocks(*key) else None

    def announced_blocks(self, prompt: Prompt, placement: Placement) -> int:
        """Leading blocks of a prompt that the rank has by its events, without what is assumed; never raises."""
        key, group = placement.candidate.key, placement.candidate.group
        try:
            namespace = self._namespace(prompt, key.worker_id)
            if group is None or namespace is None or not self.hears_of(prompt, placement):
                return 0
            return self._by_events(prompt, group, namespace, prompt.hashes(group, namespace)).device.get(key, 0)
        except Exception:
            logger.exception("what worker %s has announced could not be looked up", key.worker_id)
            return 0

    def failed(self, sent: Sent | None) -> None:
        """A request ended before its first output: it has left nothing where it was sent."""
        if sent is not None:
            sent.assumed.withdraw(sent.assumption)

    def finished(self, prompt: Prompt, placement: Placement) -> None:
        """A request was answered whole."""
        key, group, blocks = placement.candidate.key, placement.candidate.group, placement.prompt
        if group is None or blocks is None:
            return
        if self._uses_events and len(blocks.sequence_hashes) > (placement.overlap_blocks or 0):
            self._listen(key)
        if group.engine not in prompt.ids or self.parity.has_agreed(key.worker_id):
            return
        namespace = self._namespace(prompt, key.worker_id)
        if namespace is not None:
            group = group._replace(is_eagle=self._kv.is_eagle(key))
            self.parity.finished(key, prompt.hashes(group, namespace), namespace)

    def _listen(self, key: RankKey) -> None:
        """A rank has filled blocks, of which its source should tell."""
        endpoint = self._kv.endpoint(key)
        if endpoint is None:
            return
        if answers := self._silence.answered(key, self.position(key), self._clock()):
            logger.warning(
                "worker %s rank %d: no KV event that can be used has come from %s for %.0f s, while it answered %d new "
                "prompts; does the engine publish there, with token ids, and can this gateway reach it?",
                *key,
                endpoint,
                SILENCE_S,
                answers,
            )

    def weights_are(self, worker_id: str, version: str | None) -> None:
        """A worker's weights are of that version; what was assumed under another one is worthless."""
        if self._weights.setdefault(worker_id, version) != version:
            self.forget(worker_id)
            self._weights[worker_id] = version

    def forget(self, worker_id: str) -> None:
        """A worker's cache is empty, or worthless: so is all that is assumed of it."""
        self._weights.pop(worker_id, None)
        self._silence.forget(worker_id)
        member = self._fleet.get(worker_id)
        for dp_rank in range(member.dp_size if member is not None else MAX_RANKS):
            self._predicted.clear_rank((worker_id, dp_rank))
            self._approximate.clear_rank((worker_id, dp_rank))

    def close(self) -> None:
        """End what is still due."""
        self.parity.close()
        self._tokenizers.close()

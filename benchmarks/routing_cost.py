"""``python -m benchmarks.routing_cost``: CPU time that ``kv-aware`` adds to a request which brings its token ids.

The way of a request from the bytes of its ids to its booking, step by step, among eight busy ranks that each hold a
part of the prompt; beside it the same request under ``least-loaded``, and the plain form of the two steps that have
one. Times are of this thread's CPU, the least of several repeats.
"""

import json
import random
from array import array
from collections.abc import Callable, Sequence
from typing import Final, cast

from backends.types import EngineFacts, EngineKind, Worker
from backends.upstream.base import Origin, UpstreamClient
from benchmarks.cpu_time import least_cpu_us
from benchmarks.kv_hashing import plain_hashes, plain_ids
from benchmarks.routing_engine import Clock
from benchmarks.routing_ranks import book_live, random_hashes
from benchmarks.routing_sim import Caches
from gateway.envelope import Envelope, parse_envelope
from gateway.kv_view import KvView
from gateway.prefixes import Prefixes
from gateway.prompts import Prompt, prompt_in_ids
from gateway.routes import ROUTES, Route
from gateway.tokens.service import PromptTokenizers
from kv_events.hashing import block_hashes, pack_tokens, parse_ids
from kv_events.index import PrefixIndex
from kv_events.index_types import ApplyReport
from kv_events.types import BlockStored
from routers.fleet import Fleet, Member
from routers.registry import make_policy
from routers.types import Candidate, Placement, RouteRequest

# Of a prompt of so many tokens, in microseconds.
_AIMS_US: Final = {2_000: 150.0, 100_000: 8_000.0}
_ENGINES: Final = 8
# Of each request that runs there, besides those that all of a rank share.
_OWN_BLOCKS: Final = 100
_PAGE: Final = 16
_MODEL: Final = "model"
_REPEATS: Final = 100
_REPEAT_S: Final = 0.004


def _cpu_us(call: Callable[[], object]) -> float:
    return least_cpu_us(call, _REPEATS, _REPEAT_S)


class Way:
    """One request's way through routing, in steps that can be gone again and again.

    Args:
        rng: Makes the prompt and what else is on the ranks.
        tokens: Length of the prompt.
    """

    def __init__(self, rng: random.Random, tokens: int) -> None:
        ids = [rng.randrange(128_000) for _ in range(tokens)]
        self.ids = ids
        self.route: Route = ROUTES["/generate"]
        body = json.dumps({"input_ids": ids, "sampling_params": {"max_new_tokens": 16}}).encode()
        self.envelope: Envelope = parse_envelope(
            self.route, body, [], {}, fallback_id="0" * 32, max_response_bytes=1 << 30
        )
        clock, self._fleet, caches = Clock(), Fleet(), Caches(Clock(), 0.0, PrefixIndex())
        self.policy = make_policy("kv-aware", 1)
        self.plain = make_policy("least-loaded", 1)
        self.prefixes = Prefixes(
            self.policy.name,
            cast(KvView, caches),
            self._fleet,
            cast(PromptTokenizers, None),
            cast(UpstreamClient, None),
            lambda: clock.now,
            lambda worker: None,
        )
        for number in range(_ENGINES):
            self._add(rng, f"w{number}", caches.index, ids[: tokens * number // _ENGINES])
        self.candidates: Sequence[Candidate] = self._fleet.candidates(_MODEL)

    def _add(self, rng: random.Random, worker_id: str, index: PrefixIndex, held: list[int]) -> None:
        url = f"http://{worker_id}"
        member = Member(Worker(worker_id, url, Origin.from_url(url)))
        member.identified(EngineFacts(EngineKind.SGLANG, (0, 5, 23), "0.5.23", _MODEL, page_size=_PAGE))
        self._fleet.add(member)
        index.add_rank((worker_id, 0))
        names = tuple(random_hashes(rng, len(held) // _PAGE))
        index.store((worker_id, 0), BlockStored(names, None, pack_tokens(array("I", held)), _PAGE), ApplyReport())
        shared = block_hashes(held[: len(held) // 2], _PAGE)
        book_live(rng, member.load_of(0), shared, _OWN_BLOCKS)

    def read(self) -> Prompt:
        """From the bytes of the ids to four bytes for each."""
        prompt = prompt_in_ids(self.route, self.envelope, _MODEL)
        assert prompt is not None
        return prompt

    def look_up(self, prompt: Prompt) -> RouteRequest:
        """Hash the blocks, unless that has been done, and ask who has them."""
        return self.prefixes.request(prompt, None, self.candidates)

    def book(self, choice: Placement) -> None:
        """Take the load, and give it back."""
        blocks = choice.prompt
        assert blocks is not None
        choice.candidate.load.book(
            requests=1,
            blocks=blocks.capacity_blocks,
            prefill_tokens=blocks.uncached_tokens(choice.overlap_blocks or 0),
            block_hashes=blocks.sequence_hashes,
        ).release()

    def predict(self, prompt: Prompt, choice: Placement) -> None:
        """Assume the blocks to be there, and take that back."""
        self.prefixes.failed(self.prefixes.sent(prompt, choice))

    def all(self) -> None:
        """Every step once."""
        prompt = self.read()
        choice = self.policy.select(self.look_up(prompt), self.candidates)
        self.book(choice)
        self.predict(prompt, choice)

    def without(self) -> None:
        """What ``least-loaded`` does instead."""
        choice = self.plain.select(RouteRequest(self.envelope.prompt_tokens), self.candidates)
        choice.candidate.load.book(requests=1, blocks=1, prefill_tokens=self.envelope.prompt_tokens).release()


def main() -> None:
    """Measure, and print the steps of each length."""
    rng = random.Random(1)
    for tokens, aim_us in _AIMS_US.items():
        way = Way(rng, tokens)
        raw = way.envelope.body.text("input_ids")
        if parse_ids(raw) != plain_ids(raw) or block_hashes(way.ids, _PAGE) != plain_hashes(way.ids):
            raise AssertionError("the fast form and the plain one differ")
        prompt = way.read()
        request = way.look_up(prompt)
        choice = way.policy.select(request, way.candidates)
        packed = prompt.ids[EngineKind.SGLANG]
        total_us, without_us = _cpu_us(way.all), _cpu_us(way.without)
        added_us = total_us - without_us
        steps = {
            "read ids": (_cpu_us(way.read), _cpu_us(lambda: plain_ids(raw))),  # noqa: B023  # called at once
            "hash": (_cpu_us(lambda: block_hashes(packed, _PAGE)), _cpu_us(lambda: plain_hashes(way.ids))),  # noqa: B023
            "look up": (_cpu_us(lambda: way.look_up(prompt)), None),  # noqa: B023
            "choose": (_cpu_us(lambda: way.policy.select(request, way.candidates)), None),  # noqa: B023
            "book, release": (_cpu_us(lambda: way.book(choice)), None),  # noqa: B023
            "predict, withdraw": (_cpu_us(lambda: way.predict(prompt, choice)), None),  # noqa: B023
        }
        verdict = "met" if added_us <= aim_us else "missed"
        print(f"{tokens:,} tokens: {added_us:,.0f} us added (aim {aim_us:,.0f}: {verdict})")
        for name, (took_us, plain_us) in steps.items():
            ratio = f"   plain form {plain_us / took_us:.1f} times as long" if plain_us else ""
            print(f"  {name:18} {took_us:9.1f} us{ratio}")
        print(f"  {'least-loaded, all':18} {without_us:9.1f} us")


if __name__ == "__main__":
    main()

"""A native request's legs on a vLLM worker: which requests they are, and whose answer is whose. Pure."""

from collections.abc import Callable, Sequence

import msgspec

from backends.json_body import JsonBody
from backends.slices import Slices
from backends.upstream.base import Headers
from backends.vllm.native_answer import answer
from backends.vllm.native_request import PATH, NativeLeg, NativePlan
from backends.vllm.native_stream import NativeStream
from gateway.envelope import Envelope
from gateway.routes import Dialect, Route

TOKEN_ROUTE = Route(PATH, Dialect.NATIVE)
_DEFAULT_VERSION = "default"


class NativeAnswer(msgspec.Struct, frozen=True):
    """What the legs' answers become.

    Attributes:
        plan: The request in vLLM's terms.
        public_ids: One for each item of the answer.
        is_incremental: Events hold what is new.
        weight_version: The worker's.
    """

    plan: NativePlan
    public_ids: tuple[str, ...]
    is_incremental: bool
    weight_version: str

    def build(self, bodies: Sequence[bytes]) -> Slices[bytes]:
        """The client's body from the legs' bodies; see ``answer``."""
        return answer(self.plan, bodies, self.public_ids, weight_version=self.weight_version)

    def stream(self) -> NativeStream:
        """The client's stream."""
        return NativeStream(
            self.plan, self.public_ids, is_incremental=self.is_incremental, weight_version=self.weight_version
        )

    def leg_of(self, item: int) -> int:
        """Number of the leg that an item of the answer comes from."""
        return next(number for number, leg in enumerate(self.plan.legs) if item < leg.first + leg.samples)


Build = Callable[[Sequence[bytes]], Slices[bytes]]


def native_answer(
    plan: NativePlan, envelope: Envelope, *, is_incremental: bool, weight_version: str | None
) -> NativeAnswer:
    """What the legs' answers become; see ``NativeAnswer``."""
    ids = envelope.item_ids
    if plan.count != len(ids):
        ids = tuple(f"{envelope.public_id}_{index}" for index in range(plan.count))
    return NativeAnswer(plan, ids, is_incremental, weight_version or _DEFAULT_VERSION)


def leg_envelopes(plan: NativePlan, envelope: Envelope) -> list[Envelope]:
    """The requests of the legs, in order, as if each had come by itself."""
    return [_leg_envelope(leg, plan, envelope) for leg in plan.legs]


def _leg_envelope(leg: NativeLeg, plan: NativePlan, envelope: Envelope) -> Envelope:
    # Greedy samples are legs of their own, which find the prompt cached after the first of them.
    per_prompt = plan.count // (envelope.batch_size or 1)
    tokens = 0 if leg.first % per_prompt else leg.wanted.prompt_tokens
    return msgspec.structs.replace(
        envelope,
        body=JsonBody.parse(leg.body),
        headers=_headers(leg.headers, envelope.headers),
        item_ids=(envelope.public_id,),
        batch_size=None,
        samples=leg.samples,
        prompt_tokens=tokens,
    )


def _headers(own: Sequence[tuple[bytes, bytes]], client: Headers) -> Headers:
    names = {name for name, _ in own}
    return [*(header for header in client if header[0] not in names), *own] if own else client

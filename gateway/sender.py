"""Sends the legs of a request to the rank that was chosen for it: booked, built, written."""

import functools
from collections.abc import Callable, Mapping, Sequence

from backends.base import NO_CHANGES
from backends.cancel_policy import CancelPolicy, LegKind, abort_capability, cancel_policy
from backends.leg import Booking, Leg
from backends.types import EngineFacts, EngineIds, EngineKind
from backends.upstream.base import UpstreamCall, UpstreamClient, UpstreamRequest
from gateway.envelope import Envelope
from gateway.expand import choice_changes, choice_ids
from gateway.ids import IdMap, id_map
from gateway.prompts import Prompt
from gateway.routes import Dialect, Route
from gateway.services import Services
from routers.fleet import Member
from routers.load import RankBooking
from routers.types import Placement

_NATIVE = Dialect.NATIVE


class Written:
    """What an engine had said when a request was written to it, which may be long after it was placed.

    Attributes:
        facts: See above; of a request that is not written yet, when it was placed.
    """

    __slots__ = ("facts",)

    def __init__(self, facts: EngineFacts) -> None:
        self.facts = facts


class Sender:
    """Sends the legs of one request to the rank that was chosen for it.

    Args:
        services: What all exchanges share.
        route: The engine's route.
        envelope: The request.
        member: The worker.
        facts: What its engine has said.
        choice: The rank that was chosen.
        is_stream: The engine is asked to stream.
        prompt: What is known of its prompt.
        waited: Told how many seconds it was held back, if it was, once it is sent.

    Attributes:
        choice: See above.
        dp_rank: Rank that was chosen, ``None`` when the worker has only one.
        facts: See above.
        is_stream: See above.
        legs: What was sent.
        member: See above.
        ids: Rewrites the ids in each leg's answer.
        sent_ids: Ids given to the engine.
        written: What the engine had said when it got them.
    """

    __slots__ = (
        "_blocks",
        "_envelope",
        "_load",
        "_overlap_blocks",
        "_prompt",
        "_route",
        "_services",
        "_waited",
        "choice",
        "dp_rank",
        "facts",
        "ids",
        "is_stream",
        "legs",
        "member",
        "sent_ids",
        "written",
    )

    def __init__(
        self,
        services: Services,
        route: Route,
        envelope: Envelope,
        member: Member,
        facts: EngineFacts,
        choice: Placement,
        *,
        is_stream: bool,
        prompt: Prompt | None = None,
        waited: Callable[[float], None] | None = None,
    ) -> None:
        self._services = services
        self._route = route
        self._envelope = envelope
        self.member = member
        self.facts = facts
        self.written = Written(facts)
        self.choice = choice
        self._load = choice.candidate.load
        self._blocks = choice.prompt
        self._overlap_blocks = choice.overlap_blocks or 0
        self._prompt = prompt
        self._waited = waited
        self.dp_rank = choice.candidate.key.dp_rank if facts.dp_size > 1 else None
        self.is_stream = is_stream
        self.legs: list[Leg] = []
        self.ids: list[IdMap] = []
        self.sent_ids: list[str] = []

    @property
    def _has_one_id(self) -> bool:
        return self._route.dialect is not _NATIVE and not self._envelope.is_stream

    def send_whole(self, changes: Mapping[str, bytes]) -> None:
        """Send the request as it is, but for ``changes``."""
        envelope = self._envelope
        engine_ids = self._engine_ids(envelope.samples)
        self._send(engine_ids, changes, requests=envelope.sequences, prompt_tokens=envelope.prompt_tokens)
        self.ids.append(id_map(engine_ids, envelope.public_id, envelope.item_ids, has_one_id=self._has_one_id))

    def send_each(self, envelopes: Sequence[Envelope]) -> None:
        """Send one request for each of them, all to one rank."""
        try:
            for self._envelope in envelopes:
                self.send_whole(NO_CHANGES)
        except BaseException:
            for leg in self.legs:
                leg.end()
            raise

    def send_samples(self, changes: Mapping[str, bytes]) -> None:
        """Send one request for each sample, all to one rank, where the prompt lies after the first of them."""
        envelope = self._envelope
        for choice in range(envelope.samples):
            engine_ids = self._engine_ids(1)
            try:
                self._send(
                    engine_ids,
                    {**changes, **choice_changes(self._route, envelope.body, choice)},
                    requests=envelope.batch_size or 1,
                    prompt_tokens=0 if choice else envelope.prompt_tokens,
                )
            except BaseException:
                for leg in self.legs:
                    leg.end()
                raise
            self.ids.append(
                choice_ids(
                    engine_ids,
                    envelope.public_id,
                    batch_size=envelope.batch_size,
                    choice=choice,
                    count=envelope.samples,
                    has_one_id=self._has_one_id,
                )
            )

    def _engine_ids(self, samples: int) -> EngineIds:
        backend = self._services.backends[self.facts.engine]
        return backend.engine_ids(
            self._route.path, self._services.new_id(), batch_size=self._envelope.batch_size, samples=samples
        )

    def _book(self, requests: int, prompt_tokens: int) -> RankBooking:
        """Book a leg, by its prompt's blocks where they are known; legs after the first share its prompt."""
        blocks = self._blocks
        if blocks is None:
            page_size = self.facts.page_size
            return self._load.book(
                requests=requests, blocks=-(-prompt_tokens // page_size), prefill_tokens=prompt_tokens
            )
        is_first = not self.legs
        return self._load.book(
            requests=requests,
            blocks=blocks.capacity_blocks if is_first else 0,
            prefill_tokens=blocks.uncached_tokens(self._overlap_blocks) if is_first else 0,
            block_hashes=blocks.sequence_hashes,
        )

    def _send(self, engine_ids: EngineIds, changes: Mapping[str, bytes], *, requests: int, prompt_tokens: int) -> None:
        services, member, facts = self._services, self.member, self.facts
        backend = services.backends[facts.engine]
        booking: Booking = self._book(requests, prompt_tokens)
        is_trial = member.worker.id in services.fleet.tripped
        try:
            request = backend.generation_request(
                member.worker,
                self._route.path,
                self._envelope.body,
                engine_ids,
                dp_rank=self.dp_rank,
                is_stream=self.is_stream,
                headers=self._envelope.headers,
                changes=changes,
            )
            call, booking = self._start(request, booking, is_trial=is_trial)
        except BaseException:
            booking.release()
            raise
        reveals_ids = engine_ids.has_children and self.is_stream
        leg = Leg(
            worker=member.worker,
            backend=backend,
            engine_ids=engine_ids.abortable,
            policy=_policy(facts.engine, facts.version, self.is_stream, reveals_ids or bool(engine_ids.abortable)),
            call=call,
            booking=booking,
            keeper=services.aborter,
            reveals_ids=reveals_ids,
            on_end=services.legs.ended,
            on_first_token=functools.partial(services.fleet.answering, member) if is_trial else None,
        )
        services.legs.add(leg)
        if is_trial:
            services.fleet.sent(member, services.clock())
        self.legs.append(leg)
        self.sent_ids += engine_ids.sent

    def _start(self, request: UpstreamRequest, booking: Booking, *, is_trial: bool) -> tuple[UpstreamCall, Booking]:
        """Write it, or hold it back unless all wait for its result; returns the booking to be used from now on."""
        services, member = self._services, self.member
        if self._prompt is None:
            return services.client.send(member.worker.origin, request), booking
        return services.coalescer.send(
            self._prompt,
            self.choice,
            booking,
            functools.partial(_write, services.client, member, request, self.written),
            may_wait=self._envelope.batch_size is None and not is_trial,
            is_stream=self.is_stream,
            waited=None if self.legs else self._waited,
        )


def _write(client: UpstreamClient, member: Member, request: UpstreamRequest, written: Written) -> UpstreamCall:
    written.facts = member.facts or written.facts
    return client.send(member.worker.origin, request)


@functools.lru_cache(maxsize=256)
def _policy(engine: EngineKind, version: tuple[int, ...], is_stream: bool, has_ids: bool) -> CancelPolicy:
    """How a leg is cancelled; there are few releases in a fleet."""
    capability = abort_capability(engine, version)
    return cancel_policy(engine, capability, kind=LegKind.AGGREGATED, is_stream=is_stream, has_ids=has_ids)

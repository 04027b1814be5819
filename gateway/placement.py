"""From an envelope to a leg: choose a rank, book it, send the request. One step, without an await in between."""

import functools
from collections.abc import Callable, Mapping

import msgspec

from backends.base import NO_CHANGES
from backends.cancel_policy import LegKind, abort_capability, cancel_policy
from backends.leg import Leg
from backends.leg_events import Cause
from backends.types import EngineFacts, EngineIds
from gateway.eligibility import eligible
from gateway.envelope import Envelope
from gateway.expand import choice_changes, choice_ids, expands
from gateway.fold import Fold, fold_changes
from gateway.fold_choice import can_fold, fold_maker
from gateway.ids import IdMap, id_map
from gateway.pair_attempt import PairAttempt
from gateway.pair_placement import choose, place_pair
from gateway.prefixes import Sent
from gateway.prompts import Prompt
from gateway.routes import Dialect, Route
from gateway.services import Services
from routers.fleet import Member
from routers.load import RankBooking
from routers.pair import Paired
from routers.types import Placement, RouteRequest


class Placed(msgspec.Struct, frozen=True):
    """A request on its way to a rank; one over a pair is a ``PairAttempt``.

    Attributes:
        legs: The upstream requests, mostly one; several are the samples of a request that was taken apart. The exchange
            ends them.
        member: The worker in the fleet.
        facts: What its engine said when the request was placed.
        dp_rank: Rank that was chosen, ``None`` when the worker has only one.
        overlap_blocks: Prompt blocks cached there, ``None`` if the policy did not look.
        ids_of_legs: Rewrites the ids in each leg's answer.
        is_stream: The engine was asked to stream.
        new_fold: Makes what turns a stream into the unary answer, given its bound; ``None`` where that cannot be.
        sent_ids: Ids given to the engine.
        batch_size: Items of the batch, ``None`` for a single request.
        choice: What the policy chose.
        sent: What is assumed of the rank since this was sent.
        sample_ids: Public ids of the legs, where each is a sample of one prompt; else empty.
    """

    legs: tuple[Leg, ...]
    member: Member
    facts: EngineFacts
    dp_rank: int | None
    overlap_blocks: int | None
    ids_of_legs: tuple[IdMap, ...]
    is_stream: bool
    new_fold: Callable[[int], Fold] | None
    sent_ids: tuple[str, ...]
    batch_size: int | None
    choice: Placement
    sent: Sent | None
    sample_ids: tuple[str, ...]

    @property
    def leg(self) -> Leg:
        """The first leg, and mostly the only one."""
        return self.legs[0]

    @property
    def ids(self) -> IdMap:
        """Rewrites the ids in the first leg's answer."""
        return self.ids_of_legs[0]

    @property
    def prefill(self) -> None:
        """Nobody else computes the prompt."""
        return None

    @property
    def members(self) -> tuple[Member, ...]:
        """The worker."""
        return (self.member,)

    @property
    def worker_id(self) -> str:
        """Id of the worker."""
        return self.member.worker.id

    @property
    def is_live(self) -> bool:
        """Some leg has not ended."""
        return any(not leg.is_ended for leg in self.legs)

    @property
    def awaits_output(self) -> bool:
        """No output yet of what will show some before its end."""
        return self.is_stream and not any(leg.has_output for leg in self.legs)

    def is_on(self, worker_id: str) -> bool:
        """Whether that worker serves it now."""
        return self.worker_id == worker_id and self.is_live

    def cancel(self, cause: Cause) -> None:
        """Nobody waits for the answer any more."""
        self.member.breaker.released()  # it may have been the trial, of which nothing will be known
        for leg in self.legs:
            leg.cancel(cause, is_paused=self.member.is_paused)

    def can_be_called_off(self, *, is_item: bool) -> bool:
        """Whether the engine can be told to stop it, or an item of it, and knows of it already."""
        live = (leg for leg in self.legs if not leg.is_ended)
        return all(leg.can_be_aborted and (is_item or leg.call.written_at is not None) for leg in live)

    def call_off(self, envelope: Envelope, item_id: str | None) -> bool:
        """Have the engine stop it, or one item of it, whose answer is still read; whether there was anything to stop.

        Args:
            envelope: The request.
            item_id: Public id of the item, ``None`` for all.
        """
        live = [leg for leg in self.legs if not leg.is_ended]
        index = envelope.item_ids.index(item_id) if item_id in envelope.item_ids else None
        if item_id in self.sample_ids:
            live = [leg for leg in (self.legs[self.sample_ids.index(item_id)],) if not leg.is_ended]
        for leg in live:
            items = (leg.engine_ids[index],) if index is not None and len(leg.engine_ids) > 1 else ()
            leg.call_off(items, is_paused=self.member.is_paused)
        return bool(live)

    def blamed(self, error: Exception) -> Member:
        """The worker at fault."""
        del error
        return self.member

    def has_done_its_part(self, member: Member) -> bool:
        """Whether a worker other than the one that is judged has done what it was asked for."""
        del member
        return False  # there is no other

    def end(self) -> None:
        """End the legs that the abort supervisor has not taken over."""
        for leg in self.legs:
            if not leg.is_detached:
                leg.end()


# What the exchange deals with: one worker, or two.
Attempt = Placed | PairAttempt


def place(
    services: Services, route: Route, envelope: Envelope, model: str, failed: set[str], prompt: Prompt | None = None
) -> Attempt:
    """Choose, book and send.

    Args:
        services: Fleet, policy and client.
        route: The route.
        envelope: The request.
        model: Pool to choose from.
        failed: Workers that this request must not be sent to again.
        prompt: Its prompt, if the policy looks at prompts and it is known.

    Raises:
        RoutingError: Nothing can take it.
        GatewayError: Nothing that is there ever could.
    """
    if services.fleet.has_pairs(model):
        chosen = choose(services, route, envelope, model, failed, prompt)
        if isinstance(chosen, Paired):
            return place_pair(services, route, envelope, model, failed, chosen, prompt)
        return _place_alone(services, route, envelope, chosen, prompt)
    candidates = eligible(services.fleet, services.clock, route, envelope, model, failed)
    if prompt is None:
        request = RouteRequest(envelope.prompt_tokens, envelope.stickiness_key)
    else:
        request = services.prefixes.request(prompt, envelope.stickiness_key, candidates)
    return _place_alone(services, route, envelope, services.policy.select(request, candidates), prompt)


def _place_alone(
    services: Services, route: Route, envelope: Envelope, choice: Placement, prompt: Prompt | None
) -> Placed:
    """Book and send to one rank."""
    key = choice.candidate.key
    member = services.fleet.get(key.worker_id)
    assert member is not None
    assert member.facts is not None
    facts = member.facts
    folds = services.limits.folds_unary and can_fold(route, envelope, facts.engine)
    sender = _Sender(
        services,
        route,
        envelope,
        member,
        facts,
        choice,
        key.dp_rank if facts.dp_size > 1 else None,
        is_stream=envelope.is_stream or folds,
    )
    if expands(route, facts.engine, envelope, is_streamed=sender.is_stream, native_n=services.limits.native_n):
        sender.send_samples()
    else:
        sender.send_whole(fold_changes(route.dialect, facts.engine) if folds else NO_CHANGES)
    return Placed(
        legs=tuple(sender.legs),
        member=member,
        facts=facts,
        dp_rank=sender.dp_rank,
        overlap_blocks=choice.overlap_blocks,
        ids_of_legs=tuple(sender.ids),
        is_stream=sender.is_stream,
        new_fold=fold_maker(route, envelope, facts),
        sent_ids=tuple(sender.sent_ids),
        batch_size=envelope.batch_size,
        choice=choice,
        sent=services.prefixes.sent(prompt, choice) if prompt is not None else None,
        sample_ids=_sample_ids(sender.legs, envelope),
    )


def _sample_ids(legs: list[Leg], envelope: Envelope) -> tuple[str, ...]:
    if len(legs) == 1 or envelope.batch_size is not None:
        return ()
    return tuple(f"{envelope.public_id}_{index}" for index in range(len(legs)))


class _Sender:
    """Sends the legs of one request to the rank that was chosen for it.

    Attributes:
        legs: What was sent.
        ids: Rewrites the ids in each leg's answer.
        sent_ids: Ids given to the engine.
    """

    __slots__ = (
        "_blocks",
        "_envelope",
        "_facts",
        "_load",
        "_member",
        "_overlap_blocks",
        "_route",
        "_services",
        "dp_rank",
        "ids",
        "is_stream",
        "legs",
        "sent_ids",
    )

    def __init__(
        self,
        services: Services,
        route: Route,
        envelope: Envelope,
        member: Member,
        facts: EngineFacts,
        choice: Placement,
        dp_rank: int | None,
        *,
        is_stream: bool,
    ) -> None:
        self._services = services
        self._route = route
        self._envelope = envelope
        self._member = member
        self._facts = facts
        self._load = choice.candidate.load
        self._blocks = choice.prompt
        self._overlap_blocks = choice.overlap_blocks or 0
        self.dp_rank = dp_rank
        self.is_stream = is_stream
        self.legs: list[Leg] = []
        self.ids: list[IdMap] = []
        self.sent_ids: list[str] = []

    @property
    def _has_one_id(self) -> bool:
        return self._route.dialect is not Dialect.NATIVE and not self._envelope.is_stream

    def send_whole(self, changes: Mapping[str, bytes]) -> None:
        """Send the request as it is, but for ``changes``."""
        envelope = self._envelope
        engine_ids = self._engine_ids(envelope.samples)
        self._send(engine_ids, changes, requests=envelope.sequences, prompt_tokens=envelope.prompt_tokens)
        self.ids.append(id_map(engine_ids, envelope.public_id, envelope.item_ids, has_one_id=self._has_one_id))

    def send_samples(self) -> None:
        """Send one request for each sample, all to one rank, where the prompt lies after the first of them."""
        envelope = self._envelope
        for choice in range(envelope.samples):
            engine_ids = self._engine_ids(1)
            try:
                self._send(
                    engine_ids,
                    choice_changes(self._route, envelope.body, choice),
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
        backend = self._services.backends[self._facts.engine]
        return backend.engine_ids(
            self._route.path, self._services.new_id(), batch_size=self._envelope.batch_size, samples=samples
        )

    def _book(self, requests: int, prompt_tokens: int) -> RankBooking:
        """Book a leg, by its prompt's blocks where they are known; legs after the first share its prompt."""
        blocks = self._blocks
        if blocks is None:
            page_size = self._facts.page_size
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
        services, member, facts = self._services, self._member, self._facts
        backend = services.backends[facts.engine]
        booking = self._book(requests, prompt_tokens)
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
            call = services.client.send(member.worker.origin, request)
        except BaseException:
            booking.release()
            raise
        is_trial = member.worker.id in services.fleet.tripped
        reveals_ids = engine_ids.has_children and self.is_stream
        leg = Leg(
            worker=member.worker,
            backend=backend,
            engine_ids=engine_ids.abortable,
            policy=cancel_policy(
                facts.engine,
                abort_capability(facts.engine, facts.version),
                kind=LegKind.AGGREGATED,
                is_stream=self.is_stream,
                has_ids=reveals_ids or bool(engine_ids.abortable),
            ),
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

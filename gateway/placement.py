"""From an envelope to a leg: choose a rank, book it, send the request. One step, without an await in between."""

from collections.abc import Callable, Mapping
from typing import ClassVar

import msgspec

from backends.base import NO_CHANGES
from backends.leg import Leg
from backends.leg_events import Cause
from backends.types import EngineFacts, EngineKind
from backends.vllm.native_request import NativePlan
from gateway.eligibility import eligible
from gateway.envelope import FLAT_OUTPUT, Envelope
from gateway.expand import expands
from gateway.flat_logprobs import flat_builder, flat_changes, wants_flat
from gateway.fold import Fold, fold_changes
from gateway.fold_choice import can_fold, fold_maker
from gateway.ids import IdMap
from gateway.native_legs import TOKEN_ROUTE, Build, NativeAnswer, leg_envelopes, native_answer
from gateway.pair_attempt import PairAttempt
from gateway.pair_placement import choose, place_pair
from gateway.prefixes import Sent
from gateway.prompts import Prompt
from gateway.routes import Route
from gateway.sender import Sender, Written
from gateway.services import Services
from routers.fleet import Fleet, Member
from routers.pair import Paired
from routers.types import Placement, RouteRequest


class Placed(msgspec.Struct, frozen=True):
    """A request on its way to a rank; one over a pair is a ``PairAttempt``.

    Attributes:
        legs: The upstream requests, mostly one; several are the samples of a request that was taken apart. The exchange
            ends them.
        leg: The first of them, and mostly the only one.
        member: The worker in the fleet.
        worker_id: Id of the worker.
        facts: What its engine said when the request was placed.
        written: The same when the request was written.
        dp_rank: Rank that was chosen, ``None`` when the worker has only one.
        overlap_blocks: Prompt blocks cached there, ``None`` if the policy did not look.
        ids_of_legs: Rewrites the ids in each leg's answer.
        ids: The same for the first leg.
        is_stream: The engine was asked to stream.
        new_fold: Makes what turns a stream into the unary answer, given its bound; ``None`` where that cannot be.
        sent_ids: Ids given to the engine.
        batch_size: Items of the batch, ``None`` for a single request.
        choice: What the policy chose.
        sent: What is assumed of the rank since this was sent.
        sample_ids: Public ids of what is sampled, where those are not the ids of the envelope's items; else empty.
        native: What the answers become, of a native request on vLLM.
        build: Makes the unary answer of those of the legs, where they are not it; ``None`` where they are.
    """

    legs: tuple[Leg, ...]
    leg: Leg
    member: Member
    worker_id: str
    facts: EngineFacts
    written: Written
    dp_rank: int | None
    overlap_blocks: int | None
    ids_of_legs: tuple[IdMap, ...]
    ids: IdMap
    is_stream: bool
    new_fold: Callable[[int], Fold] | None
    sent_ids: tuple[str, ...]
    batch_size: int | None
    choice: Placement
    sent: Sent | None
    sample_ids: tuple[str, ...]
    native: NativeAnswer | None = None
    build: Build | None = None
    prefill: ClassVar[None] = None  # nobody else computes the prompt

    @property
    def is_plain(self) -> bool:
        """One document was asked for, and the engine's is the client's."""
        return not self.is_stream and len(self.legs) == 1 and self.build is None

    @property
    def members(self) -> tuple[Member, ...]:
        """The worker."""
        return (self.member,)

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
        if (number := self._leg_of(item_id)) is not None:
            live = [leg for leg in (self.legs[number],) if not leg.is_ended]
        for leg in live:
            items = (leg.engine_ids[index],) if index is not None and len(leg.engine_ids) > 1 else ()
            leg.call_off(items, is_paused=self.member.is_paused)
        return bool(live)

    def _leg_of(self, item_id: str | None) -> int | None:
        """Number of the leg that an item has to itself, or shares with samples that are stopped with it."""
        if self.native is not None:
            ids = self.native.public_ids
            return self.native.leg_of(ids.index(item_id)) if item_id in ids else None
        return self.sample_ids.index(item_id) if item_id in self.sample_ids else None

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
    services: Services,
    route: Route,
    envelope: Envelope,
    model: str,
    failed: set[str],
    prompt: Prompt | None = None,
    waited: Callable[[float], None] | None = None,
) -> Attempt:
    """Choose, book and send.

    Args:
        services: Fleet, policy and client.
        route: The route.
        envelope: The request.
        model: Pool to choose from.
        failed: Workers that this request must not be sent to again.
        prompt: Its prompt, if the policy looks at prompts and it is known.
        waited: Told how many seconds it was held back, if it was, once it is sent.

    Raises:
        RoutingError: Nothing can take it.
        GatewayError: Nothing that is there ever could.
    """
    if services.fleet.has_pairs(model):
        chosen = choose(services, route, envelope, model, failed, prompt)
        if isinstance(chosen, Paired):
            return place_pair(services, route, envelope, model, failed, chosen, prompt)
        return _place_alone(services, route, envelope, chosen, prompt, waited)
    candidates = eligible(services.fleet, services.clock, route, envelope, model, failed)
    if prompt is None:
        request = RouteRequest(envelope.prompt_tokens, envelope.stickiness_key)
    else:
        request = services.prefixes.request(prompt, envelope.stickiness_key, candidates)
    return _place_alone(services, route, envelope, services.policy.select(request, candidates), prompt, waited)


def _place_alone(
    services: Services,
    route: Route,
    envelope: Envelope,
    choice: Placement,
    prompt: Prompt | None,
    waited: Callable[[float], None] | None,
) -> Placed:
    """Book and send to one rank."""
    member = services.fleet.get(choice.candidate.key.worker_id)
    assert member is not None
    assert member.facts is not None
    facts = member.facts
    if envelope.native is not None and facts.engine is EngineKind.VLLM:
        return _place_native(services, envelope, member, facts, choice, prompt, envelope.native.plan(member))
    folds = services.limits.folds_unary and can_fold(route, envelope, facts.engine)
    flat = FLAT_OUTPUT in envelope.body.fields and wants_flat(route.dialect, envelope.body)
    changes: Mapping[str, bytes] = fold_changes(route.dialect, facts.engine) if folds else NO_CHANGES
    if flat:
        changes = flat_changes(route.dialect, facts.engine, envelope.body, is_stream=envelope.is_stream)
    is_stream = envelope.is_stream or folds
    sender = Sender(services, route, envelope, member, facts, choice, is_stream=is_stream, prompt=prompt, waited=waited)
    if expands(route, facts.engine, envelope, is_streamed=sender.is_stream, native_n=services.limits.native_n):
        sender.send_samples(changes)
    else:
        sender.send_whole(changes)
    return _placed(
        sender,
        envelope,
        new_fold=fold_maker(route, envelope, facts),
        sent=services.prefixes.sent(prompt, choice) if prompt is not None else None,
        sample_ids=_sample_ids(sender.legs, envelope),
        build=flat_builder(route.dialect, facts.engine, envelope.body) if flat else None,
    )


def _place_native(
    services: Services,
    envelope: Envelope,
    member: Member,
    facts: EngineFacts,
    choice: Placement,
    prompt: Prompt | None,
    plan: NativePlan,
) -> Placed:
    """Send a native request to a vLLM worker, prompt by prompt."""
    sender = Sender(services, TOKEN_ROUTE, envelope, member, facts, choice, is_stream=plan.is_stream)
    sender.send_each(leg_envelopes(plan, envelope))
    native = native_answer(
        plan,
        envelope,
        is_incremental=services.limits.native_increments or _streams_deltas(services.fleet, member.model_id),
        weight_version=facts.weight_version,
    )
    return _placed(
        sender,
        envelope,
        new_fold=None,
        sent=services.prefixes.sent(prompt, choice) if prompt is not None else None,
        sample_ids=native.public_ids if native.public_ids != envelope.item_ids else (),
        native=native,
        build=native.build,
    )


def _streams_deltas(fleet: Fleet, model_id: str | None) -> bool:
    """Whether SGLang workers of the model stream deltas, so that the client sees the same whoever answers."""
    found = (member.facts for member in fleet if member.model_id == model_id and member.facts is not None)
    return any(facts.engine is EngineKind.SGLANG and facts.incremental_output for facts in found)


def _placed(
    sender: Sender,
    envelope: Envelope,
    *,
    new_fold: Callable[[int], Fold] | None,
    sent: Sent | None,
    sample_ids: tuple[str, ...],
    native: NativeAnswer | None = None,
    build: Build | None = None,
) -> Placed:
    return Placed(
        legs=tuple(sender.legs),
        leg=sender.legs[0],
        member=sender.member,
        worker_id=sender.member.worker.id,
        facts=sender.facts,
        written=sender.written,
        dp_rank=sender.dp_rank,
        overlap_blocks=sender.choice.overlap_blocks,
        ids_of_legs=tuple(sender.ids),
        ids=sender.ids[0],
        is_stream=sender.is_stream,
        new_fold=new_fold,
        sent_ids=tuple(sender.sent_ids),
        batch_size=envelope.batch_size,
        choice=sender.choice,
        sent=sent,
        sample_ids=sample_ids,
        native=native,
        build=build,
    )


def _sample_ids(legs: list[Leg], envelope: Envelope) -> tuple[str, ...]:
    if len(legs) == 1 or envelope.batch_size is not None:
        return ()
    return tuple(f"{envelope.public_id}_{index}" for index in range(len(legs)))

"""The two legs of one sample of a request over a pair: rooms, bodies, bookings, and the writes.

Decode is booked with the choice of the pair, long before it is sent, so that no other request takes its place.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from backends.base import NO_CHANGES
from backends.body_edit import edited
from backends.cancel_policy import LegKind, abort_capability, cancel_policy
from backends.json_body import JsonBody, JsonBodyError
from backends.leg import Leg
from backends.pair_types import Part
from backends.sglang import pd as sglang
from backends.types import EngineFacts, EngineIds, EngineKind
from backends.vllm import pd as vllm
from gateway.envelope import Envelope
from gateway.errors import InvalidRequest
from gateway.expand import choice_ids
from gateway.fold import fold_changes
from gateway.ids import IdMap, id_map
from gateway.routes import Dialect, Route
from gateway.services import Services
from routers.fleet import Member
from routers.load import RankBooking
from routers.pair import Paired
from routers.types import Placement


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank that a leg is for.

    Attributes:
        member: Its worker in the fleet.
        facts: What its engine said when it was chosen.
        placement: The policy's choice.
    """

    member: Member
    facts: EngineFacts
    placement: Placement

    @property
    def dp_rank(self) -> int | None:
        """The rank, ``None`` where the worker has one only."""
        return self.placement.candidate.key.dp_rank if self.facts.dp_size > 1 else None


def seat_of(services: Services, placement: Placement) -> Seat:
    """The seat that a policy has chosen."""
    member = services.fleet.get(placement.candidate.key.worker_id)
    assert member is not None
    assert member.facts is not None
    return Seat(member, member.facts, placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRequest:
    """What is the same for all samples of a request.

    Attributes:
        services: What all exchanges share.
        route: The route.
        envelope: The request.
        is_stream: Decode is asked to stream.
        is_folded: Its stream becomes one document.
        count: Samples that have legs of their own, 1 where the request was not taken apart.
    """

    services: Services
    route: Route
    envelope: Envelope
    is_stream: bool
    is_folded: bool
    count: int = 1


class PairLegs:
    """Sends the legs of one sample.

    Args:
        request: The request.
        paired: The two ranks.
        choice: Number of the sample, from 0; those after the first find the prompt's blocks cached.
        changes: JSON of fields that make it this sample's request.

    Attributes:
        prefill: Where the prompt is computed.
        decode: Where the answer comes from; another one after ``rebook``.
        ids: Rewrites the ids in decode's answer.
        sent_ids: Ids given to the engines.

    Raises:
        InvalidRequest: The body cannot be made into those of two legs; nothing is booked then.
    """

    def __init__(
        self, request: PairRequest, paired: Paired, choice: int = 0, changes: Mapping[str, bytes] = NO_CHANGES
    ) -> None:
        services, envelope = request.services, request.envelope
        self._request = request
        self._services = services
        self._choice = choice
        self._body = edited(envelope.body, changes) if changes else envelope.body
        self._rooms: list[sglang.Bootstrap] = []
        self._engine_ids = EngineIds((), ())
        self._transfer = ""
        self.prefill = seat_of(services, paired.prefill)
        self.decode = seat_of(services, paired.decode)
        self._reserved = ""
        self.sent_ids: list[str] = []
        self.ids: IdMap
        try:
            self._prefill_request = self._make_prefill()
        except BaseException:
            self._release_rooms()
            raise
        self._prefill_booking: RankBooking | None = self._book_prefill()
        self._decode_booking: RankBooking | None = self._book_decode()

    @property
    def engine(self) -> EngineKind:
        """Software of both."""
        return self.prefill.facts.engine

    @property
    def is_mooncake(self) -> bool:
        """The prompt goes over under an id of our own, and not by what prefill's answer says."""
        return bool(self.prefill.facts.transfer_engine_ids)

    def handoff_in(self, answer: bytes) -> bytes:
        """What decode needs to be told, once prefill has ended well; empty if it has left nothing.

        Args:
            answer: The prefill leg's, if it is a document.

        Raises:
            HandoffUnusable: Decode must not be told what is there.
        """
        if self.engine is EngineKind.SGLANG:
            return b""
        if not self.is_mooncake:
            return vllm.handoff_in(answer)
        seat = self.prefill
        origin = seat.member.worker.origin
        host = f"[{origin.host}]" if ":" in origin.host else origin.host
        return vllm.mooncake_handoff(
            self._transfer,
            engine_id=seat.facts.transfer_engine_ids[seat.dp_rank or 0],
            bootstrap_address=f"http://{host}:{seat.member.bootstrap_port}",
        )

    @property
    def sequences(self) -> int:
        """Prompts of the sample."""
        return self._request.envelope.batch_size or 1

    # Bodies.

    def _make_prefill(self) -> JsonBody:
        """The prefill leg's body, under fresh ids and in fresh rooms."""
        request, route, envelope = self._request, self._request.route, self._request.envelope
        backend = self._services.backends[self.engine]
        self._engine_ids = backend.engine_ids(
            route.path, self._services.new_id(), batch_size=envelope.batch_size, samples=1
        )
        self.sent_ids += self._engine_ids.sent
        self.ids = self._id_map(request)
        try:
            if self.engine is EngineKind.VLLM:
                self._transfer = vllm.transfer_id(self._services.new_id()) if self.is_mooncake else ""
                params = vllm.mooncake_prefill(self._transfer) if self._transfer else vllm.NIXL_PREFILL
                return vllm.prefill_body(route.path, self._body, params)
            self._draw_rooms()
            return sglang.prefill_body(
                route.path,
                self._body,
                self._rooms,
                is_batch=envelope.batch_size is not None,
                prefill_rank=self.prefill.dp_rank,
            )
        except sglang.BodyUnfit as exc:
            raise InvalidRequest(str(exc), param=exc.param) from exc
        except JsonBodyError as exc:
            raise InvalidRequest("'sampling_params' must be an object", param="sampling_params") from exc

    def _id_map(self, request: PairRequest) -> IdMap:
        envelope = request.envelope
        # Choices of a stream have one id on vLLM, and each its own on SGLang.
        has_one_id = request.route.dialect is not Dialect.NATIVE and (
            self.engine is EngineKind.VLLM or not envelope.is_stream
        )
        if request.count == 1:
            is_document = request.route.dialect is not Dialect.NATIVE and not envelope.is_stream
            return id_map(self._engine_ids, envelope.public_id, envelope.item_ids, has_one_id=is_document)
        return choice_ids(
            self._engine_ids,
            envelope.public_id,
            batch_size=envelope.batch_size,
            choice=self._choice,
            count=request.count,
            has_one_id=has_one_id,
        )

    def _draw_rooms(self) -> None:
        services, seat = self._services, self.prefill
        host, port = seat.member.worker.origin.host, seat.member.bootstrap_port or sglang.DEFAULT_BOOTSTRAP_PORT
        rank = seat.dp_rank if seat.facts.follows_rooms else None
        for _ in range(self.sequences):
            room = sglang.draw_room(services.room_bits, services.live_rooms, seat.facts.dp_size, rank)
            try:
                self._rooms.append(sglang.Bootstrap(host, port, room))
            except BaseException:
                services.live_rooms.discard(room)
                raise

    def _decode_body(self, handoff: bytes, *, is_release: bool) -> JsonBody:
        path, is_batch = self._request.route.path, self._request.envelope.batch_size is not None
        if self.engine is EngineKind.VLLM:
            return vllm.decode_body(path, self._body, handoff, is_release=is_release)
        return sglang.decode_body(self._body, self._rooms, is_batch=is_batch, prefill_rank=self.prefill.dp_rank)

    # Bookings.

    def _book_prefill(self) -> RankBooking:
        """Tokens to compute and no blocks: those go to decode, and what stays is only cached."""
        placement = self.prefill.placement
        tokens = self._request.envelope.prompt_tokens
        if placement.prompt is not None:
            tokens = placement.prompt.uncached_tokens(placement.overlap_blocks or 0)
        load = placement.candidate.load
        return load.book(requests=self.sequences, blocks=0, prefill_tokens=0 if self._choice else tokens)

    def _book_decode(self) -> RankBooking:
        placement = self.decode.placement
        if placement.prompt is not None:
            blocks = placement.prompt.capacity_blocks
        else:
            blocks = -(-self._request.envelope.prompt_tokens // self.decode.facts.page_size)
        self._reserved = self.decode.member.worker.id
        self._services.legs.reserve(self._reserved)
        return placement.candidate.load.book(requests=self.sequences, blocks=blocks, prefill_tokens=0)

    def _unreserve(self) -> None:
        if self._reserved:
            self._services.legs.unreserve(self._reserved)
            self._reserved = ""

    def rebook(self, placement: Placement) -> None:
        """Decode goes to another rank, which is booked."""
        self._release_decode()
        self.decode = seat_of(self._services, placement)
        self._decode_booking = self._book_decode()

    def _release_decode(self) -> None:
        if self._decode_booking is not None:
            self._decode_booking.release()
            self._decode_booking = None
        self._unreserve()

    # Sending.

    def send_prefill(self, number: int, on_abandoned: Callable[[], None]) -> Leg:
        """Send the prefill leg.

        Args:
            number: From 1. Each has ids of its own.
            on_abandoned: See ``Leg``.
        """
        if number > 1:
            self._release_rooms()
            self._prefill_request = self._make_prefill()
        booking = self._prefill_booking or self._book_prefill()
        self._prefill_booking = None
        is_stream = self.engine is EngineKind.SGLANG
        return self._send(Part.PREFILL, self._prefill_request, booking, NO_CHANGES, is_stream, on_abandoned)

    def send_decode(self, handoff: bytes, on_abandoned: Callable[[], None], *, is_release: bool = False) -> Leg:
        """Send the decode leg.

        Args:
            handoff: What prefill's answer holds for it, if anything.
            on_abandoned: See ``Leg``.
            is_release: Only so that it takes the blocks over.
        """
        request = self._request
        booking = self._decode_booking or self._book_decode()
        self._decode_booking = None
        try:
            body = self._decode_body(handoff, is_release=is_release)
        except BaseException:
            booking.release()
            raise
        changes: Mapping[str, bytes] = NO_CHANGES
        if is_release or request.is_folded:
            changes = fold_changes(request.route.dialect, self.engine)
        leg = self._send(Part.DECODE, body, booking, changes, request.is_stream or is_release, on_abandoned)
        self._unreserve()
        return leg

    def _send(
        self,
        part: Part,
        body: JsonBody,
        booking: RankBooking,
        changes: Mapping[str, bytes],
        is_stream: bool,
        on_abandoned: Callable[[], None],
    ) -> Leg:
        services, seat, ids = self._services, self.prefill if part is Part.PREFILL else self.decode, self._engine_ids
        member, facts = seat.member, seat.facts
        backend = services.backends[facts.engine]
        try:
            request = backend.generation_request(
                member.worker,
                self._request.route.path,
                body,
                ids,
                dp_rank=seat.dp_rank,
                is_stream=is_stream,
                headers=self._request.envelope.headers,
                changes=changes,
            )
            call = services.client.send(member.worker.origin, request)
        except BaseException:
            booking.release()
            raise
        is_trial = member.worker.id in services.fleet.tripped
        leg = Leg(
            worker=member.worker,
            backend=backend,
            engine_ids=ids.abortable,
            policy=cancel_policy(
                facts.engine,
                abort_capability(facts.engine, facts.version),
                kind=LegKind.PREFILL if part is Part.PREFILL else LegKind.DECODE,
                is_stream=is_stream,
                has_ids=bool(ids.abortable),
            ),
            call=call,
            booking=booking,
            keeper=services.aborter,
            on_end=services.legs.ended,
            on_first_token=functools.partial(services.fleet.answering, member) if is_trial else None,
            on_abandoned=on_abandoned,
        )
        services.legs.add(leg)
        if is_trial:
            services.fleet.sent(member, services.clock())
        return leg

    # The end.

    def _release_rooms(self) -> None:
        self._services.live_rooms.difference_update(one.room for one in self._rooms)
        self._rooms.clear()

    def close(self) -> None:
        """Both legs are over, or were never sent: give back what neither has taken."""
        self._release_rooms()
        self._release_decode()
        if self._prefill_booking is not None:
            self._prefill_booking.release()
            self._prefill_booking = None

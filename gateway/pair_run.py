"""One sample of a request over a pair, from its first write to the end of both legs: the shell around ``PairMachine``.

Both legs are read by tasks of the process's own, and what they see goes into an inbox, so that what becomes known in
one turn of the loop counts in the machine's order and not in that of the readers. What is for the client waits in a
short queue; while it is not taken, decode is not read on.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from backends import pair_events as pair
from backends.errors import AnswerMalformed, CallEnded, ConnectFailed, UpstreamError
from backends.leg import Leg
from backends.leg_events import Cause
from backends.pair_types import CALLED_OFF, Failure, PairState, Part, PrefillState
from backends.prefill_events import PrefillReader, PrefillRefused, PromptReport
from backends.types import EngineKind
from backends.upstream.base import AnswerHead
from gateway.answer import Verdict
from gateway.decode_reader import EVENT_STREAM, JSON, DecodeReader
from gateway.errors import GatewayError
from gateway.pair_failure import EndedByEngine, failure_of
from gateway.pair_legs import PairLegs
from gateway.pair_plan import PairPlan, new_machine
from gateway.services import Services
from gateway.unary import refusal_of
from routers.errors import RoutingError

logger = logging.getLogger("forebay.pairs")

# What waits for the client, above which decode is not read on.
QUEUE_LIMIT_BYTES = 256 * 1024

Output = pair.Pass | pair.Finish | pair.Fail


class PairRun:
    """One sample over one pair.

    Args:
        services: What all exchanges share.
        legs: Sends its legs.
        plan: The rest.
        on_output: Told when there is something to take.

    Attributes:
        legs: See above.
        head: Of decode's answer, ``None`` before.
        verdict: How decode's answer ended, ``None`` before.
        prompts: What prefill has told of the prompts.
        is_stopped: Cancelled: nothing more is to be taken.
    """

    def __init__(
        self, services: Services, legs: PairLegs, plan: PairPlan, on_output: Callable[["PairRun"], None]
    ) -> None:
        self._services = services
        self._plan = plan
        self._on_output = on_output
        self._keeper = services.aborter
        self._machine = new_machine(services, legs, plan)
        self._loop = asyncio.get_running_loop()
        self._legs_by_part: dict[Part, Leg] = {}
        self._inbox: list[pair.Event] = []
        self._is_due = self._is_opened = False
        self._timer: asyncio.TimerHandle | None = None
        self._outputs: deque[Output] = deque()
        self._queued_bytes = 0
        self._space = asyncio.Event()
        self._hold_began: float | None = None
        self.legs = legs
        self.head: AnswerHead | None = None
        self.verdict: Verdict | None = None
        self.prompts: list[PromptReport] = []
        self.is_stopped = False

    def start(self) -> None:
        """Send what is to be sent first; called once, in the same step as the choice of the pair."""
        self._do(self._machine.start(self._keeper.now()))

    # For the exchange.

    @property
    def sent(self) -> tuple[Leg, ...]:
        """The legs that were sent, the ended ones included."""
        return tuple(self._legs_by_part.values())

    @property
    def has_output(self) -> bool:
        """Decode has shown output."""
        leg = self._legs_by_part.get(Part.DECODE)
        return leg is not None and leg.has_output

    @property
    def keeps_logprobs(self) -> bool:
        """The client wants what prefill tells of the prompt."""
        return self._plan.keeps_logprobs

    @property
    def is_ended(self) -> bool:
        """The client has its end, or is gone."""
        return self._machine.state is PairState.ENDED

    @property
    def prefill_is_done(self) -> bool:
        """Prefill's answer has ended well."""
        return self._machine.prefill is PrefillState.DONE

    @property
    def was_called_off(self) -> bool:
        """Its client has asked for an abort."""
        return any(leg.was_called_off for leg in self.sent)

    def take(self) -> Output | None:
        """The next thing for the client, ``None`` if there is none now."""
        if not self._outputs:
            return None
        output = self._outputs.popleft()
        if not isinstance(output, pair.Fail):
            self._queued_bytes -= len(output.block)
        self._space.set()
        return output

    def cancel(self, cause: Cause) -> None:
        """Nobody waits for the answer any more, or nobody may."""
        leg = self._legs_by_part.get(Part.PREFILL)
        if leg is not None and self.legs.engine is EngineKind.VLLM and leg.call.is_over:
            self._note_opened()  # its answer is here, if unread: a prompt that it has ready must not be forgotten
        self._report(pair.Cancelled(self._keeper.now(), cause))

    def call_off(self) -> None:
        """Have both engines stop, and give the client what there is."""
        self._report(pair.CalledOff(self._keeper.now()))

    # Events.

    def _report(self, event: pair.Event) -> None:
        self._inbox.append(event)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._take_inbox)

    def _take_inbox(self) -> None:
        self._is_due = False
        events, self._inbox = pair.in_order(self._inbox), []
        for event in events:
            self._do(self._machine.on(event))
        if self._machine.cause is not None and not self.is_stopped:
            self.is_stopped = True
            self._outputs.clear()
            self._on_output(self)
        self._space.set()

    def _note_opened(self) -> None:
        """Prefill's answer has begun; told once for each prefill."""
        if not self._is_opened:
            self._is_opened = True
            self._report(pair.PrefillOpened(self._keeper.now()))

    def _tick(self) -> None:
        self._timer = None
        self._report(pair.Tick(self._keeper.now()))

    # Commands.

    def _do(self, commands: list[pair.Command]) -> None:
        for command in commands:
            if isinstance(command, pair.Pass | pair.Finish | pair.Fail):
                self._put(command)
            elif isinstance(command, pair.SendPrefill):
                self._send_prefill(command)
            elif isinstance(command, pair.SendDecode):
                self._send_decode(command)
            elif isinstance(command, pair.EndLeg | pair.StopLeg | pair.CallOffLeg):
                self._do_to_leg(command)
            elif isinstance(command, pair.WakeAt):
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = self._loop.call_at(command.at, self._tick)
            elif isinstance(command, pair.LogFailure):
                self._log_failure(command)
            else:
                self._do_simple(command)

    def _do_to_leg(self, command: pair.EndLeg | pair.StopLeg | pair.CallOffLeg) -> None:
        leg = self._legs_by_part.get(command.part)
        if leg is None:
            return  # it could not be sent
        if isinstance(command, pair.EndLeg):
            if not leg.is_detached:  # else its keeper sees to its end
                leg.end()
        elif isinstance(command, pair.StopLeg):
            leg.cancel(command.cause, is_paused=self._is_paused(command.part))
        else:
            leg.call_off(is_paused=self._is_paused(command.part))

    def _do_simple(self, command: pair.Simple) -> None:
        if command is pair.Simple.DETACH_PREFILL:
            self._services.tails.add(self)
        elif command is pair.Simple.ABANDONED:
            self._services.metrics.handoff_abandoned()
        else:
            if self._timer is not None:
                self._timer.cancel()
            self._services.tails.discard(self)
            self.legs.close()

    def _put(self, output: Output) -> None:
        if isinstance(output, pair.Fail):
            part = output.failure.part
            if part is not None:
                self._services.pair_metrics.failed(str(part), output.failure.type)
        else:
            self._queued_bytes += len(output.block)
        if not isinstance(output, pair.Pass) and self._hold_began is not None:
            self._services.pair_metrics.held(self._keeper.now() - self._hold_began)
        self._outputs.append(output)
        self._on_output(self)

    def _is_paused(self, part: Part) -> bool:
        seat = self.legs.prefill if part is Part.PREFILL else self.legs.decode
        return seat.member.is_paused

    def _failure(self, error: Exception, part: Part) -> Failure:
        """What has ended a leg, which a client waits for whatever it is."""
        if not isinstance(error, UpstreamError | GatewayError | EndedByEngine):
            logger.error("request %s: %s failed here", self._plan.public_id, part, exc_info=error)
        if isinstance(error, PrefillRefused):
            error = error.renamed(self.legs.ids.apply)
        return failure_of(error, part)

    def _abandoned(self) -> None:
        """Decode was kept so that it takes over what prefill had for it, and has not; counted by whoever noticed."""
        prefill, decode = self.legs.prefill.member.worker.id, self.legs.decode.member.worker.id
        self._services.pairs.health.abandoned(prefill, decode, self._keeper.now())

    def _log_failure(self, command: pair.LogFailure) -> None:
        logger.warning(
            "request %s (engine id %s): prefill on %s has failed with nobody left to tell: %s",
            self._plan.public_id,
            ",".join(self.legs.sent_ids),
            self.legs.prefill.member.worker.id,
            command.failure.message,
        )

    # Prefill.

    def _send_prefill(self, command: pair.SendPrefill) -> None:
        self._is_opened = False
        try:
            leg = self._legs_by_part[Part.PREFILL] = self.legs.send_prefill(command.number, self._abandoned)
        except Exception as exc:  # noqa: BLE001 -- it is logged where it is told apart
            self._report(pair.PrefillFailed(self._keeper.now(), self._failure(exc, Part.PREFILL)))
            return
        self._services.tails.read(self._read_prefill(leg), f"prefill {leg.worker.id}")

    async def _read_prefill(self, leg: Leg) -> None:
        try:
            event = await self._prefill_answer(leg)
        except CallEnded:  # stopped from here, which the machine knows, or let go since no abort has ended it
            self._report(pair.PrefillFailed(self._keeper.now(), CALLED_OFF))
        except Exception as exc:  # noqa: BLE001 -- it is logged where it is told apart
            self._report(pair.PrefillFailed(self._keeper.now(), self._failure(exc, Part.PREFILL)))
        else:
            self._report(event)

    async def _prefill_answer(self, leg: Leg) -> pair.PrefillDone:
        call, member, limit_bytes = leg.call, self.legs.prefill.member, self._services.limits.max_response_bytes
        head = await call.head()
        member.last_byte_at = self._services.clock()
        if not 200 <= head.status < 300:
            raise await refusal_of(call, self.legs.ids, head, limit_bytes)
        if head.content_type not in (EVENT_STREAM, JSON):
            raise AnswerMalformed(f"content type {head.content_type!r} with status {head.status}")
        self._note_opened()
        reader = PrefillReader(
            limit_bytes=limit_bytes,
            is_stream=head.content_type == EVENT_STREAM,
            count=self.legs.sequences,
            keeps_logprobs=self._plan.keeps_logprobs,
        )
        while data := await call.read():
            member.last_byte_at = self._services.clock()
            reader.feed(data)
        reader.end()
        self.prompts = reader.prompts
        return pair.PrefillDone(self._keeper.now(), self.legs.handoff_in(reader.body))

    # Decode.

    def _send_decode(self, command: pair.SendDecode) -> None:
        member = self.legs.decode.member
        if self._services.fleet.get(member.worker.id) is not member and not command.is_release:
            self._report(pair.DecodeUnsent(self._keeper.now()))
            self._look_for_decode(ConnectFailed(f"worker {member.worker.id} was removed"))
            return
        try:
            leg = self.legs.send_decode(command.handoff, self._abandoned, is_release=command.is_release)
        except Exception as exc:  # noqa: BLE001 -- it is logged where it is told apart
            if command.is_release:
                self._services.metrics.handoff_abandoned()
            self._report(pair.DecodeFailed(self._keeper.now(), self._failure(exc, Part.DECODE)))
            return
        self._legs_by_part[Part.DECODE] = leg
        if not command.is_release:
            self._services.tails.read(self._read_decode(leg), f"decode {leg.worker.id}")

    async def _read_decode(self, leg: Leg) -> None:
        member = self.legs.decode.member

        def on_byte() -> None:
            member.last_byte_at = self._services.clock()

        reader = DecodeReader(leg, self.legs.ids, self._plan.wants, _Pieces(self, leg), on_byte)
        now = self._keeper.now
        try:
            rest = await reader.read()
        except CallEnded:  # as with prefill
            self._report(pair.DecodeFailed(now(), CALLED_OFF))
        except ConnectFailed as exc:
            member.lost_contact(str(exc))
            self._report(pair.DecodeUnsent(now()))
            self._look_for_decode(exc)
        except Exception as exc:  # noqa: BLE001 -- it is logged where it is told apart
            self.verdict = reader.verdict
            self._report(pair.DecodeFailed(now(), self._failure(exc, Part.DECODE)))
        else:
            self.verdict = reader.verdict
            self._note_hold()
            self._report(pair.DecodeEnded(now(), rest))

    def _look_for_decode(self, error: ConnectFailed) -> None:
        """The worker has seen nothing of the request; the blocks wait for another one."""
        if self.is_ended:
            return  # what would be booked now, nobody would give back
        try:
            placement = self._plan.find_decode(self.legs)
        except RoutingError:
            failure = replace(failure_of(error, Part.DECODE), is_retryable=True)
            self._report(pair.DecodeFailed(self._keeper.now(), failure))
        else:
            self.legs.rebook(placement)
            self._report(pair.DecodeReady(self._keeper.now()))

    def _note_hold(self) -> None:
        """Decode's answer is whole, or ends; from here on the client waits for prefill alone."""
        is_awaited = self._machine.prefill in (PrefillState.CONNECTING, PrefillState.OPEN)
        if self._hold_began is None and is_awaited:
            self._hold_began = self._keeper.now()

    async def piece(self, leg: Leg, block: bytes, *, is_ending: bool) -> None:
        """A piece of decode's answer was read; returns when the next may be."""
        if is_ending:
            self._note_hold()
        self._report(pair.DecodeItem(self._keeper.now(), block, leg.has_output, is_ending))
        self._space.clear()
        await asyncio.sleep(0)  # the inbox is taken in the next turn
        while self._is_full and not (leg.is_ended or leg.is_detached):
            self._space.clear()
            await self._space.wait()

    @property
    def _is_full(self) -> bool:
        return self._queued_bytes >= QUEUE_LIMIT_BYTES or not self._machine.wants_decode


class _Pieces:
    """Where the reader of one decode leg tells what it has read."""

    __slots__ = ("_leg", "_run")

    def __init__(self, run: PairRun, leg: Leg) -> None:
        self._run = run
        self._leg = leg

    def on_head(self, head: AnswerHead) -> None:
        self._run.head = head

    async def on_piece(self, block: bytes, *, is_ending: bool) -> None:
        await self._run.piece(self._leg, block, is_ending=is_ending)

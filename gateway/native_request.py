"""SGLang's native request for vLLM workers: whether they can be asked for it, and how. Pure."""

from collections.abc import Sequence

from backends.json_body import JsonBody
from backends.types import EngineKind
from backends.vllm.native_fields import NativeRefused
from backends.vllm.native_request import NativePlan, translate
from gateway.errors import NO_TOKEN_ROUTE, GatewayError, InvalidRequest, WorkerUnfit
from routers.fleet import Member

# Each leg is a connection of its own, to one worker.
MAX_LEGS = 256


class NativeWorkers:
    """What vLLM workers turned out not to have; forgotten when a worker is another process."""

    def __init__(self) -> None:
        self._without_tokenizer: dict[str, str] = {}
        self._without_route: dict[str, str] = {}

    def has_tokenizer(self, member: Member) -> bool:
        """Whether a worker's answers can hold text, as far as is known."""
        return not _is_noted(self._without_tokenizer, member)

    def has_route(self, member: Member) -> bool:
        """Whether a worker serves token ids, as far as is known."""
        return not _is_noted(self._without_route, member)

    def lacks(self, member: Member, error: WorkerUnfit) -> None:
        """A worker has said what it does not have."""
        boots = self._without_route if error.report is NO_TOKEN_ROUTE else self._without_tokenizer
        boots[member.worker.id] = member.facts.boot_id if member.facts is not None else ""


def _is_noted(boots: dict[str, str], member: Member) -> bool:
    noted = boots.get(member.worker.id)
    return noted is not None and member.facts is not None and member.facts.boot_id == noted


class NativeRequest:
    """One request of ``/generate`` in vLLM's terms, translated when that is first asked for.

    Args:
        body: The client's.
        batch_size: Items of the batch, ``None`` for a single request.
        prompt_ids: Ids of prompts that came as text; empty if they are not known, or came as ids.
        workers: What is known of the workers.

    Attributes:
        prompt_ids: See above.
    """

    __slots__ = ("_batch_size", "_body", "_plans", "_workers", "prompt_ids")

    def __init__(
        self, body: JsonBody, batch_size: int | None, prompt_ids: Sequence[bytes], workers: NativeWorkers
    ) -> None:
        self._body = body
        self._batch_size = batch_size
        self._workers = workers
        self._plans: dict[bool, NativePlan | NativeRefused] = {}
        self.prompt_ids = prompt_ids

    def plan(self, member: Member) -> NativePlan:
        """The request in terms of a worker.

        Raises:
            InvalidRequest: It has none; names the field.
        """
        plan = self._plan(with_text=self._workers.has_tokenizer(member))
        if isinstance(plan, NativeRefused):
            raise InvalidRequest(str(plan), param=plan.param)
        return plan

    def obstacle(self, member: Member) -> GatewayError | None:
        """Why a worker cannot be asked, ``None`` if it can."""
        if not self._workers.has_route(member):
            return GatewayError(NO_TOKEN_ROUTE)
        plan = self._plan(with_text=self._workers.has_tokenizer(member))
        return InvalidRequest(str(plan), param=plan.param) if isinstance(plan, NativeRefused) else None

    @property
    def pool(self) -> tuple[bool, ...]:
        """The same for all requests that may go to the same workers: refused with text, and without."""
        return tuple(isinstance(self._plan(with_text=with_text), NativeRefused) for with_text in (True, False))

    def _plan(self, *, with_text: bool) -> NativePlan | NativeRefused:
        found = self._plans.get(with_text)
        if found is None:
            try:
                found = self._translated(with_text=with_text)
            except NativeRefused as exc:
                found = exc.with_traceback(None)
            self._plans[with_text] = found
        return found

    def _translated(self, *, with_text: bool) -> NativePlan:
        if (self._batch_size or 1) > MAX_LEGS:
            name = "input_ids" if self._body.text("input_ids") else "text"
            raise NativeRefused(f"a vLLM worker takes {MAX_LEGS} prompts at once at most", name)
        plan = translate(self._body, prompt_ids=self.prompt_ids, with_text=with_text)
        if len(plan.legs) > MAX_LEGS:
            raise NativeRefused(
                f"a vLLM worker takes one greedy sample a request, and {MAX_LEGS} requests at once at most",
                "sampling_params.n",
            )
        return plan


def speaks_native(member: Member | None, native: NativeRequest | None) -> bool:
    """Whether a worker may be given a request of ``/generate``.

    Args:
        member: The worker, ``None`` if it is gone.
        native: What a vLLM worker would be asked for, ``None`` if nobody has looked.
    """
    if member is None or member.facts is None or member.facts.engine is not EngineKind.VLLM:
        return True
    return native is not None and native.obstacle(member) is None


def native_obstacle(members: Sequence[Member], native: NativeRequest | None) -> GatewayError | None:
    """Why none of the workers will ever serve a request of ``/generate``; ``None`` if one may.

    Args:
        members: The workers.
        native: What a vLLM worker would be asked for, ``None`` if nobody has looked.
    """
    if native is None or any(speaks_native(member, native) for member in members):
        return None
    found = [native.obstacle(member) for member in members]
    return next((one for one in found if isinstance(one, InvalidRequest)), found[0] if found else None)

"""Control routes of engines for the whole fleet: one call goes to every worker at once, and all answers come back.

A fan-out belongs to the gateway and not to its client, so that one who leaves does not leave a fleet half updated.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import orjson
from fastapi import APIRouter, Request, Response

from backends.types import EngineKind
from backends.upstream.base import UpstreamClient, UpstreamRequest
from backends.vllm.admin import NoCounterpart, vllm_target
from gateway.api.health import why_not_ready
from gateway.api.json_response import json_response
from gateway.api.worker_call import CALL_HEADERS, call_worker, has_succeeded, held_meanwhile, took_effect
from gateway.errors import INTERNAL, RETRY_AFTER_S, SHUTTING_DOWN, ErrorReport, GatewayError, InvalidRequest
from gateway.outcome import Outcome
from gateway.services import Services
from gateway.tasks import OwnedTasks
from routers.fleet import Fleet, Member, WorkerState

logger = logging.getLogger("forebay.fan_out")

# Longest wait for one worker's answer, in seconds, by route. Engines load weights for minutes, and a pause or a flush
# may wait for running requests.
LIMITS_S: Final = {
    "/pause_generation": 600.0,
    "/continue_generation": 60.0,
    "/flush_cache": 300.0,
    "/update_weights_from_disk": 3600.0,
    "/update_weight_version": 60.0,
    "/release_memory_occupation": 300.0,
    "/resume_memory_occupation": 300.0,
    "/load_lora_adapter": 600.0,
    "/unload_lora_adapter": 60.0,
}
# They end what holds requests up, so workers that are being removed need them too: else what runs there never ends.
_ALSO_DRAINING: Final = frozenset({"/continue_generation", "/resume_memory_occupation"})
# Routes whose bodies or effects differ from worker to worker.
ADDRESSED_ONLY: Final = (
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/update_weights_from_ipc",
    "/begin_weight_update",
    "/end_weight_update",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/init_weights_send_group_for_remote_instance",
    "/send_weights_to_remote_instance",
    "/get_weights_by_name",
    "/weights_checker",
    "/load_lora_adapter_from_tensors",
    "/start_profile",
    "/stop_profile",
    "/set_internal_state",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/collective_rpc",
    "/post_process_weights",
    "/pull_weights",
    "/start_draft_weight_update",
    "/shutdown_weight_transfer_engine",
    "/weight_checker",
    "/hicache/storage-backend",
    "/hicache/storage-backend/clear",
)
# Calls of one fan-out at the same time, and fan-outs at the same time; each of those holds its body.
MAX_CALLS = 256
MAX_FAN_OUTS = 16
# Bound of the body of one worker's answer.
MAX_ANSWER_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Command:
    """What the client sent, for every worker alike.

    Attributes:
        method: GET or POST.
        path: The route.
        query: As written.
        headers: Those that go on.
        body: As it came.
    """

    method: str
    path: str
    query: str
    headers: list[tuple[bytes, bytes]]
    body: bytes


@dataclass(frozen=True, slots=True)
class Result:
    """What came of the call to one worker.

    Attributes:
        status: The worker's, or that of the reason for having none.
        body: JSON as it was written, else text.
        is_success: The worker has done it: a 2xx whose body does not say otherwise.
    """

    status: int
    body: orjson.Fragment | str
    is_success: bool


def addressed(fleet: Fleet, path: str) -> list[Member]:
    """The workers that a fan-out goes to, of every role.

    Those that are ready, and paused ones too: they are as alive as the others, weights are updated while they pause,
    and a pause that some workers missed can be sent again to all. What ends a pause goes also to workers that are being
    removed. Nobody knows what an unhealthy or unidentified one would do, so it gets nothing.
    """
    states = {WorkerState.READY, WorkerState.PAUSED}
    also_draining = path in _ALSO_DRAINING
    return [
        member
        for member in fleet
        if member.state in states or (also_draining and member.is_draining and member.is_identified and member.is_up)
    ]


class FanOuts:
    """Sends commands to the fleet and owns them until every worker has answered.

    Args:
        services: Hold the fleet.
        client: Carries the calls; must not send anything twice by itself.
    """

    def __init__(self, services: Services, client: UpstreamClient) -> None:
        self._services = services
        self._client = client
        self._tasks = OwnedTasks("fan-out")

    def __len__(self) -> int:
        """Number of fan-outs under way."""
        return len(self._tasks)

    async def send(self, command: Command) -> list[tuple[Member, Result]]:
        """Call every worker at once; nothing is sent a second time. Cancelling the wait does not cancel the calls.

        Raises:
            GatewayError: No call was made: there is no worker, the gateway stops, or does too much of this already.
        """
        if self._services.is_draining:
            raise GatewayError(SHUTTING_DOWN)
        members = addressed(self._services.fleet, command.path)
        if not members:
            message = f"no worker to send {command.path} to: {why_not_ready(self._services)}"
            raise GatewayError(
                ErrorReport(503, "unavailable", message, Outcome.OVERLOADED, retry_after_s=RETRY_AFTER_S)
            )
        if len(self._tasks) >= MAX_FAN_OUTS:
            message = f"{MAX_FAN_OUTS} calls of all workers are under way already"
            raise GatewayError(ErrorReport(429, "overloaded", message, Outcome.OVERLOADED, retry_after_s=RETRY_AFTER_S))
        results: dict[str, Result] = {}
        task = self._tasks.spawn(self._send_all(command, members, results), command.path)
        await asyncio.wait([task])
        missing = _failed(SHUTTING_DOWN if task.cancelled() else INTERNAL)
        return [(member, results.get(member.worker.id, missing)) for member in members]

    async def aclose(self, grace_s: float = 0.0) -> None:
        """Let fan-outs end by themselves for ``grace_s``, then give up waiting for the answers that are left."""
        await self._tasks.aclose(grace_s)

    async def _send_all(self, command: Command, members: Sequence[Member], results: dict[str, Result]) -> None:
        slots = asyncio.Semaphore(MAX_CALLS)

        async def ask(member: Member) -> None:
            async with slots:
                results[member.worker.id] = await self._ask(command, member)

        async with asyncio.TaskGroup() as group:
            for member in members:
                group.create_task(ask(member))
        failed = [worker for worker, result in results.items() if not result.is_success]
        logger.log(
            logging.WARNING if failed else logging.INFO,
            "%s: %d of %d worker(s) have done it%s",
            command.path,
            len(members) - len(failed),
            len(members),
            f", not {', '.join(failed)}" if failed else "",
        )

    async def _ask(self, command: Command, member: Member) -> Result:
        method, target = command.method, f"{command.path}?{command.query}" if command.query else command.path
        if member.facts is not None and member.facts.engine is EngineKind.VLLM:
            translated = vllm_target(command.path, command.query, command.body)
            if isinstance(translated, NoCounterpart):
                kind = "not_implemented" if translated.status == 501 else "invalid_request"
                return _failed(ErrorReport(translated.status, kind, translated.reason, Outcome.REJECTED))
            method, target = "POST", translated
        request = UpstreamRequest(method, target, command.headers, [command.body])
        limit_s, path = LIMITS_S[command.path], target.partition("?")[0]
        with held_meanwhile(member, path):
            try:
                head, body = await call_worker(
                    self._client, member, request, timeout_s=limit_s, max_bytes=MAX_ANSWER_BYTES
                )
            except GatewayError as exc:
                return _failed(exc.report)
            result = _answered(head.status, body)
            if result.is_success:
                await took_effect(self._services, member, path)
        return result


def _failed(report: ErrorReport) -> Result:
    return Result(report.status, orjson.Fragment(report.body(None)), is_success=False)


def _answered(status: int, body: bytes) -> Result:
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        passed: orjson.Fragment | str = body.decode("utf-8", "replace")
    else:
        passed = orjson.Fragment(body)
    return Result(status, passed, has_succeeded(status, body))


def add_fan_out_routes(router: APIRouter, fan_outs: FanOuts) -> None:
    """Put the routes behind ``router``'s guard: those for all workers, and refusals of those for single ones."""

    async def send(request: Request) -> Response:
        headers = [header for header in request.headers.raw if header[0] in CALL_HEADERS]
        query = request.scope["query_string"].decode("latin-1")
        command = Command(request.method, request.url.path, query, headers, await request.body())
        results = await fan_outs.send(command)
        listed = [
            {"worker_id": member.worker.id, "status": result.status, "body": result.body} for member, result in results
        ]
        is_whole = all(result.is_success for _, result in results)
        return json_response({"results": listed}, 200 if is_whole else 207)

    async def refuse(request: Request) -> Response:
        path = request.url.path
        raise InvalidRequest(
            f"{path} is not the same for every worker, so it is not sent to all of them; call it on each one: "
            f"{request.method} /workers/{{id}}/call{path}, with the ids of GET /workers",
            type="unsupported",
        )

    for path in LIMITS_S:
        router.add_api_route(path, send, methods=["GET", "POST"] if path == "/flush_cache" else ["POST"])
    for path in ADDRESSED_ONLY:
        router.add_api_route(path, refuse, methods=["GET", "POST", "PUT", "DELETE"])

"""Adding, removing and addressing workers, for administrators. Two families: our own, and that of older routers."""

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict

from backends.upstream.base import UpstreamClient, UpstreamRequest
from backends.worker_spec import WorkerSpec, WorkerSpecError, worker_id, worker_spec_from_mapping
from gateway.api.fan_out import FanOuts, add_fan_out_routes
from gateway.api.json_response import json_response
from gateway.api.refusals import admin_guard
from gateway.api.worker_call import CALL_HEADERS, call_worker, has_succeeded, held_meanwhile, took_effect
from gateway.api.workers import named_member
from gateway.auth import Keys
from gateway.errors import InvalidRequest
from gateway.fleet_control import FleetControl
from gateway.services import Services
from gateway.settings import DAY_S
from routers.fleet import Member

# Longest wait for an engine's admin route; weight updates take minutes.
CALL_TIMEOUT_S = 3600.0
# As on the command line: at most a day.
DrainTimeout = Annotated[float, Query(ge=0, le=DAY_S, allow_inf_nan=False)]


class NewWorker(BaseModel):
    """Body of ``POST /workers``; ``null`` stands for what is not said."""

    model_config = ConfigDict(extra="ignore")

    url: str
    worker_type: Literal["regular", "prefill", "decode"] | None = None
    bootstrap_port: int | None = None
    engine: Literal["auto", "sglang", "vllm"] | None = None
    model_id: str | None = None
    kv_events: str | None = None
    api_key: str | None = None


def _spec(new: NewWorker) -> WorkerSpec:
    values = {
        "url": new.url,
        "engine": new.engine,
        "role": new.worker_type,
        "model": new.model_id,
        "kv_events": new.kv_events,
        "bootstrap_port": new.bootstrap_port,
    }
    try:
        return worker_spec_from_mapping({key: value for key, value in values.items() if value not in (None, "")})
    except WorkerSpecError as exc:
        raise InvalidRequest(str(exc), param="url") from exc


def _api_key(new: NewWorker) -> str | None:
    """The credential; clients that have none may say so with the word.

    Raises:
        InvalidRequest: No header can carry it.
    """
    if not new.api_key or new.api_key == "None":
        return None
    if not (new.api_key.isascii() and new.api_key.isprintable()) or " " in new.api_key:
        raise InvalidRequest("'api_key' has a space or a character outside ASCII", param="api_key")
    return new.api_key


def fleet_router(
    services: Services,
    keys: Keys,
    workers: FleetControl,
    control: UpstreamClient,
    fan_outs: FanOuts,
    drain_timeout_s: float,
) -> APIRouter:
    """Routes that change the fleet.

    Args:
        services: Holds the fleet.
        keys: Credentials.
        workers: Adds and removes.
        control: Carries addressed calls; must not send anything twice by itself.
        fan_outs: Carry those of all workers.
        drain_timeout_s: What the requests of a removed worker get when nothing else is said.
    """
    router = APIRouter(dependencies=[Depends(admin_guard(keys))])

    def member_of(wanted: str) -> Member:
        return named_member(services.fleet, wanted)

    def member_at(url: str) -> Member:
        return member_of(worker_id(_spec(NewWorker(url=url))))

    def add(new: NewWorker) -> Response:
        member = workers.add(_spec(new), api_key=_api_key(new))
        location = f"/workers/{member.worker.id}"
        body = {
            "status": "accepted",
            "worker_id": member.worker.id,
            "url": member.worker.url,
            "location": location,
            "message": "the worker gets requests once it has been reached",
        }
        return json_response(body, 202, {"location": location})

    def remove(member: Member, timeout_s: float) -> Response:
        workers.remove(member, timeout_s)
        body = {"status": "accepted", "worker_id": member.worker.id, "url": member.worker.url}
        return json_response(body, 202)

    @router.post("/workers")
    async def add_worker(new: NewWorker) -> Response:
        return add(new)

    @router.post("/add_worker")
    async def add_by_url(request: Request, url: str | None = None) -> Response:
        return add(NewWorker(url=await _url_of(request, url)))

    @router.post("/remove_worker")
    async def remove_by_url(request: Request, url: str | None = None) -> Response:
        return remove(member_at(await _url_of(request, url)), drain_timeout_s)

    @router.api_route("/workers/{worker}/call/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])
    async def call(worker: str, request: Request) -> Response:
        member = member_of(worker)
        with held_meanwhile(member, request.url.path):
            answer = await _call(control, member, request)
            if has_succeeded(answer.status_code, bytes(answer.body)):
                await took_effect(services, member, request.url.path)
        return answer

    # Behind the route of calls, whose path this one would take too: older trainers put the worker's URL there.
    @router.delete("/workers/{worker:path}")
    async def delete_worker(worker: str, drain_timeout_s: DrainTimeout = drain_timeout_s) -> Response:
        return remove(member_at(worker) if "://" in worker else member_of(worker), drain_timeout_s)

    add_fan_out_routes(router, fan_outs)
    return router


async def _call(control: UpstreamClient, member: Member, request: Request) -> Response:
    """Hand a request on to one engine, and its answer back.

    Raises:
        GatewayError: There is no answer; the report says why.
    """
    headers = [h for h in request.headers.raw if h[0] in CALL_HEADERS]
    upstream = UpstreamRequest(request.method, _target(request), headers, [await request.body()])
    head, body = await call_worker(control, member, upstream, timeout_s=CALL_TIMEOUT_S)
    passed = {"x-forebay-worker": member.worker.id}
    for name, value in head.headers:
        if name == b"content-type":
            passed["content-type"] = value.decode("latin-1")
    return Response(body, head.status, passed)


def _target(request: Request) -> str:
    """What follows ``/call`` in the request's target, as it was written."""
    raw_path: bytes = request.scope["raw_path"].partition(b"?")[0]
    query: bytes = request.scope["query_string"]
    path = b"/" + raw_path.partition(b"/call/")[2]
    return (path + b"?" + query if query else path).decode("latin-1")


async def _url_of(request: Request, url: str | None) -> str:
    """The worker's URL, from the query or from a JSON body's ``url`` or ``worker_url``.

    Raises:
        InvalidRequest: It is in neither.
    """
    if url:
        return url
    try:
        body = await request.json()
    except ValueError:
        body = None
    found = body.get("url") or body.get("worker_url") if isinstance(body, dict) else None
    if not isinstance(found, str):
        raise InvalidRequest("the worker's 'url' is missing", param="url")
    return found

"""Adding, removing and addressing workers, for administrators. Two families: our own, and that of older routers."""

import asyncio
from typing import Literal

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict

from backends.control import bearer
from backends.errors import UpstreamError
from backends.upstream.base import UpstreamClient, UpstreamRequest
from backends.upstream.fetch import fetch
from backends.worker_spec import WorkerSpec, WorkerSpecError, normalize_worker_url, worker_id
from gateway.api.json_response import json_response
from gateway.api.refusals import admin_guard
from gateway.auth import Keys
from gateway.errors import InvalidRequest, report_of
from gateway.fleet_control import FleetControl
from gateway.services import Services
from routers.fleet import Member

# Longest wait for an engine's admin route; weight updates take minutes.
CALL_TIMEOUT_S = 3600.0
# Headers of an addressed call that go on to the engine.
_CALL_HEADERS = frozenset({b"content-type", b"accept"})


class NewWorker(BaseModel):
    """Body of ``POST /workers``."""

    model_config = ConfigDict(extra="ignore")

    url: str
    worker_type: Literal["regular", "prefill", "decode"] | None = None
    bootstrap_port: int | None = None
    engine: Literal["auto", "sglang", "vllm"] = "auto"
    model_id: str | None = None
    kv_events: str = "auto"
    api_key: str | None = None


def _spec(new: NewWorker) -> WorkerSpec:
    try:
        return WorkerSpec(
            url=normalize_worker_url(new.url),
            engine=new.engine,
            role=new.worker_type or "auto",
            model=new.model_id,
            kv_events=new.kv_events,
            bootstrap_port=new.bootstrap_port,
        )
    except WorkerSpecError as exc:
        raise InvalidRequest(str(exc), param="url") from exc


def fleet_router(
    services: Services, keys: Keys, workers: FleetControl, control: UpstreamClient, drain_timeout_s: float
) -> APIRouter:
    """Routes that change the fleet.

    Args:
        services: Holds the fleet.
        keys: Credentials.
        workers: Adds and removes.
        control: Carries addressed calls.
        drain_timeout_s: What the requests of a removed worker get when nothing else is said.
    """
    router = APIRouter(dependencies=[Depends(admin_guard(keys))])

    def member_of(wanted: str) -> Member:
        member = services.fleet.get(wanted)
        if member is None:
            raise InvalidRequest(f"there is no worker {wanted!r}", param="worker_id", status=404, type="not_found")
        return member

    def member_at(url: str | None) -> Member:
        if not url:
            raise InvalidRequest("the worker's 'url' is missing", param="url")
        return member_of(worker_id(_spec(NewWorker(url=url))))

    def add(new: NewWorker) -> Response:
        member = workers.add(_spec(new), api_key=new.api_key)
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

    @router.delete("/workers/{worker}")
    async def delete_worker(worker: str, drain_timeout_s: float = drain_timeout_s) -> Response:
        return remove(member_of(worker), max(drain_timeout_s, 0.0))

    @router.post("/add_worker")
    async def add_by_url(request: Request, url: str | None = None) -> Response:
        return add(NewWorker(url=await _url_of(request, url)))

    @router.post("/remove_worker")
    async def remove_by_url(request: Request, url: str | None = None) -> Response:
        return remove(member_at(await _url_of(request, url)), drain_timeout_s)

    @router.api_route("/workers/{worker}/call/{path:path}", methods=["GET", "POST", "PUT", "DELETE"])
    async def call(worker: str, path: str, request: Request) -> Response:
        member = member_of(worker)
        query = f"?{request.url.query}" if request.url.query else ""
        headers = [h for h in request.headers.raw if h[0] in _CALL_HEADERS]
        headers += bearer(member.worker.admin_api_key or member.worker.api_key)
        upstream = UpstreamRequest(request.method, f"/{path}{query}", headers, [await request.body()])
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                status, body = await fetch(control, member.worker.origin, upstream)
        except (UpstreamError, TimeoutError) as exc:
            report = report_of(exc) if isinstance(exc, UpstreamError) else None
            message = report.message if report else f"no answer within {CALL_TIMEOUT_S:g} s"
            raise InvalidRequest(message, status=report.status if report else 504, type="unavailable") from exc
        media_type = "application/json" if body[:1] in (b"{", b"[", b'"') else "text/plain"
        return Response(body, status, {"x-forebay-worker": member.worker.id}, media_type=media_type)

    return router


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

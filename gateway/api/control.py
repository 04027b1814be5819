"""Telling engines to stop requests."""

from fastapi import APIRouter, Depends, Request, Response
from pydantic import BaseModel, ConfigDict

from backends.base import Backend
from backends.types import Worker
from gateway.api.json_response import json_response
from gateway.api.refusals import client_guard, may_administer
from gateway.auth import Keys
from gateway.errors import GatewayError, InvalidRequest, forbidden, unauthorized
from gateway.services import Services


class AbortRequest(BaseModel):
    """Body of ``POST /abort_request``; with ``prefix``, which some trainers' engines know, ``rid`` begins the ids."""

    model_config = ConfigDict(strict=True)

    rid: str | None = None
    abort_all: bool | None = None
    prefix: bool | None = None


def control_router(services: Services, keys: Keys) -> APIRouter:
    """Routes that act on running requests."""
    router = APIRouter(dependencies=[Depends(client_guard(keys))])

    @router.post("/abort_request")
    async def abort_request(body: AbortRequest, request: Request) -> Response:
        statuses: dict[str, int | str] = {}
        if (body.abort_all or body.prefix) and not may_administer(keys, request):
            raise GatewayError(unauthorized(is_admin=True) if keys.has_admin_keys else forbidden())
        if body.abort_all:
            wanted = list(dict.fromkeys(services.live.ids))
        elif not body.rid:
            raise InvalidRequest("'rid' is empty; give the id of a request, or abort_all", param="rid")
        elif body.prefix:
            wanted = [public_id for public_id in services.live.ids if public_id.startswith(body.rid)]
        else:
            wanted = [body.rid]
        aborted: list[str] = []
        missing: list[str] = []
        for public_id in wanted:
            found = [live.abort(item) for live, item in services.live.find(public_id)]
            told = [worker for worker in found if worker is not None]
            (aborted if told else missing).append(public_id)
            statuses.update(dict.fromkeys(filter(None, told), "told"))
        if body.abort_all:
            statuses |= await services.aborter.abort_all(_engines(services))
        reports = [{"id": worker, "status": status} for worker, status in statuses.items()]
        return json_response({"aborted": aborted, "not_found": missing, "workers": reports})

    return router


def _engines(services: Services) -> list[tuple[Worker, Backend]]:
    """Every worker that has told what it is."""
    return [
        (member.worker, services.backends[member.facts.engine]) for member in services.fleet if member.facts is not None
    ]

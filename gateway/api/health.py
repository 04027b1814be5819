"""Liveness, readiness and metrics; open to everybody, as orchestrators have no keys."""

from fastapi import APIRouter, Response

from gateway.api.head import with_head
from gateway.api.json_response import json_response
from gateway.metrics import CONTENT_TYPE
from gateway.services import Services
from routers.fleet import WorkerState


def why_not_ready(services: Services) -> str | None:
    """The reason why requests cannot be served now, ``None`` if they can."""
    if services.is_draining:
        return "draining"
    fleet = services.fleet
    if not len(fleet):
        return "no workers are configured"
    for model in fleet.models:
        if fleet.has_ready(model):
            return None
    return "; ".join(
        f"{member.worker.id}: {fleet.reason(member)}" + (f" ({member.detail})" if member.detail else "")
        for member in fleet
        if member.state is not WorkerState.READY or fleet.reason(member) != WorkerState.READY
    )


def health_router(services: Services) -> APIRouter:
    """Routes that say how the gateway is."""
    router = APIRouter()

    @router.get("/health")
    @router.get("/health_generate")
    @router.get("/liveness")
    async def health() -> Response:
        return json_response({"status": "ok"})

    @router.get("/ready")
    @router.get("/readiness")
    async def ready() -> Response:
        reason = why_not_ready(services)
        if reason is None:
            return json_response({"status": "ready"})
        return json_response({"status": "not ready", "reason": reason}, 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(services.metrics.render(), media_type=CONTENT_TYPE)

    return with_head(router)

"""Engine routes for the whole fleet, which this release has for single workers only: they say where to go instead."""

from typing import Final

from fastapi import APIRouter, Request, Response

from gateway.errors import InvalidRequest

PATHS: Final = (
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
    "/update_weight_version",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/load_lora_adapter",
    "/unload_lora_adapter",
)


def add_fan_out_routes(router: APIRouter) -> None:
    """Put the routes behind ``router``'s guard; each answers 501 and names the route of one worker."""

    async def refuse(request: Request) -> Response:
        path = request.url.path
        raise InvalidRequest(
            f"{path} for all workers at once is not in this release; "
            f"call it on each one: {request.method} /workers/ID/call{path}, with the ids of GET /workers",
            status=501,
            type="not_implemented",
        )

    for path in PATHS:
        router.add_api_route(path, refuse, methods=["POST"])
    router.add_api_route("/flush_cache", refuse, methods=["GET", "POST"])

"""What is served here: models, and a summary of the engines that never shows their raw arguments."""

import importlib.metadata

from fastapi import APIRouter, Depends, Response

from backends.types import EngineFacts
from gateway.api.head import with_head
from gateway.api.json_response import json_response
from gateway.api.refusals import client_guard
from gateway.auth import Keys
from gateway.errors import InvalidRequest
from gateway.services import Services
from routers.fleet import WorkerState


def _facts_of(services: Services, model: str) -> list[EngineFacts]:
    return [member.facts for member in services.fleet if member.facts and model in member.names]


def _model_entry(services: Services, model: str) -> dict[str, object]:
    facts = _facts_of(services, model)
    contexts = [one.context_tokens for one in facts if one.context_tokens]
    return {
        "id": model,
        "object": "model",
        "created": 0,
        "owned_by": str(facts[0].engine) if facts else "forebay",
        "root": model,
        "parent": None,
        "max_model_len": min(contexts) if contexts else None,
    }


def models_router(services: Services, keys: Keys) -> APIRouter:
    """Routes about models."""
    router = APIRouter(dependencies=[Depends(client_guard(keys))])

    @router.get("/v1/models")
    async def models() -> Response:
        entries = [_model_entry(services, model) for model in services.fleet.models]
        return json_response({"object": "list", "data": entries})

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        if model not in services.fleet.models:
            raise InvalidRequest(
                f"the model {model!r} is not served here", param="model", status=404, type="model_not_found"
            )
        return json_response(_model_entry(services, model))

    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info(model: str | None = None) -> Response:
        name = services.fleet.model_of(model)
        facts = _facts_of(services, name)
        versions = sorted({one.weight_version for one in facts if one.weight_version is not None})
        return json_response(
            {
                "model_path": name,
                "served_model_name": name,
                "is_generation": True,
                "weight_version": versions[0] if len(versions) == 1 else None,
                "weight_versions": versions,
                "models": list(services.fleet.models),
            }
        )

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> Response:
        members = list(services.fleet)
        facts = [member.facts for member in members if member.facts]
        return json_response(
            {
                "version": importlib.metadata.version("forebay"),
                "gateway": "forebay",
                "policy": services.policy.name,
                "models": list(services.fleet.models),
                "workers": {
                    "total": len(members),
                    "ready": sum(member.state is WorkerState.READY for member in members),
                },
                "engines": sorted({f"{one.engine} {one.version_text}".strip() for one in facts}),
                "dp_size": sum(one.dp_size for one in facts),
                "in_flight_requests": len(services.live),
            }
        )

    return with_head(router)

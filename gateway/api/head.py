"""HEAD for routes that only tell something: load balancers ask by it."""

from fastapi import APIRouter
from fastapi.routing import APIRoute


def with_head(router: APIRouter) -> APIRouter:
    """Let HEAD ask whatever GET may ask of ``router``; the server leaves the body out. Returns ``router``."""
    for route in router.routes:
        if isinstance(route, APIRoute) and route.methods and "GET" in route.methods:
            route.methods.add("HEAD")
    return router

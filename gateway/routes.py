"""The generation routes: which there are, and how each one's bodies and streams are shaped. Pure."""

import enum
from dataclasses import dataclass


class Dialect(enum.Enum):
    """Whose request and answer shapes a route has."""

    NATIVE = "native"
    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"


@dataclass(frozen=True, slots=True)
class Route:
    """One forwarded route.

    Attributes:
        path: Path, also the engine's.
        dialect: Shapes of its bodies.
        methods: Allowed methods.
    """

    path: str
    dialect: Dialect
    methods: tuple[str, ...] = ("POST",)


ROUTES: dict[str, Route] = {
    route.path: route
    for route in (
        Route("/generate", Dialect.NATIVE, ("POST", "PUT")),
        Route("/v1/chat/completions", Dialect.CHAT),
        Route("/v1/completions", Dialect.COMPLETIONS),
        Route("/v1/embeddings", Dialect.EMBEDDINGS),
    )
}

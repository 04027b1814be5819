"""The generation routes: which there are, and how each one's bodies and streams are shaped. Pure."""

import enum
from dataclasses import dataclass

from backends.quick_enum import quick


@quick
class Dialect(enum.Enum):
    """Whose request and answer shapes a route has."""

    NATIVE = "native"
    CHAT = "chat"
    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    RESPONSES = "responses"
    MESSAGES = "messages"
    PLAIN = "plain"


# Event names that end a stream, by dialect; everywhere else ``[DONE]`` does.
LAST_EVENTS: dict[Dialect, frozenset[bytes]] = {
    Dialect.RESPONSES: frozenset({b"error", b"response.completed", b"response.incomplete", b"response.failed"}),
    Dialect.MESSAGES: frozenset({b"error", b"message_stop"}),
}


# Routes whose streams can be folded into their unary answers.
FOLDED_PATHS = frozenset({"/generate", "/v1/chat/completions", "/v1/completions"})


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
        Route("/v1/classify", Dialect.EMBEDDINGS),
        Route("/v1/responses", Dialect.RESPONSES),
        Route("/v1/messages", Dialect.MESSAGES),
        Route("/v1/messages/count_tokens", Dialect.PLAIN),
        Route("/v1/score", Dialect.PLAIN),
        Route("/v1/rerank", Dialect.PLAIN, ("POST", "PUT")),
        Route("/encode", Dialect.NATIVE, ("POST", "PUT")),
        Route("/classify", Dialect.NATIVE, ("POST", "PUT")),
        Route("/tokenize", Dialect.PLAIN),
        Route("/detokenize", Dialect.PLAIN),
    )
}

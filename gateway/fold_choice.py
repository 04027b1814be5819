"""Whether and how an engine's stream is folded for a client that wants one document. Pure."""

import functools
from collections.abc import Callable

from backends.types import EngineFacts, EngineKind
from gateway.envelope import Envelope
from gateway.fold import Fold, new_fold, stays_unary
from gateway.routes import FOLDED_PATHS, Dialect, Route


def can_fold(route: Route, envelope: Envelope, engine: EngineKind) -> bool:
    """Whether the engine may be asked for a stream although the client wants one document."""
    if envelope.is_stream or route.path not in FOLDED_PATHS:
        return False
    return not stays_unary(route.dialect, engine, envelope.body.fields)


def fold_maker(
    route: Route, envelope: Envelope, facts: EngineFacts, *, samples: int | None = None
) -> Callable[[int], Fold] | None:
    """What makes the fold of an answer, given its bound in bytes; ``None`` where the route has none.

    Args:
        route: The route.
        envelope: The request.
        facts: Of the engine that answers.
        samples: Samples of each prompt in this answer; ``None`` for all of the request's.
    """
    if route.path not in FOLDED_PATHS:
        return None
    return functools.partial(_fold, route, envelope, facts, envelope.samples if samples is None else samples)


def _fold(route: Route, envelope: Envelope, facts: EngineFacts, samples: int, limit_bytes: int) -> Fold:
    is_list = route.dialect is Dialect.NATIVE and (envelope.batch_size is not None or samples > 1)
    return new_fold(
        route.dialect,
        facts.engine,
        limit_bytes=limit_bytes,
        count=(envelope.batch_size or 1) * samples,
        is_list=is_list,
        is_incremental=facts.incremental_output,
    )

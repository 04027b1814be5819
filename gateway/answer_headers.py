"""Headers that say which request an answer is to, and where it went. Pure."""

from backends.upstream.base import Headers
from gateway.envelope import Envelope, header_value
from gateway.pair_attempt import PairAttempt
from gateway.placement import Attempt


def identity_headers(envelope: Envelope, placed: Attempt, attempts: int) -> Headers:
    """The headers of an answer that a worker gives.

    Args:
        envelope: The request.
        placed: Where it went.
        attempts: How many it took, ``>= 1``.
    """
    headers = [
        (b"x-request-id", envelope.header_id),
        (b"x-forebay-worker", placed.worker_id.encode()),
        (b"x-forebay-attempts", b"%d" % attempts),
    ]
    if isinstance(placed, PairAttempt):
        headers.append((b"x-forebay-prefill-worker", placed.prefill.member.worker.id.encode()))
    facts = placed.decode.facts if isinstance(placed, PairAttempt) else placed.written.facts
    if facts.weight_version is not None:
        headers.append((b"x-forebay-weight-version", header_value(facts.weight_version)))
    if placed.dp_rank is not None:
        headers.append((b"x-forebay-dp-rank", b"%d" % placed.dp_rank))
    if placed.overlap_blocks is not None:
        headers.append((b"x-forebay-overlap-blocks", b"%d" % placed.overlap_blocks))
    return headers

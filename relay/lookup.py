"""Where a gateway takes events: asked of its HTTP address, and checked before anything is sent there."""

import asyncio
from dataclasses import dataclass
from typing import Final

import msgspec

from backends.control import bearer
from backends.errors import CallEnded, UpstreamError
from backends.upstream.base import Origin, UpstreamClient, UpstreamRequest
from backends.upstream.fetch import fetch
from kv_events.errors import SourceMisconfigured
from kv_events.relay_keys import KeyPair, is_local_endpoint, seen_from
from kv_events.relay_wire import PROTOCOL
from relay.errors import RelayError

LISTENER_PATH: Final = "/internal/kv_events"


class LookupFailed(RelayError):
    """A gateway cannot be used now; ``args[0]`` says why, for people. It is asked again."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Where a gateway takes events.

    Attributes:
        endpoint: ZMQ address.
        public_key: The gateway's, in Z85; ``None`` for a plain connection inside one machine.
    """

    endpoint: str
    public_key: bytes | None


class _Answer(msgspec.Struct):
    endpoint: str | None = None
    public_key: str | None = None
    protocol: int = 0


async def look_up(
    client: UpstreamClient, url: str, admin_key: str | None, keys: KeyPair | None, timeout_s: float
) -> Listener:
    """Ask the gateway at ``url`` where it takes events.

    Args:
        client: Carries the request.
        url: The gateway's HTTP address.
        admin_key: Its admin key; ``None`` if it has none.
        keys: This relay's.
        timeout_s: Limit of the whole call.

    Raises:
        LookupFailed: It does not answer, takes no relays, or must not be talked to.
    """
    origin = Origin.from_url(url)
    try:
        async with asyncio.timeout(timeout_s):
            status, body = await fetch(client, origin, UpstreamRequest("GET", LISTENER_PATH, bearer(admin_key), []))
    except (UpstreamError, CallEnded) as exc:
        raise LookupFailed(f"{LISTENER_PATH}: {exc}") from exc
    except TimeoutError as exc:
        raise LookupFailed(f"{LISTENER_PATH}: no answer within {timeout_s:g} s") from exc
    if status in (401, 403):
        raise LookupFailed(f"{LISTENER_PATH}: {status}, the gateway wants its admin key (--admin-api-key-file)")
    if status != 200:
        raise LookupFailed(f"{LISTENER_PATH}: status {status}, this is no gateway that takes relays")
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise LookupFailed(f"{LISTENER_PATH}: the answer cannot be read") from exc
    return _checked(answer, origin.host, keys)


def _checked(answer: _Answer, host: str, keys: KeyPair | None) -> Listener:
    if answer.endpoint is None:
        raise LookupFailed("the gateway takes no relays; start it with --kv-listen")
    if answer.protocol != PROTOCOL:
        raise LookupFailed(
            f"the gateway speaks version {answer.protocol} of the relay's protocol, this relay {PROTOCOL}"
        )
    try:
        endpoint = seen_from(answer.endpoint, host)
        is_local = is_local_endpoint(endpoint)
    except SourceMisconfigured as exc:
        raise LookupFailed(f"the gateway's listener: {exc}") from exc
    if answer.public_key is None:
        if not is_local:
            raise LookupFailed(
                f"{endpoint} has no key, and events hold prompts: plain connections are for loopback only; start the "
                "gateway with --kv-key-file and --kv-authorized-keys, and this relay with --key-file"
            )
        return Listener(endpoint, None)
    public_key = answer.public_key.encode()
    if keys is None:
        raise LookupFailed(f"{endpoint} wants a key; give --key-file, and the public key to --kv-authorized-keys")
    if keys.gateway_keys and public_key not in keys.gateway_keys:
        raise LookupFailed(f"{endpoint} has another key than those of gateway-key in --key-file")
    return Listener(endpoint, public_key)

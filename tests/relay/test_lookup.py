"""Where a gateway takes events: found over HTTP, and not believed blindly."""

import json
from typing import Any

import pytest

from backends.upstream.h1 import H1Client
from kv_events.relay_keys import KeyPair, generate_keys
from relay.lookup import Listener, LookupFailed, look_up
from tests.fakes.running import PATIENCE_S
from tests.fakes.script_engine import script_engine

KEYS = generate_keys()
GATEWAY = generate_keys().public_key.decode()
PINNED = KeyPair(KEYS.public_key, KEYS.secret_key, frozenset({GATEWAY.encode()}))
OTHER_PINNED = KeyPair(KEYS.public_key, KEYS.secret_key, frozenset({KEYS.public_key}))


async def asked(answer: Any, keys: KeyPair | None) -> Listener:
    client = H1Client()
    async with script_engine() as engine:
        engine.metadata["/internal/kv_events"] = answer
        try:
            return await look_up(client, engine.url, None, keys, PATIENCE_S)
        finally:
            await client.aclose()


@pytest.mark.parametrize(
    ("endpoint", "public_key", "keys", "found"),
    [
        pytest.param("tcp://127.0.0.1:5", None, None, "tcp://127.0.0.1:5", id="plain inside the machine"),
        pytest.param("tcp://0.0.0.0:5", None, None, "tcp://127.0.0.1:5", id="wildcard on the same machine"),
        pytest.param("tcp://10.0.0.9:5", GATEWAY, KEYS, "tcp://10.0.0.9:5", id="with keys"),
        pytest.param("tcp://10.0.0.9:5", GATEWAY, PINNED, "tcp://10.0.0.9:5", id="with the key that is known"),
    ],
)
async def test_a_listener_is_found(endpoint: str, public_key: str | None, keys: KeyPair | None, found: str) -> None:
    listener = await asked({"endpoint": endpoint, "public_key": public_key, "protocol": 1}, keys)
    assert listener == Listener(found, public_key.encode() if public_key else None)


@pytest.mark.parametrize(
    ("answer", "keys", "text"),
    [
        pytest.param({"endpoint": None, "protocol": 1}, KEYS, "--kv-listen", id="takes no relays"),
        pytest.param({"endpoint": "tcp://127.0.0.1:5", "protocol": 2}, KEYS, "version 2", id="another version"),
        pytest.param({"endpoint": "tcp://10.0.0.9:5", "protocol": 1}, KEYS, "--kv-key-file", id="plain elsewhere"),
        pytest.param(
            {"endpoint": "tcp://10.0.0.9:5", "public_key": GATEWAY, "protocol": 1}, None, "--key-file", id="no key"
        ),
        pytest.param(
            {"endpoint": "tcp://10.0.0.9:5", "public_key": GATEWAY, "protocol": 1},
            OTHER_PINNED,
            "gateway-key",
            id="another key than the known one",
        ),
        pytest.param({"endpoint": "nonsense", "protocol": 1}, KEYS, "nonsense", id="no address"),
        pytest.param({"endpoint": 5}, KEYS, "cannot be read", id="other types"),
        pytest.param([], KEYS, "cannot be read", id="no object"),
    ],
)
async def test_a_listener_that_cannot_be_used_is_refused(answer: Any, keys: KeyPair | None, text: str) -> None:
    assert json.dumps(answer)
    with pytest.raises(LookupFailed, match=text):
        await asked(answer, keys)


async def test_a_server_that_is_no_gateway_is_told() -> None:
    client = H1Client(connect_timeout_s=1.0)
    try:
        async with script_engine() as engine:
            with pytest.raises(LookupFailed, match="takes relays"):
                await look_up(client, engine.url, None, None, PATIENCE_S)
        with pytest.raises(LookupFailed):
            await look_up(client, engine.url, None, None, PATIENCE_S)
    finally:
        await client.aclose()

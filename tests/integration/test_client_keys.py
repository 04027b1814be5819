"""Client keys in the header that clients of ``/v1/messages`` use."""

from pathlib import Path
from typing import Any

from tests.fakes.running import running_gateway
from tests.fakes.script_engine import ScriptEngine
from tests.fakes.wire import call

BODY = {"model": "model", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], "text": "hi"}


async def test_the_key_opens_client_routes_and_no_engine_sees_it(scripted: ScriptEngine, tmp_path: Path) -> None:
    files: dict[str, Any] = {"api_key_file": tmp_path / "client", "admin_api_key_file": tmp_path / "admin"}
    for file in files.values():
        file.write_text(f"{file.name}-key\n")
    async with running_gateway(scripted.url, **files) as gateway:
        for key, status in (("wrong", 401), ("client-key", 200), ("admin-key", 200)):
            headers = {"X-Api-Key": key, "Anthropic-Version": "2023-06-01"}
            for path in ("/v1/messages", "/generate"):
                assert (await call(gateway.address, path, BODY, headers=headers)).status == status, (key, path)
            assert (await call(gateway.address, "/v1/models", method="GET", headers=headers)).status == status
            # What administrators may do, they may do with the bearer token.
            assert (await call(gateway.address, "/workers", method="GET", headers=headers)).status == 401
            pinned = {**headers, "X-Forebay-Worker": scripted.url.removeprefix("http://")}
            answer = await call(gateway.address, "/generate", BODY, headers=pinned)
            assert answer.status == (401 if status == 401 else 403)
    assert len(scripted.requests) == 4
    assert all(request.header("x-api-key") is None for request in scripted.requests)

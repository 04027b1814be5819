"""What is known here and not served yet says so, and says what there is instead."""

from pathlib import Path
from typing import Any

import pytest

from gateway.api.fan_out import PATHS
from tests.fakes.running import RunningGateway, running_gateway, until
from tests.fakes.script_engine import METADATA, ScriptEngine, script_engine
from tests.fakes.wire import call


@pytest.mark.parametrize(
    ("method", "path"), [*(("POST", path) for path in PATHS), ("GET", "/flush_cache"), ("POST", "/flush_cache")]
)
async def test_calls_of_all_workers_name_the_call_of_one(
    front: RunningGateway, scripted: ScriptEngine, method: str, path: str
) -> None:
    refused = await call(front.address, path, {}, method=method, headers={"X-Request-Id": "mine"})
    error = refused.json()["error"]
    assert (refused.status, error["type"], error["code"], error["request_id"]) == (501, "not_implemented", 501, "mine")
    instead = f"/workers/{scripted.url.removeprefix('http://')}/call{path}"
    assert f"{method} {instead.replace(scripted.url.removeprefix('http://'), 'ID')}" in error["message"]
    assert not scripted.requests
    # What the message says to do is there.
    answered = await call(front.address, instead, {}, method="POST")
    assert answered.status == 200
    assert [request.path for request in scripted.requests] == [path]


async def test_only_administrators_are_told(scripted: ScriptEngine, tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("admin-key\n")
    async with running_gateway(scripted.url, admin_api_key_file=tmp_path / "admin") as gateway:
        for headers, status in (({}, 401), ({"Authorization": "Bearer admin-key"}, 501)):
            assert (await call(gateway.address, "/flush_cache", headers=headers)).status == status


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("is_pinned", [True, False], ids=["by its SPEC", "by the engine"])
async def test_a_worker_that_needs_a_partner_is_told_of(
    role: str, is_pinned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with script_engine() as engine:
        if not is_pinned:
            info: dict[str, Any] = {**METADATA["/server_info"], "disaggregation_mode": role}
            engine.metadata["/server_info"] = info
        async with running_gateway(engine.url + f",role={role}" * is_pinned) as gateway:
            await until(lambda: "gets no requests" in caplog.text, "the warning")
            warnings = [line.getMessage() for line in caplog.records if line.levelname == "WARNING"]
            assert [role in line for line in warnings] == [True]
            assert (await call(gateway.address, "/generate", {"text": "a"})).status == 503
        assert not engine.requests


async def test_a_regular_worker_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with script_engine() as engine, running_gateway(engine.url + ",role=regular"):
        assert [line for line in caplog.records if line.levelname == "WARNING"] == []

"""What is known here and not served yet says so, and says what there is instead."""

from typing import Any

import pytest

from tests.fakes.running import running_gateway, until
from tests.fakes.script_engine import METADATA, script_engine
from tests.fakes.wire import call


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("is_pinned", [True, False], ids=["by its SPEC", "by the engine"])
async def test_a_worker_without_a_partner_gets_nothing_and_says_why(
    role: str, is_pinned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with script_engine() as engine:
        info: dict[str, Any] = {**METADATA["/server_info"], "disaggregation_mode": role}
        engine.metadata["/server_info"] = info  # a role that is given has to be the engine's own
        async with running_gateway(engine.url + f",role={role}" * is_pinned) as gateway:
            fleet = gateway.gateway.services.fleet
            await until(lambda: bool(fleet.models), "the worker")
            other = "decode" if role == "prefill" else "prefill"
            reason = f"{role} worker without a ready {other} worker"
            (worker,) = (await gateway.client.get("/workers")).json()["workers"]
            assert (worker["state"], worker["detail"]) == ("ready", reason)
            ready = await gateway.client.get("/ready")
            assert (ready.status_code, reason in ready.json()["reason"]) == (503, True)
            answer = await call(gateway.address, "/generate", {"text": "a"})
            assert (answer.status, f"no {other} worker is ready" in answer.body.decode()) == (503, True)
            assert [line for line in caplog.records if line.levelname == "WARNING"] == []
        assert not engine.requests


async def test_a_regular_worker_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with script_engine() as engine, running_gateway(engine.url + ",role=regular"):
        assert [line for line in caplog.records if line.levelname == "WARNING"] == []

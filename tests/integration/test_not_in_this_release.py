"""What is known here and not served yet says so, and says what there is instead."""

from typing import Any

import pytest

from tests.fakes.running import running_gateway, until
from tests.fakes.script_engine import METADATA, script_engine
from tests.fakes.wire import call


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

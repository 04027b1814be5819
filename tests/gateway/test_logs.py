"""Plain logging: one handler of ours on stderr, and messages that cannot start a line."""

import json
import logging
from collections.abc import Iterator

import pytest

from gateway.logs import configure_logging

LOGGER = logging.getLogger("forebay.test")


@pytest.fixture(autouse=True)
def _root_as_before() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    logging.getLogger("uvicorn.error").setLevel(logging.NOTSET)
    root.setLevel(level)
    root.handlers[:] = handlers


def test_text_lines_cannot_be_forged(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("text", "info")
    LOGGER.info("id %s", "x\n2023 INFO fake\x1b[2J\x85")
    LOGGER.debug("not shown")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("INFO forebay.test: id x\\x0a2023 INFO fake\\x1b[2J\\x85")


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json", "debug")
    LOGGER.debug("odd \ud800 text")
    try:
        raise ValueError("boom")
    except ValueError:
        LOGGER.exception("failed")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("debug", "forebay.test", "odd ? text")
    assert "ValueError: boom" in second["exception"]


def test_a_second_set_up_replaces_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    others = logging.getLogger().handlers[:]
    configure_logging("text", "error")
    configure_logging("json", "warning")
    LOGGER.warning("once")
    assert capsys.readouterr().err.count("once") == 1
    assert [handler for handler in logging.getLogger().handlers if handler in others] == others


@pytest.mark.parametrize(
    ("level", "shown"), [("debug", ["started", "broken"]), ("info", ["broken"]), ("error", ["broken"])]
)
def test_the_servers_own_chatter_is_for_debugging(
    level: str, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("json", level)
    logging.getLogger("uvicorn.error").info("started")
    logging.getLogger("uvicorn.error").error("broken")
    assert [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()] == shown

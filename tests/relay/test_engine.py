"""The engine's metadata over gRPC, and HTTP answers that are too much."""

import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay import engine as engine_module
from relay.engine import EngineUnavailable, GrpcEngine, HttpEngine
from relay.errors import SettingsRefused
from relay.protobuf import first_text
from tests.relay.fakes import fake_server
from tests.relay.nodes import info, node


def message(text: bytes) -> bytes:
    """A message with ``text`` in field 1, after fields of all other kinds."""
    size, coded = len(text), b""
    while size >= 0x80:
        coded += bytes([size & 0x7F | 0x80])
        size >>= 7
    others = b"\x10\x96\x01" + b"\x19" + bytes(8) + b"\x25" + bytes(4) + b"\x2a\x01x"
    return others + b"\x0a" + coded + bytes([size]) + text


@given(st.binary(max_size=20_000))
def test_the_text_of_field_1_is_found(text: bytes) -> None:
    assert first_text(message(text)) == text


def test_the_last_one_counts() -> None:
    assert first_text(b"\x0a\x01a\x0a\x01b") == b"b"
    assert first_text(b"") == b""


@given(st.binary(max_size=64))
def test_whatever_comes_is_read_or_refused(data: bytes) -> None:
    try:
        found = first_text(data)
    except ValueError:
        return
    assert found in data


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_message_that_ends_too_early_is_refused(cut: int) -> None:
    whole = message(b"x" * 200)
    with pytest.raises(ValueError, match="too early"):
        first_text(whole[:-cut])


def test_a_group_is_no_field_of_today() -> None:
    with pytest.raises(ValueError, match="no protocol buffer"):
        first_text(b"\x0b")


def test_a_number_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="too long"):
        first_text(b"\x08" + b"\xff" * 12)


def test_without_the_extra_the_refusal_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(SettingsRefused, match=r"pip install 'forebay\[grpc\]'"):
        GrpcEngine("127.0.0.1:1")


async def test_an_answer_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MAX_ANSWER_BYTES", 1000)
    async with fake_server() as server:
        server.pages["GET /server_info"] = 200, bytes(2000)
        engine = HttpEngine(server.url)
        with pytest.raises(EngineUnavailable, match="more than 1000 bytes"):
            await engine.metadata()
        await engine.aclose()


class _Follower:
    """A follower's gRPC server, which answers ``answer``, and other methods not at all."""

    def __init__(self, grpc: Any) -> None:
        self._grpc = grpc
        self.answer = message(info())
        self.asked: list[str] = []
        self.server = grpc.aio.server()
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.add_generic_rpc_handlers((self,))

    def service(self, details: Any) -> Any:
        """Find the method (gRPC's hook)."""
        self.asked.append(details.method)
        if details.method != "/sglang.runtime.v1.SglangService/GetServerInfo":
            return None
        return self._grpc.unary_unary_rpc_method_handler(self._get)

    async def _get(self, request: bytes, context: Any) -> bytes:
        assert request == b""
        return self.answer


@pytest.fixture
async def follower() -> AsyncIterator[_Follower]:
    """A follower's gRPC server; skipped without the extra."""
    made = _Follower(pytest.importorskip("grpc"))
    await made.server.start()
    yield made
    await made.server.stop(0)


async def test_a_follower_tells_its_metadata_over_grpc(follower: _Follower) -> None:
    engine = GrpcEngine(f"127.0.0.1:{follower.port}")
    assert await engine.metadata() == node()
    follower.answer = b"\x0a\xff"
    with pytest.raises(EngineUnavailable, match="too early"):
        await engine.metadata()
    await follower.server.stop(0)
    with pytest.raises(EngineUnavailable, match="UNAVAILABLE"):
        await engine.metadata()
    await engine.aclose()

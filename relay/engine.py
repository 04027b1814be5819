"""Asks the local engine about itself, over HTTP or over a follower's gRPC. Shell."""

import asyncio
from collections.abc import Mapping
from typing import Final, Protocol

import httpx

from relay.errors import RelayError, SettingsRefused
from relay.metadata import NodeMetadata, parse_metadata
from relay.protobuf import first_text

ANSWER_S: Final = 5.0
MAX_ANSWER_BYTES: Final = 64 << 20
# The second is the older name of the first.
_PATHS: Final = ("/server_info", "/get_server_info")
_METHOD: Final = "/sglang.runtime.v1.SglangService/GetServerInfo"


class EngineUnavailable(RelayError):
    """The engine does not answer, or not as one; it may the next time."""


class Engine(Protocol):
    """The local engine."""

    async def metadata(self) -> NodeMetadata:
        """Ask for the metadata, for at most some seconds.

        Raises:
            EngineUnavailable: There is no answer, or none with metadata in it.
            MetadataRefused: The answer cannot be used.
        """

    async def aclose(self) -> None:
        """Close the connections. May be called again."""


class HttpEngine:
    """An engine's HTTP address; ``api_key`` is the engine's own."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        headers = {"accept": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        # Proxies are for the way out; the engine is on this machine.
        self._client = httpx.AsyncClient(base_url=url, headers=headers, timeout=ANSWER_S, trust_env=False)

    async def metadata(self) -> NodeMetadata:
        """See ``Engine``."""
        for path in _PATHS:
            try:
                status, body = await read_capped(self._client, "GET", path)
            except httpx.HTTPError as exc:
                raise EngineUnavailable(f"{path}: {exc or type(exc).__name__}") from exc
            if status == 200:
                return parse_metadata(body)
            if status in (401, 403):
                raise EngineUnavailable(f"{path}: status {status}, the engine wants its key (--engine-api-key-file)")
            if status != 404:
                raise EngineUnavailable(f"{path}: status {status}")
        raise EngineUnavailable(f"{' and '.join(_PATHS)} are not there; is this an SGLang engine?")

    async def aclose(self) -> None:
        """See ``Engine``."""
        await self._client.aclose()


class GrpcEngine:
    """A follower's gRPC address, ``HOST:PORT``; needs the extra ``forebay[grpc]``."""

    def __init__(self, target: str) -> None:
        """Prepare the connection.

        Raises:
            SettingsRefused: The extra is not installed.
        """
        try:
            import grpc
        except ImportError as exc:
            raise SettingsRefused(
                f"--engine grpc://{target}: gRPC is not installed; pip install 'forebay[grpc]'"
            ) from exc
        self._error: type[Exception] = grpc.RpcError
        self._channel = grpc.aio.insecure_channel(
            target, options=[("grpc.max_receive_message_length", MAX_ANSWER_BYTES), ("grpc.enable_http_proxy", 0)]
        )
        self._call = self._channel.unary_unary(_METHOD, request_serializer=bytes, response_deserializer=bytes)

    async def metadata(self) -> NodeMetadata:
        """See ``Engine``."""
        try:
            answer: bytes = await self._call(b"", timeout=ANSWER_S)
        except self._error as exc:
            code = getattr(exc, "code", lambda: None)()
            raise EngineUnavailable(f"GetServerInfo: {getattr(code, 'name', type(exc).__name__)}") from exc
        try:
            return parse_metadata(first_text(answer))
        except ValueError as exc:
            raise EngineUnavailable(f"GetServerInfo: {exc}") from exc

    async def aclose(self) -> None:
        """See ``Engine``."""
        await self._channel.close()


async def read_capped(
    client: httpx.AsyncClient, method: str, path: str, headers: Mapping[str, str] | None = None, content: bytes = b""
) -> tuple[int, bytes]:
    """Send a request, and read its answer up to a bound: status and body.

    Raises:
        httpx.HTTPError: No answer in time, or one that is too long.
    """
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            client.stream(method, path, headers=headers, content=content) as response,
        ):
            body = bytearray()
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > MAX_ANSWER_BYTES:
                    raise httpx.ReadError(f"more than {MAX_ANSWER_BYTES} bytes")
            return response.status_code, bytes(body)
    except TimeoutError as exc:
        raise httpx.ReadTimeout(f"no answer within {ANSWER_S:g} s") from exc

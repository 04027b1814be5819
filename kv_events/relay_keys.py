"""Who may talk to whom between relays and gateways: CURVE keys in files, and addresses that need none.

A key file has one ``NAME = VALUE`` a line: ``public-key``, ``secret-key``, and any number of ``gateway-key``, the
public keys of the gateways that a relay may talk to (without any it believes what the gateway's HTTP route tells). A
file of authorized keys has one public key a line, and after it, if wanted, a name. Keys are in Z85, 40 characters. In
both files blank lines and lines that start with ``#`` are skipped.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

from kv_events.errors import KeyFileRefused, SourceMisconfigured

_KEY_CHARS: Final = 40
_KEY_BYTES: Final = 32
_TCP: Final = re.compile(r"tcp://(\[[0-9A-Fa-f:.%]+\]|[^\s\[\]/:@]+):(\d{1,5}|\*)")
_IPC: Final = re.compile(r"ipc://(/|@)[^\0]+")
_LOOPBACK: Final = re.compile(r"localhost|127(\.\d{1,3}){3}|::1")
_WILDCARDS: Final = frozenset({"*", "0.0.0.0", "::"})


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, in Z85.

    Attributes:
        public_key: For everybody.
        secret_key: For nobody else.
        gateway_keys: Public keys of the gateways that its owner may talk to; empty for any.
    """

    public_key: bytes
    secret_key: bytes = field(repr=False)
    gateway_keys: frozenset[bytes] = frozenset()


def generate_keys() -> KeyPair:
    """Make a new pair, whose public key can begin a line of a file that has comments."""
    while True:
        public, secret = zmq.curve_keypair()
        if not public.startswith(b"#"):
            return KeyPair(public, secret)


def write_key_file(path: Path) -> KeyPair:
    """Make a new pair and write it to a new file that only its owner may read.

    Raises:
        KeyFileRefused: The file exists, or cannot be written.
    """
    keys = generate_keys()
    text = (
        "# CURVE key pair of Forebay. Keep this file secret; give only the public key away.\n"
        f"public-key = {keys.public_key.decode()}\nsecret-key = {keys.secret_key.decode()}\n"
        "# Public keys of the gateways to talk to; without any, a gateway's own word is believed.\n"
        "# gateway-key = ...\n"
    )
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
    except OSError as exc:
        raise KeyFileRefused(f"{path}: cannot be written ({exc.strerror or exc})") from exc
    return keys


def read_key_pair(path: Path) -> KeyPair:
    """Read a key file.

    Raises:
        KeyFileRefused: It cannot be read, or holds no pair; no key is in the message.
    """
    found: dict[str, list[bytes]] = {"public-key": [], "secret-key": [], "gateway-key": []}
    for number, line in _lines(path):
        name, _, value = (part.strip() for part in line.partition("="))
        # Z85 has no '#', but '=' is one of its characters.
        if name not in found:
            raise KeyFileRefused(f"{path}:{number}: write public-key, secret-key or gateway-key, then '=' and the key")
        found[name].append(_key(path, number, value))
    if len(found["public-key"]) != 1 or len(found["secret-key"]) != 1:
        raise KeyFileRefused(f"{path}: must have one public-key and one secret-key; `forebay relay --keygen` makes one")
    public, secret = found["public-key"][0], found["secret-key"][0]
    if zmq.curve_public(secret) != public:
        raise KeyFileRefused(f"{path}: public-key and secret-key are no pair")
    return KeyPair(public, secret, frozenset(found["gateway-key"]))


def read_authorized_keys(path: Path) -> dict[bytes, str]:
    """Read the public keys that may connect, each with its name, or with an empty one.

    Raises:
        KeyFileRefused: The file cannot be read, has no key, or something else in it.
    """
    keys: dict[bytes, str] = {}
    for number, line in _lines(path):
        value, _, name = line.partition(" ")
        keys[_key(path, number, value)] = name.strip()
    if not keys:
        raise KeyFileRefused(f"{path}: holds no key; put the public key of one relay on a line")
    return keys


def is_local_endpoint(endpoint: str) -> bool:
    """Say whether a ZMQ address can be reached from its own machine only.

    Raises:
        SourceMisconfigured: It is no address of ``tcp://HOST:PORT`` or ``ipc://`` with an absolute path or a ``@name``.
    """
    if endpoint.startswith("ipc://"):
        if not _IPC.fullmatch(endpoint):
            raise SourceMisconfigured(f"{endpoint!r}: write ipc:// and an absolute path, or @ and a name")
        return True
    return _LOOPBACK.fullmatch(_host_and_port(endpoint)[0]) is not None


def seen_from(endpoint: str, host: str) -> str:
    """Put ``host`` in the place of an address that means all addresses of a machine; other addresses stay.

    Raises:
        SourceMisconfigured: It is no address, see ``is_local_endpoint``.
    """
    if endpoint.startswith("ipc://"):
        return endpoint
    named, port = _host_and_port(endpoint)
    named = host if named in _WILDCARDS else named
    return f"tcp://[{named}]:{port}" if ":" in named else f"tcp://{named}:{port}"


def _host_and_port(endpoint: str) -> tuple[str, str]:
    match = _TCP.fullmatch(endpoint)
    if match is None or (match[2] != "*" and int(match[2]) > 65_535):
        raise SourceMisconfigured(f"{endpoint!r}: write tcp://HOST:PORT or ipc://PATH")
    # A socket for both families shows IPv4 addresses inside IPv6 ones.
    return match[1].strip("[]").removeprefix("::ffff:"), match[2]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is no text"
        raise KeyFileRefused(f"{path}: cannot be read ({reason})") from exc
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            yield number, " ".join(line.split())


def _key(path: Path, number: int, value: str) -> bytes:
    try:
        raw = z85.decode(value.encode("ascii"))
    except (ValueError, KeyError, OverflowError, UnicodeEncodeError) as exc:
        raise KeyFileRefused(f"{path}:{number}: no key of {_KEY_CHARS} characters in Z85") from exc
    if len(value) != _KEY_CHARS or len(raw) != _KEY_BYTES:
        raise KeyFileRefused(f"{path}:{number}: no key of {_KEY_CHARS} characters in Z85")
    return value.encode("ascii")

"""Which nodes are one engine: the address where they meet, made comparable. Pure.

Nodes may write that address differently, and a name server may give them its records in any order, or not all of them.
"""

import enum
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from relay.errors import GroupUnresolved

_ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s\[\]/:?#@]+):(\d{1,5})", re.ASCII)


class Match(enum.Enum):
    """How sure it is that two identities are the same."""

    NONE = "none"
    PARTIAL = "partial"
    """They share an address, but each side, or one of them, has others: the name servers do not agree."""
    FULL = "full"


@dataclass(frozen=True, slots=True)
class GroupIdentity:
    """The meeting point of an engine's nodes.

    Attributes:
        literal: As the engine has it, ``tcp://HOST:PORT``, in lower case.
        addresses: What it resolves to, ``tcp://IP:PORT``, IPv4 first, then by number; never empty.
    """

    literal: str
    addresses: tuple[str, ...]

    @property
    def key(self) -> str:
        """The name of the group, for people and logs."""
        return f"dist_init:{self.addresses[0]}"


def parse_address(text: str) -> tuple[str, int]:
    """Take ``[tcp://]HOST:PORT`` apart; the host is without brackets and in lower case.

    Raises:
        GroupUnresolved: It is something else.
    """
    scheme, has_scheme, rest = text.strip().partition("://")
    if has_scheme and scheme.lower() != "tcp":
        raise GroupUnresolved(f"dist_init_addr {text!r}: the scheme must be tcp")
    match = _ADDRESS.fullmatch(rest if has_scheme else scheme)
    if match is None or not 1 <= int(match[2]) <= 65_535:
        raise GroupUnresolved(f"dist_init_addr {text!r} is not HOST:PORT with a port from 1 to 65535")
    return match[1].strip("[]").lower(), int(match[2])


def identity_of(text: str, resolved: Iterable[str]) -> GroupIdentity:
    """Make the identity of a group.

    Args:
        text: Its address, as ``parse_address`` takes it.
        resolved: IP addresses of its host, in any order, also several times.

    Raises:
        GroupUnresolved: There is no address.
    """
    host, port = parse_address(text)
    found = sorted(
        {ipaddress.ip_address(ip.partition("%")[0]) for ip in resolved}, key=lambda ip: (ip.version, int(ip))
    )
    if not found:
        raise GroupUnresolved(f"dist_init_addr {text!r} resolves to no address")
    return GroupIdentity(_tcp(host, port), tuple(_tcp(str(ip), port) for ip in found))


def match(ours: GroupIdentity, theirs: GroupIdentity) -> Match:
    """Compare two identities: equal as written, or an address in common that is not every machine's own."""
    if ours.literal == theirs.literal:
        return Match.FULL
    common = {address for address in set(ours.addresses) & set(theirs.addresses) if not _is_own(address)}
    if not common:
        return Match.NONE
    return Match.FULL if ours.addresses == theirs.addresses else Match.PARTIAL


def _tcp(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _is_own(address: str) -> bool:
    """Tell whether an address means whoever uses it."""
    ip = ipaddress.ip_address(parse_address(address)[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return any(one.is_loopback or one.is_unspecified for one in (ip, mapped) if one is not None)

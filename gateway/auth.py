"""Who may do what: client keys, admin keys, and the networks from which admin routes are open without a key."""

import hmac
import ipaddress
from collections.abc import Mapping, Sequence

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def bearer_of(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The bearer token, ``None`` if there is none. ``None`` as a word counts as none, since some clients send it."""
    value = headers.get(b"authorization", b"")
    scheme, _, token = value.partition(b" ")
    return _known(token.strip()) if scheme.lower() == b"bearer" else None


def _known(key: bytes) -> bytes | None:
    return None if key in (b"", b"None") else key


class Keys:
    """Checks credentials.

    Args:
        client_keys: Keys for the client routes; empty leaves them open.
        admin_keys: Keys for the admin routes; they open the client routes too.
        admin_networks: Without admin keys, clients in these networks may use the admin routes.
    """

    __slots__ = ("_admin", "_client", "_networks")

    def __init__(
        self, client_keys: Sequence[str] = (), admin_keys: Sequence[str] = (), admin_networks: Sequence[Network] = ()
    ) -> None:
        self._client = [key.encode() for key in client_keys]
        self._admin = [key.encode() for key in admin_keys]
        self._networks = list(admin_networks)

    @property
    def has_admin_keys(self) -> bool:
        """Admin routes need a key rather than a place."""
        return bool(self._admin)

    def may_use(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether the client routes are open to a request with these headers.

        Clients of ``/v1/messages`` send their key as ``x-api-key``; one right key is enough where both are sent.
        """
        if not self._client:
            return True
        keys = [*self._client, *self._admin]
        given = (bearer_of(headers), _known(headers.get(b"x-api-key", b"")))
        return any(key is not None and _is_one_of(key, keys) for key in given)

    def may_administer(self, headers: Mapping[bytes, bytes], client_host: str | None) -> bool:
        """Whether the admin routes are open to a request with these headers from that address.

        Only ``Authorization`` counts here.
        """
        if self._admin:
            token = bearer_of(headers)
            return token is not None and _is_one_of(token, self._admin)
        try:
            address = ipaddress.ip_address((client_host or "").partition("%")[0])
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._networks)


def _is_one_of(token: bytes, keys: Sequence[bytes]) -> bool:
    found = False
    for key in keys:  # all of them, so that time tells nothing
        found |= hmac.compare_digest(token, key)
    return found

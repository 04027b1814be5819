"""A transport for an answer that ends its connection."""

import asyncio
from collections.abc import Callable


class ClosesWhenRead:
    """Closes as soon as nothing unread is left.

    Closing with unread input makes the kernel reset the connection, and the reset overtakes the answer.

    Args:
        transport: The connection's.
        close_when_read: Closes it.
    """

    __slots__ = ("_transport", "close")

    def __init__(self, transport: asyncio.Transport, close_when_read: Callable[[], None]) -> None:
        self._transport = transport
        self.close = close_when_read

    def write(self, data: bytes) -> None:
        """Write; see ``asyncio.Transport``."""
        self._transport.write(data)

    def is_closing(self) -> bool:
        """See ``asyncio.Transport``."""
        return self._transport.is_closing()

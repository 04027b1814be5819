"""Threads that nobody waits for. Shell.

The system's resolver cannot be interrupted. The threads of an ordinary pool are joined when the process ends, so that a
name server that does not answer would hold up the end; these are not.
"""

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from relay.errors import GroupUnresolved
from relay.identity import GroupIdentity, identity_of, parse_address

P = ParamSpec("P")
T = TypeVar("T")

Lookup = Callable[[str, int], Sequence[str]]

# A resolver that hangs gets no more than these from one process; look-ups beyond fail at once.
MAX_THREADS = 32
_free = threading.BoundedSemaphore(MAX_THREADS)


class DaemonExecutor(ThreadPoolExecutor):
    """A thread for each call, gone with the process. Made the loop's executor, it serves all look-ups of names."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call ``fn`` in a thread of its own.

        Raises:
            OSError: Too many calls hang already.
        """
        if not _free.acquire(blocking=False):
            raise OSError("too many look-ups are waiting for the resolver")
        future: Future[T] = Future()

        def call() -> None:
            try:
                if not future.set_running_or_notify_cancel():
                    return
                result = fn(*args, **kwargs)
            except Exception as exc:  # noqa: BLE001 - whoever awaits the future gets it
                future.set_exception(exc)
            else:
                future.set_result(result)
            finally:
                _free.release()

        threading.Thread(target=call, name="forebay-lookup", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the threads to themselves, whatever is asked for."""


def system_lookup(host: str, port: int) -> list[str]:
    """Ask the system for the addresses of a host. Blocks for as long as the resolver takes."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[4][0]) for address in found]


async def resolve_group(address: str, deadline_s: float, lookup: Lookup = system_lookup) -> GroupIdentity:
    """Find out the identity of a group; cancelling does not wait for the resolver.

    Args:
        address: ``dist_init_addr``.
        deadline_s: Longest wait.
        lookup: Called in a thread that is left alone if it takes longer.

    Raises:
        GroupUnresolved: It is no address, or none was found in time.
    """
    host, port = parse_address(address)
    try:
        return identity_of(address, [str(ipaddress.ip_address(host.partition("%")[0]))])
    except ValueError:
        pass
    try:
        async with asyncio.timeout(deadline_s):
            loop = asyncio.get_running_loop()
            found: Any = await loop.run_in_executor(DaemonExecutor(), lookup, host, port)
    except TimeoutError as exc:
        raise GroupUnresolved(f"dist_init_addr {address!r}: no answer from the resolver in {deadline_s:g} s") from exc
    except OSError as exc:
        raise GroupUnresolved(f"dist_init_addr {address!r} cannot be resolved: {exc.strerror or exc}") from exc
    return identity_of(address, found)

"""Makes one boot of an engine, with what its role adds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from simulator.core import Core
from simulator.faults import FaultTable
from simulator.group import NodePublisher
from simulator.kv_publisher import KvPublisher
from simulator.log import EngineLog
from simulator.options import EngineOptions
from simulator.peer_link import Link, Listener
from simulator.sglang.decode_role import DecodeRole
from simulator.sglang.prefill_role import PrefillRole
from simulator.vllm.connector import Connector
from simulator.vllm.engine import VllmCore
from simulator.vllm.pins import PinTable

AnyPublisher = KvPublisher | NodePublisher


def open_peer_port(options: EngineOptions, loop: asyncio.AbstractEventLoop) -> Listener | None:
    """Return the port where a prefill engine waits for decode engines, ``None`` for other roles.

    Whoever asked for it closes it.

    Raises:
        OSError: The address cannot be bound.
    """
    return Listener(loop, options.host, options.bootstrap_port) if options.role == "prefill" else None


def make_publisher(
    options: EngineOptions,
    loop: asyncio.AbstractEventLoop,
    faults: FaultTable,
    log: EngineLog,
    restart: Callable[[], None],
) -> AnyPublisher:
    """Return what publishes the node's KV events, bound; ``restart`` reboots the engine.

    Raises:
        OSError: An address cannot be bound.
    """
    if options.node_rank > 0:
        return NodePublisher(options, loop, faults)
    return KvPublisher(options, loop, faults, log, restart)


def make_sglang(
    options: EngineOptions,
    loop: asyncio.AbstractEventLoop,
    log: EngineLog,
    publisher: AnyPublisher | None,
    faults: FaultTable,
    listener: Listener | None,
) -> Core:
    """Return a booted SGLang engine; it answers on ``listener`` and closes it when it stops."""
    # Of the nodes of an engine only the first computes.
    core = Core(options, loop, log, publisher if isinstance(publisher, KvPublisher) else None)
    if listener is not None:
        core.handoff = PrefillRole(core, listener, faults)
    elif options.role == "decode":
        core.handoff = DecodeRole(core, faults, lambda host, port: Link.dial(loop, host, port))
    return core


def make_vllm(
    options: EngineOptions,
    loop: asyncio.AbstractEventLoop,
    log: EngineLog,
    publisher: AnyPublisher | None,
    faults: FaultTable,
    listener: Listener | None,
    die: Callable[[], None],
) -> VllmCore:
    """Return a booted vLLM engine, likewise; ``die`` ends it."""
    core = VllmCore(options, loop, log, publisher if isinstance(publisher, KvPublisher) else None)
    if options.role != "regular":
        pins = None if listener is None else PinTable(core, listener, faults)
        core.connector = Connector(core, faults, lambda host, port: Link.dial(loop, host, port), pins, die)
        core.handoff = core.connector
    return core

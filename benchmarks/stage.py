"""What is measured: two simulated engines, and the gateway and haproxy in front of them."""

import functools
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks import haproxy
from benchmarks.processes import BenchmarkFailed, Children, call, forebay_command, free_port, wait_until
from benchmarks.procfs import LOAD_CORE, TEST_CORE

ENGINES: Final = 2
MODEL: Final = "bench"
# Room for the body of token ids, and no log of what the engine saw. Connections stay open while others have their
# turn: a proxy that reuses one in the moment in which the engine closes it answers 502.
_ENGINE_OPTIONS: Final = (
    *("--model", MODEL, "--context-length", "400000", "--num-blocks", "65536", "--vocab-size", "200000"),
    *("--log-limit", "1", "--log-body-bytes", "0", "--keep-alive-s", "120"),
)


@dataclass(frozen=True, slots=True)
class Target:
    """Where load goes.

    Attributes:
        name: ``gateway``, ``haproxy`` or ``direct``.
        port: Port on 127.0.0.1.
        pid: Process under test, ``None`` for ``direct``.
    """

    name: str
    port: int
    pid: int | None = None


@dataclass(slots=True)
class Stage:
    """Everything running for one case.

    Attributes:
        children: Its processes.
        engine_ports: Ports of the engines.
        gateway: The gateway.
        haproxy: haproxy.
        direct: The first engine.
    """

    children: Children
    engine_ports: list[int]
    gateway: Target
    haproxy: Target
    direct: Target

    @property
    def targets(self) -> tuple[Target, Target]:
        """The processes under test, in the order in which they take turns."""
        return self.gateway, self.haproxy

    def add_fault(self, fault: dict[str, object]) -> None:
        """Script a fault on every engine.

        Raises:
            BenchmarkFailed: An engine does not take it.
        """
        for port in self.engine_ports:
            status, answer = call(port, "POST", "/_fault", fault)
            if status != 200:
                raise BenchmarkFailed(f"the engine does not take the fault: {answer!r}")


def open_stage(children: Children, engine_options: Sequence[str] = (), *, is_for_streams: bool = False) -> Stage:
    """Start all of it and wait until requests can be served.

    Args:
        children: Owns the processes.
        engine_options: More options for the engines.
        is_for_streams: haproxy is set up for streams rather than for bodies.

    Raises:
        BenchmarkFailed: Something did not start.
    """
    engine_ports = [free_port() for _ in range(ENGINES)]
    for port in engine_ports:
        command = [*forebay_command(), "simulate", "--port", str(port), *_ENGINE_OPTIONS, *engine_options]
        children.start(f"engine-{port}", command, LOAD_CORE)
    for port in engine_ports:
        wait_until(functools.partial(_answers, port), children.check, "an engine")
    gateway = _start_gateway(children, engine_ports)
    proxy = _start_haproxy(children, engine_ports, is_for_streams)
    return Stage(children, engine_ports, gateway, proxy, Target("direct", engine_ports[0]))


def _answers(port: int) -> bool:
    return call(port, "GET", "/ping")[0] == 200


def _start_gateway(children: Children, engine_ports: Sequence[int]) -> Target:
    port = free_port()
    workers = [word for engine in engine_ports for word in ("--worker", f"http://127.0.0.1:{engine}")]
    process = children.start("gateway", [*forebay_command(), "serve", "--port", str(port), *workers], TEST_CORE)

    def is_ready() -> bool:
        status, body = call(port, "GET", "/workers")
        return status == 200 and [w["is_ready"] for w in json.loads(body)["workers"]] == [True] * len(engine_ports)

    wait_until(is_ready, children.check, "the gateway")
    return Target("gateway", port, process.pid)


def _start_haproxy(children: Children, engine_ports: Sequence[int], is_for_streams: bool) -> Target:
    port = free_port()
    config = children.temp / f"haproxy-{port}.cfg"
    config.write_text(haproxy.config_text(port, engine_ports, is_for_streams=is_for_streams), "utf-8")
    # -db: in the foreground and as one process, so that its pid is the one that works.
    process = children.start("haproxy", ["haproxy", "-db", "-f", str(config)], TEST_CORE)
    wait_until(functools.partial(_answers, port), children.check, "haproxy")
    return Target("haproxy", port, process.pid)


def haproxy_version() -> str:
    """Version of the installed haproxy."""
    done = subprocess.run(["haproxy", "-v"], capture_output=True, text=True, check=False)
    return haproxy.version_of(done.stdout)

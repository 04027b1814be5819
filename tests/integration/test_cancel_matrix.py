"""Every forwarded route, unary and streamed, at every stage, ended in every way: what engine and client are told.

One test is one route and one way to end; its cells (two modes, five stages) run at the same time. Expectations are
those of the table in ``docs/cancellation.md`` for SGLang 0.5.23. The upstream client is the one that the run selects.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from gateway.routes import ROUTES, Dialect
from tests.fakes.running import PATIENCE_S, TIME_SCALE, RunningGateway, until
from tests.fakes.script_engine import Reply, ScriptEngine, SeenRequest
from tests.fakes.wire import Wire, call, request_bytes, wire
from tests.integration.cancel_scenes import BODIES, CONNECTING, STAGES, STUCK, Cell, Scene, staged

# Engines are told at once; this allows for a loaded machine.
SOON_S = 2.0 * TIME_SCALE
# All cells of a test have to reach their stages in less.
LIMIT_S = 1.5 * TIME_SCALE
PATHS = sorted(ROUTES)
LEAVES = {"close": Wire.close, "reset": Wire.reset}
Staged = tuple[ScriptEngine, RunningGateway]


def cells_of(path: str) -> list[Cell]:
    """Both modes at all stages."""
    return [Cell(path, stage, is_stream) for is_stream in (False, True) for stage in STAGES]


@dataclass
class Running:
    """A cell on its way."""

    cell: Cell
    scene: Scene
    connection: Wire
    ended_at: float = 0.0


class Table:
    """The cells of one test on one gateway."""

    def __init__(self, engine: ScriptEngine, gateway: RunningGateway, cells: Sequence[Cell]) -> None:
        self._engine = engine
        self._cells = cells
        self._stack = AsyncExitStack()
        self.gateway = gateway
        self.running: list[Running] = []
        self.failures: list[str] = []

    async def __aenter__(self) -> "Table":
        """Bring every cell to its stage."""
        try:
            await self._begin()
        except BaseException:
            await self._stack.aclose()  # else what is left of this test would fail the next ones
            raise
        return self

    async def _begin(self) -> None:
        scenes = {str(cell): Scene(cell) for cell in self._cells}

        async def script(request: SeenRequest, reply: Reply) -> None:
            await scenes[json.loads(request.body)["cell"]].play(self._engine, request, reply)

        self._engine.script = script
        self._engine.requests.clear()
        self._engine.aborted.clear()
        self.gateway.records.clear()
        for cell in self._cells:
            connection = await self._stack.enter_async_context(wire(self.gateway.address))
            await connection.send(request_bytes(cell.path, cell.body, headers={"x-request-id": str(cell)}))
            self.running.append(Running(cell, scenes[str(cell)], connection))
        for one in self.running:
            if one.cell.stage != CONNECTING:
                await until(one.scene.reached.is_set, f"the stage of {one.cell}")
        client, stuck = self.gateway.gateway.services.client, sum(cell.stage == CONNECTING for cell in self._cells)
        await until(lambda: client.connecting == stuck, f"{stuck} connection attempts, are {client.connecting}")

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()
        client = self.gateway.gateway.services.client
        await self.gateway.settle()
        await until(lambda: client.active_connections == 0, f"{client.active_connections} connection(s) to engines")
        connections = self.gateway.server.server_state.connections
        await until(lambda: not connections, f"{len(connections)} connection(s) of clients")

    def check(self, cell: Cell, what: str, seen: object, expected: object) -> None:
        """Note a difference, so that one broken cell does not hide the others."""
        if seen != expected:
            self.failures.append(f"{cell}: {what} is {seen!r}, not {expected!r}")

    async def check_engine(self, one: Running, expected: str, *, reads_on: bool = True) -> None:
        """It was told in that way, once and soon; ``reads_on``: an aborted call is read to its end."""
        cell, scene = one.cell, one.scene
        if cell.stage == CONNECTING:
            self.check(cell, "the request at an engine", scene.reached.is_set(), False)
            return
        try:
            await until(lambda: scene.told != "", "the engine told")
        except AssertionError:
            self.failures.append(f"{cell}: the engine was never told")
            return
        self.check(cell, "the way of telling", scene.told, expected)
        if scene.told_at - one.ended_at > SOON_S:
            self.failures.append(f"{cell}: told only after {scene.told_at - one.ended_at:.2f} s")
        if expected == "abort" and reads_on:
            self.check(cell, "the call open at the abort", scene.is_open_at_abort, True)
        aborts = self._engine.aborted.count(scene.rid)
        if not (1 <= aborts <= 3 if expected == "abort" else aborts == 0):
            self.failures.append(f"{cell}: {aborts} aborts")

    async def check_record(self, cell: Cell, outcome: str, status: int) -> None:
        """Exactly one record, with that outcome."""
        records = self.gateway.records
        try:
            await until(lambda: any(record.request_id == str(cell) for record in records), "the record")
        except AssertionError:
            self.failures.append(f"{cell}: no access record")
            return
        found = [(str(record.outcome), record.status) for record in records if record.request_id == str(cell)]
        self.check(cell, "the outcome", found, [(outcome, status)])

    async def check_stopped(self, one: Running, kind: str, status: int, outcome: str) -> None:
        """The client was told of an error, in the way that was still open."""
        answer = await one.connection.answer()
        if one.cell.has_begun:
            status = 200
            last = [event for event in answer.body.split(b"\n\n") if event and event != b"data: [DONE]"][-1]
            self.check(one.cell, "the last event's error", b'"%b"' % kind.encode() in last, True)
        else:
            self.check(one.cell, "the error", answer.json()["error"]["type"], kind)
        self.check(one.cell, "the status", answer.status, status)
        await self.check_record(one.cell, outcome, status)

    def told_without_a_reader(self, cell: Cell) -> str:
        """How SGLang 0.5.23 is told that nobody waits."""
        return "abort" if cell.has_ids and not cell.is_stream else "close"


def test_field_case_4_every_route_has_a_body() -> None:
    """A route that is added has to be added to the matrix."""
    assert set(BODIES) == set(ROUTES)


@pytest.fixture(scope="module")
async def plain(anyio_backend: object) -> AsyncIterator[Staged]:
    """Without limits."""
    async with staged() as made:
        yield made


@pytest.fixture(scope="module")
async def limited(anyio_backend: object) -> AsyncIterator[Staged]:
    """With a time limit for every request."""
    async with staged(request_timeout_s=LIMIT_S) as made:
        yield made


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("how", LEAVES)
async def test_the_client_leaves(plain: Staged, path: str, how: str) -> None:
    """Mutations tried: unary calls are closed; streams are aborted; calls that are not written are kept."""
    async with Table(*plain, cells_of(path)) as table:
        for one in table.running:
            if one.cell.has_begun:
                await one.connection.head()
                await one.connection.chunk()
            one.ended_at = time.monotonic()
            LEAVES[how](one.connection)
        for one in table.running:
            await table.check_engine(one, table.told_without_a_reader(one.cell))
            await table.check_record(one.cell, "client_closed", 499)
    assert not table.failures, "\n".join(table.failures)
    assert len(table.gateway.records) == len(table.running)


@pytest.mark.parametrize("path", PATHS)
async def test_the_request_is_aborted(plain: Staged, path: str) -> None:
    """Mutation tried: ``Exchange.abort`` waits for calls that are not written; then their clients wait for ever."""
    async with Table(*plain, cells_of(path)) as table:
        for one in table.running:
            if one.cell.has_begun:
                await until(lambda one=one: _is_live(table.gateway, one.cell), "the first event")  # type: ignore[misc]
            one.ended_at = time.monotonic()
            report = (await call(table.gateway.address, "/abort_request", {"rid": str(one.cell)})).json()
            table.check(one.cell, "what was aborted", report["aborted"], [str(one.cell)])
        for one in table.running:
            await table.check_engine(one, "abort" if one.cell.has_ids else "close")
            if one.cell.has_ids and one.cell.stage != CONNECTING:
                await _check_partial_answer(table, one)
            else:
                await table.check_stopped(one, "aborted", 499, "aborted")
    assert not table.failures, "\n".join(table.failures)
    assert len(table.gateway.records) == len(table.running)


def _is_live(gateway: RunningGateway, cell: Cell) -> bool:
    return any(live for live, _ in gateway.gateway.services.live.find(str(cell)))


async def _check_partial_answer(table: Table, one: Running) -> None:
    """The caller has what the engine gave, whole, under its own id."""
    answer = await one.connection.answer()
    table.check(one.cell, "the status", (answer.status, answer.is_whole), (200, True))
    dialect = ROUTES[one.cell.path].dialect
    table.check(one.cell, "an engine's id in the answer", one.scene.rid.encode() in answer.body, False)
    is_told = dialect in (Dialect.NATIVE, Dialect.CHAT, Dialect.COMPLETIONS) or (
        dialect is Dialect.EMBEDDINGS and one.cell.is_stream
    )
    await table.check_record(one.cell, "aborted" if is_told else "complete", 200)


@pytest.mark.parametrize("path", PATHS)
async def test_the_time_limit_passes(limited: Staged, path: str) -> None:
    """Mutation tried: ``Exchange.stop`` cancels nothing; the engine is then told with the answer only."""
    async with Table(*limited, cells_of(path)) as table:
        for one in table.running:
            one.ended_at = time.monotonic() + LIMIT_S
        for one in table.running:
            await table.check_engine(one, table.told_without_a_reader(one.cell))
            await table.check_stopped(one, "timeout", 504, "timeout")
    assert not table.failures, "\n".join(table.failures)
    assert len(table.gateway.records) == len(table.running)


@pytest.mark.parametrize("path", PATHS)
async def test_the_gateway_stops(path: str) -> None:
    """Mutation tried: the drain does not wait for first aborts; unary calls are then closed."""
    async with staged(drain_timeout_s=0) as (engine, gateway):
        async with Table(engine, gateway, cells_of(path)) as table:
            now = time.monotonic()
            gateway.gateway.begin_drain()
            for one in table.running:
                one.ended_at = now
                await table.check_engine(one, table.told_without_a_reader(one.cell), reads_on=False)
                await table.check_stopped(one, "engine_shutdown", 503, "shutdown")
            async with asyncio.timeout(PATIENCE_S):
                await gateway.gateway.drained.wait()
        assert not table.failures, "\n".join(table.failures)
        assert len(gateway.records) == len(table.running)


def test_the_stuck_worker_serves_a_model_of_its_own() -> None:
    """Else a cell could end up on the wrong worker."""
    models = {cell.body["model"] for path in PATHS for cell in cells_of(path) if cell.stage == CONNECTING}
    assert models == {STUCK}

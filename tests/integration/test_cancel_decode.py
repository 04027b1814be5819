"""Decode legs of vLLM pairs: nobody waits any more, but the prompt's blocks have to be taken over first."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from backends.cancel_policy import LegKind
from backends.errors import UpstreamError
from backends.leg import Leg
from backends.leg_events import Cause, LegState
from backends.sse import EventCutter
from tests.fakes.running import PATIENCE_S, TIME_SCALE, until
from tests.integration.decode_pair import (
    FINISH,
    FOREVER_S,
    HEAD,
    PING,
    PROMPT_TOKENS,
    ROLE,
    TOKEN,
    Engine,
    ended,
    paired,
    within,
)

STEP_S = 0.01 * TIME_SCALE


async def test_a4_1_a_leg_that_is_cancelled_before_its_connection_exists_is_still_sent() -> None:
    """Mutation tried: what is not written is dropped under every policy; then the request never arrives."""
    async with paired() as p:
        leg = p.leg()
        assert leg.call.written_at is None
        leg.cancel(Cause.CLIENT_GONE)
        await within(p.engine.arrived.wait())
        assert await p.other_request() == 200  # on a connection of its own
        idle = p.client.idle_connections
        assert (leg.state, idle) == (LegState.DRAINING, 1)
        await p.engine.send(HEAD, TOKEN)
        await ended(leg)
        await within(p.engine.has_left.wait())
        assert p.client.idle_connections == idle
        assert await p.other_request() == 200
        assert len(p.server.connections) == 2


async def test_a4_2_a_leg_whose_head_is_withheld_is_kept_to_its_first_chunk() -> None:
    """Mutation tried: only legs with a head are kept; then the engine sees the end before its first chunk."""
    async with paired() as p:
        leg = p.leg()
        await within(p.engine.arrived.wait())
        leg.cancel(Cause.CLIENT_GONE)
        await asyncio.sleep(20 * STEP_S)
        assert not p.engine.has_left.is_set()
        await p.engine.send(HEAD)
        await asyncio.sleep(2 * STEP_S)
        assert not p.engine.has_left.is_set()
        await p.engine.send(TOKEN)
        await ended(leg)
        await within(p.engine.has_left.wait())


async def test_a4_3_after_its_first_token_it_is_closed_at_once() -> None:
    """Mutation tried: draining whether or not there was output; then it is not ended when ``cancel`` returns."""
    async with paired() as p:
        leg = p.leg()
        await p.engine.send(HEAD, ROLE, TOKEN)
        await leg.call.head()
        while not leg.has_output:
            leg.saw(await leg.call.read())
        leg.cancel(Cause.CLIENT_GONE)
        assert leg.is_ended
        await within(p.engine.has_left.wait())


async def test_a4_4_the_event_that_names_the_role_is_no_token() -> None:
    """Mutation tried: any event counts as output; then the role's event releases the leg."""
    async with paired() as p:
        leg = p.leg()
        leg.cancel(Cause.CLIENT_GONE)
        await p.engine.send(HEAD, ROLE)
        await asyncio.sleep(20 * STEP_S)
        assert (leg.state, p.engine.has_left.is_set()) == (LegState.DRAINING, False)
        await p.engine.send(TOKEN[:30])
        await asyncio.sleep(2 * STEP_S)
        assert not leg.is_ended  # a part of an event shows nothing yet
        await p.engine.send(TOKEN[30:])
        await ended(leg)


@pytest.mark.parametrize(
    "last",
    [
        pytest.param(FINISH, id="finish reason"),
        pytest.param(b'data: {"choices":[],"usage":{"completion_tokens":1}}\n\n', id="usage"),
    ],
)
async def test_a4_5_an_end_without_a_token_releases_it(last: bytes) -> None:
    """Mutation tried: only text is output; then the leg waits on although its engine has ended."""
    async with paired() as p:
        leg = p.leg()
        leg.cancel(Cause.CLIENT_GONE)
        await p.engine.send(HEAD, ROLE, last)
        await ended(leg)
        assert p.counters.abandoned == 0


async def test_a4_5_an_error_is_no_sign_that_it_was_taken_over() -> None:
    async with paired() as p:
        leg = p.leg()
        leg.cancel(Cause.CLIENT_GONE)
        await p.engine.send(HEAD, ROLE, b'data: {"error":{"message":"out of blocks","code":500}}\n\n')
        await eof(p.engine)
        await ended(leg)
        assert p.counters.abandoned == 1


async def read_through(leg: Leg) -> None:
    """Read as an exchange does."""
    cutter = EventCutter(1 << 20)
    while data := await leg.call.read():
        leg.saw(cutter.feed(data))


async def eof(engine: Engine) -> None:
    """The connection ends inside the stream."""
    engine.generation.close()


async def reset(engine: Engine) -> None:
    """The connection is reset."""
    engine.generation.reset()


async def bad_json(engine: Engine) -> None:
    """An event that is none."""
    await engine.send(b"data: {no JSON\n\n")


async def bad_framing(engine: Engine) -> None:
    """A chunk whose size is no number."""
    await engine.generation.send(b"zz\r\n")


async def clean_end(engine: Engine) -> None:
    """The body ends as its framing says, without a token."""
    await engine.generation.send(b"0\r\n\r\n")


BREAKS = [eof, reset, bad_json, bad_framing]


@pytest.mark.parametrize("breaks", [*BREAKS, clean_end])
async def test_a4_6_whatever_breaks_after_the_cancel_is_its_end_with_one_warning(
    breaks: Callable[[Engine], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    """Mutations tried: each arm of the reader lets its error out, or says nothing; a clean end is taken for output."""
    async with paired() as p:
        leg = p.leg()
        leg.cancel(Cause.CLIENT_GONE)
        await p.engine.send(HEAD, ROLE)
        await breaks(p.engine)
        await ended(leg)
        assert leg.cause is Cause.CLIENT_GONE
        if breaks in (bad_json, clean_end):
            p.engine.generation.close()  # the connection may be whole
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.name for record in told] == ["forebay.aborts"]
    assert "broke off" in told[0].getMessage()


@pytest.mark.parametrize("breaks", BREAKS)
async def test_a4_6_without_a_cancel_it_stays_an_error(
    breaks: Callable[[Engine], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    """Mutation tried: ``saw`` swallows what it cannot read; then broken JSON is no error."""
    async with paired() as p:
        leg = p.leg()
        await p.engine.send(HEAD, ROLE)
        await leg.call.head()
        await breaks(p.engine)
        with pytest.raises(UpstreamError):
            await read_through(leg)
        leg.end("as told")
        assert leg.cause is Cause.ENGINE_ERROR
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a4_7_signs_of_life_do_not_extend_the_limit() -> None:
    """Mutation tried: every read starts the limit anew; then the leg is kept as long as comments come."""
    async with paired() as p:
        limit_s = 30 * STEP_S
        p.supervisor(drain_s=limit_s)
        leg = p.leg()
        await p.engine.send(HEAD)
        started = p.keeper.now()
        leg.cancel(Cause.CLIENT_GONE)
        pings = 0
        while not leg.is_ended:
            assert p.keeper.now() - started < limit_s + PATIENCE_S / 2
            with contextlib.suppress(ConnectionError):  # it may be closed at just this time
                await p.engine.send(PING, ROLE)
            pings += 1
            await asyncio.sleep(STEP_S)
        assert p.keeper.now() - started >= 0.95 * limit_s
        assert pings > 3
        assert p.counters.abandoned == 1
        await within(p.engine.has_left.wait())


STAGES: list[Any] = [
    pytest.param(False, False, id="connecting"),
    pytest.param(True, False, id="no head yet"),
    pytest.param(True, True, id="no token yet"),
]


@pytest.mark.parametrize("was_cancelled", [False, True], ids=["live", "draining"])
@pytest.mark.parametrize(("has_arrived", "has_head"), STAGES)
async def test_a4_8_a_shutdown_is_immediate(has_arrived: bool, has_head: bool, was_cancelled: bool) -> None:
    """Mutations tried: a shutdown drains too; one that comes to a draining leg changes nothing."""
    async with paired() as p:
        leg = p.leg()
        if has_arrived:
            await within(p.engine.arrived.wait())
        if has_head:
            await p.engine.send(HEAD, ROLE)
            await leg.call.head()
        if was_cancelled:
            leg.cancel(Cause.CLIENT_GONE)
            assert leg.state is LegState.DRAINING
        leg.cancel(Cause.SHUTDOWN)
        assert leg.is_ended
        assert p.counters.abandoned == 1
        if has_arrived:
            await within(p.engine.has_left.wait())


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a4_8_the_end_of_the_supervisor_is_a_shutdown(is_cancelled: bool) -> None:
    """Mutation tried: ``aclose`` waits for draining legs too; then it takes its whole grace."""
    async with paired() as p:
        leg = p.leg()
        await within(p.engine.arrived.wait())
        if is_cancelled:
            leg.cancel(Cause.CLIENT_GONE)
        async with asyncio.timeout(PATIENCE_S):
            await p.keeper.aclose(grace_s=FOREVER_S)
        leg.cancel(Cause.CLIENT_GONE)  # a cancel that comes later
        assert leg.is_ended


@pytest.mark.parametrize("kind", [LegKind.AGGREGATED, LegKind.PREFILL])
@pytest.mark.parametrize("has_arrived", [False, True])
async def test_a4_9_other_legs_are_closed_at_once(kind: LegKind, has_arrived: bool) -> None:
    """Mutation tried: the policy of vLLM does not look at the leg's part; then these drain too."""
    async with paired() as p:
        leg = p.leg(kind)
        if has_arrived:
            await within(p.engine.arrived.wait())
        leg.cancel(Cause.CLIENT_GONE)
        assert leg.is_ended
        if has_arrived:
            await within(p.engine.has_left.wait())
        else:
            await until(lambda: p.client.connecting == 0, "the connection attempt given up")
            assert not p.engine.arrived.is_set()


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["finish", "cancel"])
async def test_a4_10_load_is_given_back_as_after_a_finish(is_cancelled: bool) -> None:
    """Mutation tried: a detached leg reports no first token; its prefill tokens stay booked until the end."""
    seen: list[tuple[int, int, int]] = []
    async with paired() as p:
        leg = p.leg()
        if is_cancelled:
            leg.cancel(Cause.CLIENT_GONE)
        seen.append(p.booked)
        await p.engine.send(HEAD, ROLE)
        await asyncio.sleep(2 * STEP_S)
        seen.append(p.booked)  # while it drains, the engine is still at work
        await p.engine.send(TOKEN)
        if not is_cancelled:
            await leg.call.head()
            cutter = EventCutter(1 << 20)
            while not leg.has_output:
                leg.saw(cutter.feed(await leg.call.read()))
            assert p.booked == (1, 4, 0)
            leg.end()
        await ended(leg)
        assert leg.has_output
        seen.append(p.booked)
        assert p.ended == [leg]
    assert seen == [(1, 4, PROMPT_TOKENS), (1, 4, PROMPT_TOKENS), (0, 0, 0)]

"""An engine that stands still for a while: nobody is refused, and nothing touches it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from jaxinfer.errors import EngineFailure, Unavailable
from jaxinfer.scheduling.request import FinishReason
from tests.fakes import greedy_continuation
from tests.test_async_engine import PROMPT, request, run, running, tokens_of, until


def test_what_lives_ends_before_the_engine_stands_still_and_what_comes_waits():
    async def scenario() -> None:
        async with running(lambda _: time.sleep(0.001)) as engine:
            first = engine.submit(request("first", max_tokens=50))
            await first.accepted()
            core = await engine.hold(5)
            assert core.is_still
            assert await tokens_of(first) == greedy_continuation(PROMPT, 50)
            steps: list[object] = []
            waits = engine.submit(request("waits"))
            asked = asyncio.create_task(engine.change(lambda c: steps.append(c)))
            assert await waits.read(0.02) == ()
            assert engine.seconds_in_turn == 0.0
            assert core.is_still
            assert not steps
            engine.release()
            assert await tokens_of(waits) == greedy_continuation(PROMPT, 5)
            await asked
            assert steps == [core]

    run(scenario)


def test_a_hold_that_takes_too_long_is_given_up_and_all_goes_on():
    async def scenario() -> None:
        async with running(lambda _: time.sleep(0.002)) as engine:
            long = engine.submit(request("long", max_tokens=200))
            await long.accepted()
            with pytest.raises(Unavailable, match=r"not ended within 0.05 s"):
                await engine.hold(0.05)
            short = engine.submit(request("short"))
            assert await tokens_of(short) == greedy_continuation(PROMPT, 5)
            assert await tokens_of(long) == greedy_continuation(PROMPT, 200)
            await engine.hold(5)
            engine.release()
            engine.release()

    run(scenario)


def test_what_waited_for_a_hold_that_was_given_up_does_not_wait_for_more(monkeypatch):
    monkeypatch.setattr("jaxinfer.async_engine.IDLE_TURN_S", 60.0)

    async def scenario() -> None:
        async with running() as engine:
            engine._max_unread_tokens = 2
            unread = engine.submit(request("unread", max_tokens=50))
            await until(lambda: engine.pool_stats.num_running == 0)  # paused
            held = asyncio.create_task(engine.hold(0.05))
            await asyncio.sleep(0)
            short = engine.submit(request("short", max_tokens=2))
            with pytest.raises(Unavailable):
                await held
            assert await asyncio.wait_for(tokens_of(short), 10) == greedy_continuation(PROMPT, 2)
            unread.close()

    run(scenario)


def test_a_deadline_runs_on_while_the_engine_is_held():
    async def scenario() -> None:
        async with running() as engine:
            await engine.hold(5)
            late = engine.submit(request(deadline_s=time.monotonic() + 0.01))
            await asyncio.sleep(0.02)
            engine.release()
            ends = [output.finish_reason async for output in late]
            assert ends == [FinishReason.TIMEOUT]

    run(scenario)


def test_who_leaves_while_the_engine_is_held_never_runs():
    async def scenario() -> None:
        async with running(lambda _: time.sleep(0.001)) as engine:
            first = engine.submit(request("first", max_tokens=50))
            await first.accepted()
            held = asyncio.create_task(engine.hold(5))
            await asyncio.sleep(0)
            gone = engine.submit(request("gone", max_tokens=100))
            await asyncio.sleep(0.005)
            gone.close()
            ended = engine.submit(request("ended", max_tokens=100))
            core = await held
            engine.end("ended")
            assert core.is_still
            engine.release()
            assert [o.finish_reason async for o in ended] == [FinishReason.ABORT]
            await until(lambda: engine.num_open == 0)

    run(scenario)


def test_an_engine_can_be_closed_while_it_is_held():
    async def scenario() -> None:
        async with running() as engine:
            await engine.hold(5)
            waits = engine.submit(request())
            await engine.close()
            assert not engine._thread.is_alive()
            with pytest.raises(Unavailable):
                await tokens_of(waits)

    run(scenario)


def test_a_hold_of_an_engine_that_dies_is_told():
    async def scenario() -> None:
        is_asked = threading.Event()

        def die(_: object) -> None:
            assert is_asked.wait(5)
            raise SystemExit("the device is gone")

        async with running(die) as engine:
            stream = engine.submit(request())
            held = asyncio.create_task(engine.hold(5))
            await asyncio.sleep(0)
            is_asked.set()
            with pytest.raises(EngineFailure, match="stopped"):
                await held
            with pytest.raises(EngineFailure):
                await tokens_of(stream)

    run(scenario)


@pytest.mark.parametrize("is_closed", [True, False])
def test_who_asked_for_a_change_is_told_when_the_engine_ends(is_closed: bool):
    async def scenario() -> None:
        async with running() as engine:
            await engine.hold(5)
            asked = asyncio.create_task(engine.change(lambda core: core.version))
            await asyncio.sleep(0)
            if is_closed:
                await engine.close()
            else:
                engine._fail_all(SystemExit("the device is gone"))
            with pytest.raises((EngineFailure, Unavailable)):
                await asyncio.wait_for(asked, 10)
            engine.release()

    run(scenario)

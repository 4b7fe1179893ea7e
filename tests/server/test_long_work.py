"""Work on threads that nobody may wait for."""

from __future__ import annotations

import asyncio
import threading

import pytest

from jaxinfer.server.long_work import LongWork


def test_work_gives_its_result_or_its_error():
    async def scenario() -> None:
        work = LongWork()
        assert await work.run("add", lambda: 1 + 1) == 2
        assert not work.is_busy
        with pytest.raises(ValueError, match="invalid literal"):
            await work.run("read", lambda: int("x"))

        def end() -> None:
            raise SystemExit(3)

        with pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):
            await work.run("end", end)

    asyncio.run(scenario())


def test_what_comes_when_nobody_waits_any_more_is_unwanted():
    async def scenario() -> None:
        work, gate, left = LongWork(), threading.Event(), list[int]()

        def slow() -> int:
            assert gate.wait(5)
            return 7

        task = asyncio.create_task(work.run("slow", slow, unwanted=left.append))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert work.is_busy
        gate.set()
        while not left:
            await asyncio.sleep(0.001)
        assert left == [7]

    asyncio.run(scenario())


def test_a_result_that_comes_together_with_the_end_of_waiting_is_unwanted_too():
    async def scenario() -> None:
        work, left, has_come = LongWork(), list[int](), threading.Event()

        def quick() -> int:
            has_come.set()
            return 7

        task = asyncio.create_task(work.run("quick", quick, unwanted=left.append))
        await asyncio.sleep(0)
        assert has_come.wait(5)
        while work.is_busy:  # the loop stands still, so the result waits to be delivered
            pass
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while not left:
            await asyncio.sleep(0.001)
        assert left == [7]

    asyncio.run(scenario())


def test_a_thread_that_outlives_the_loop_hurts_nobody():
    work, gate = LongWork(), threading.Event()

    async def scenario() -> None:
        task = asyncio.create_task(work.run("slow", lambda: gate.wait(5)))
        await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(scenario())
    assert work.is_busy
    gate.set()

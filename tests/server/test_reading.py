"""What a call reads of its choices when one of them ends badly."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from jaxinfer.errors import DeadlineExceeded, EngineFailure, Overloaded
from jaxinfer.outputs import RequestOutput
from jaxinfer.scheduling.request import FinishReason
from jaxinfer.server.reading import Reading


class Scripted:
    """A stream whose reads are given."""

    def __init__(self, *reads: tuple[RequestOutput, ...] | None):
        self._reads = iter(reads)

    async def read(self, timeout_s: float | None = None) -> tuple[RequestOutput, ...] | None:
        return next(self._reads)


def output(prompt: int, reason: FinishReason | None = None, **fields: Any) -> RequestOutput:
    return RequestOutput(f"cmpl-1-{prompt}", 1, "x", (5,), (), reason, **fields)


def reading(*reads: tuple[RequestOutput, ...] | None) -> Reading:
    return Reading(cast(Any, Scripted(*reads)), cast(Any, None), 2)


def test_choices_are_numbered_through_all_prompts_until_the_end():
    async def go() -> None:
        calls = reading((output(0), output(2)), (), None)
        assert [i for i, _ in await calls.next(None) or ()] == [1, 5]
        assert await calls.next(1.0) == []
        assert await calls.next(None) is None

    asyncio.run(go())


def test_what_came_before_a_failure_is_read_before_it_is_raised():
    error = EngineFailure("no")
    failed = output(1, FinishReason.ERROR, error=error)

    async def go() -> None:
        calls = reading((output(0, FinishReason.STOP), failed, output(2)), None)
        assert await calls.next(None) == [(1, output(0, FinishReason.STOP))]
        for _ in range(2):
            with pytest.raises(EngineFailure) as caught:
                await calls.next(None)
            assert caught.value is error

    asyncio.run(go())


def test_a_failure_with_nothing_before_it_is_raised_at_once():
    async def go() -> None:
        with pytest.raises(DeadlineExceeded):
            await reading((output(0, FinishReason.TIMEOUT), output(1))).next(None)

    asyncio.run(go())


def test_what_waited_for_its_turn_in_vain_is_told_apart_from_a_full_house():
    error = Overloaded("it waited", retry_after_s=7.0, code="queue_timeout")

    async def go() -> None:
        with pytest.raises(Overloaded) as caught:
            await reading((output(0, FinishReason.TIMEOUT, error=error),)).next(None)
        assert (caught.value.code, caught.value.retry_after_s) == ("queue_timeout", 7.0)

    asyncio.run(go())


def test_tokens_are_counted_as_they_are_read():
    counts: list[int] = []
    stream = Scripted((output(0), output(2)), (), (output(0),))

    async def go() -> None:
        calls = Reading(cast(Any, stream), cast(Any, None), 2, on_tokens=counts.append)
        for _ in range(3):
            await calls.next(None)
        assert counts == [2, 0, 1]

    asyncio.run(go())

"""Reading what several requests gain, at any speed."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Sequence

import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.errors import EngineFailure, InvalidRequest
from jaxinfer.outputs import RequestOutput, TokenLogprob
from jaxinfer.request_stream import RequestStream
from jaxinfer.scheduling.request import FinishReason, Request


class Seen:
    """An observer and the two callbacks of a stream."""

    def __init__(self) -> None:
        self.closed: list[tuple[str, ...]] = []
        self.lost: list[tuple[str, ...]] = []
        self.first: list[float] = []
        self.gaps: list[tuple[float, int]] = []

    def on_step(self, step, pool) -> None: ...

    def on_finish(self, stats, reason) -> None: ...

    def on_retry(self, num_sequences: int) -> None: ...

    def on_rebuild(self, duration_s: float) -> None: ...

    def on_first_token(self, ttft_s: float, version: str) -> None:
        self.first.append(ttft_s)

    def on_gap(self, gap_s: float, num_tokens: int, version: str) -> None:
        self.gaps.append((gap_s, num_tokens))

    def stream(self, *requests: Request) -> RequestStream:
        return RequestStream(
            requests or (request("r"),),
            on_close=lambda ids: self.closed.append(tuple(ids)),
            on_loss=lambda ids: self.lost.append(tuple(ids)),
            observer=self,
        )


def request(request_id: str, n: int = 1, arrival_s: float = 0.0) -> Request:
    return Request(request_id, (1,), SamplingParams(n=n), arrival_s=arrival_s)


def output(
    text: str,
    request_id: str = "r",
    index: int = 0,
    finish: FinishReason | None = None,
    tokens: Sequence[int] | None = None,
) -> RequestOutput:
    ids = tuple(map(ord, text)) if tokens is None else tuple(tokens)
    logprobs = tuple(TokenLogprob(i, -1.0) for i in ids)
    return RequestOutput(request_id, index, text, ids, logprobs, finish)


def test_unread_outputs_of_a_choice_are_merged_into_one():
    async def check() -> None:
        stream = Seen().stream(request("r", n=2))
        for text in ("a", "b", "c"):
            stream.push(output(text), 0.0)
        stream.push(output("x", index=1), 0.0)
        first, other = await stream.read() or pytest.fail("ended")
        assert (first.text, first.token_ids) == ("abc", (97, 98, 99))
        assert [p.token_id for p in first.logprobs] == [97, 98, 99]
        assert (other.index, other.text) == (1, "x")

    asyncio.run(check())


def test_five_thousand_unread_tokens_wait_as_one_output():
    stream = Seen().stream()
    for _ in range(5000):
        stream.push(output("x"), 0.0)
    assert len(stream._unread) == 1
    (merged,) = asyncio.run(stream.read()) or pytest.fail("ended")
    assert merged.text == "x" * 5000


def test_a_merged_output_keeps_the_end_of_the_last_one():
    async def check() -> None:
        stream = Seen().stream()
        stream.push(output("a"), 0.0)
        ended = stream.push(output("", finish=FinishReason.STOP, tokens=[7]), 0.0)
        assert ended
        (merged,) = await stream.read() or pytest.fail("ended")
        assert (merged.text, merged.finish_reason) == ("a", FinishReason.STOP)
        assert merged.token_ids == (97, 7)
        assert await stream.read() is None

    asyncio.run(check())


def test_silence_reads_as_an_empty_tuple_after_the_timeout():
    async def check() -> None:
        stream = Seen().stream()
        assert await stream.read(timeout_s=0.01) == ()
        stream.push(output("a"), 0.0)
        assert len(await stream.read(timeout_s=0.01) or ()) == 1

    asyncio.run(check())


def test_a_waiting_reader_is_woken_by_an_output():
    async def check() -> None:
        stream = Seen().stream()
        reader = asyncio.ensure_future(stream.read())
        await asyncio.sleep(0)
        stream.push(output("late"), 0.0)
        assert [o.text for o in await reader or ()] == ["late"]

    asyncio.run(check())


def test_the_end_comes_after_the_last_choice_of_the_last_request():
    async def check() -> None:
        stream = Seen().stream(request("p"), request("q", n=2))
        assert stream.push(output("1", "p", 0, FinishReason.STOP), 0.0)
        assert not stream.push(output("2", "q", 1, FinishReason.STOP), 0.0)
        assert len(await stream.read() or ()) == 2
        assert await stream.read(0.001) == ()
        assert stream.push(output("3", "q", 0, FinishReason.LENGTH), 0.0)
        assert [o.text for o in await stream.read() or ()] == ["3"]
        assert await stream.read() is None

    asyncio.run(check())


def test_an_error_comes_after_what_was_gained_before_it():
    async def check() -> None:
        stream = Seen().stream()
        stream.push(output("a"), 0.0)
        stream.fail(EngineFailure("broken"))
        assert [o.text for o in await stream.read() or ()] == ["a"]
        with pytest.raises(EngineFailure, match="broken"):
            await stream.read()

    asyncio.run(check())


def test_the_first_error_stays():
    async def check() -> None:
        stream = Seen().stream()
        stream.fail(EngineFailure("first"))
        stream.fail(EngineFailure("second"))
        with pytest.raises(EngineFailure, match="first"):
            await stream.read()

    asyncio.run(check())


def test_accepted_waits_for_every_request():
    async def check() -> None:
        stream = Seen().stream(request("p"), request("q"))
        waiting = asyncio.ensure_future(stream.accepted())
        stream.accept("p")
        await asyncio.sleep(0.001)
        assert not waiting.done()
        stream.accept("q")
        await asyncio.wait_for(waiting, 1)

    asyncio.run(check())


def test_accepted_raises_what_one_request_was_refused_with():
    async def check() -> None:
        stream = Seen().stream(request("p"), request("q"))
        stream.accept("p")
        stream.fail(InvalidRequest("no", param="prompt"))
        with pytest.raises(InvalidRequest, match="no"):
            await stream.accepted()

    asyncio.run(check())


def test_closing_aborts_what_has_not_ended_and_wakes_the_reader():
    async def check() -> None:
        seen = Seen()
        stream = seen.stream(request("p"), request("q"))
        stream.push(output("1", "p", 0, FinishReason.STOP), 0.0)
        await stream.read()
        reader = asyncio.ensure_future(stream.read())
        await asyncio.sleep(0)
        stream.close()
        assert await reader is None
        stream.close()
        assert seen.closed == [("q",)]

    asyncio.run(check())


def test_closing_after_the_end_aborts_nothing():
    seen = Seen()
    stream = seen.stream()
    stream.push(output("a", finish=FinishReason.STOP), 0.0)
    stream.close()
    assert seen.closed == []


def test_iterating_to_the_end_yields_every_output_and_aborts_nothing():
    async def check() -> None:
        seen = Seen()
        stream = seen.stream()
        stream.push(output("a"), 0.0)
        stream.push(output("b", finish=FinishReason.LENGTH), 0.0)
        assert "".join([o.text async for o in stream]) == "ab"
        assert seen.closed == []

    asyncio.run(check())


def test_breaking_out_of_an_iteration_aborts():
    async def check() -> None:
        seen = Seen()
        stream = seen.stream()
        stream.push(output("a"), 0.0)
        outputs = stream.__aiter__()
        assert isinstance(outputs, AsyncGenerator)
        async for _ in outputs:
            break
        await outputs.aclose()
        assert seen.closed == [("r",)]

    asyncio.run(check())


def test_a_stream_that_nobody_holds_any_more_is_reported_as_lost():
    seen = Seen()
    stream = seen.stream()
    del stream
    gc.collect()
    assert seen.lost == [("r",)]


def test_a_finished_stream_is_not_lost():
    seen = Seen()
    stream = seen.stream()
    stream.push(output("a", finish=FinishReason.STOP), 0.0)
    del stream
    gc.collect()
    assert seen.lost == []


def test_first_token_and_gaps_are_measured_per_choice():
    seen = Seen()
    stream = seen.stream(request("r", n=2, arrival_s=10.0))
    stream.push(output("", tokens=[]), 10.5)
    stream.push(output("a"), 11.0)
    stream.push(output("x", index=1), 11.5)
    stream.push(output("bc"), 13.0)
    stream.push(output("y", index=1), 12.5)
    assert seen.first == [1.0]
    assert seen.gaps == [(2.0, 2), (1.0, 1)]


def test_acceptance_alone_is_nothing_to_read():
    async def check() -> None:
        stream = Seen().stream()
        reader = asyncio.ensure_future(stream.read())
        await asyncio.sleep(0)
        stream.accept("r")
        await asyncio.sleep(0.001)
        assert not reader.done()
        stream.push(output("a"), 0.0)
        assert [o.text for o in await reader or ()] == ["a"]

    asyncio.run(check())


def test_a_full_stream_says_so_once_and_again_when_it_has_been_read():
    async def check() -> None:
        said: list[tuple[str, tuple[str, ...]]] = []
        stream = RequestStream(
            (request("p", n=2), request("q")),
            on_close=lambda ids: None,
            on_loss=lambda ids: None,
            on_full=lambda ids: said.append(("full", tuple(ids))),
            on_empty=lambda ids: said.append(("empty", tuple(ids))),
            max_unread_tokens=2,
        )
        stream.push(output("abc", "p"), 0.0)
        stream.push(output("abc", "p", 1), 0.0)
        await stream.read()
        assert said == []
        stream.push(output("abcd", "p"), 0.0)
        stream.push(output("!", "q", finish=FinishReason.STOP), 0.0)
        stream.push(output("abc", "p"), 0.0)
        stream.push(output("more", "p"), 0.0)
        assert said == [("full", ("p",))]
        await stream.read()
        assert said == [("full", ("p",)), ("empty", ("p",))]

    asyncio.run(check())

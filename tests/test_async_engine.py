"""The engine thread: what goes in, what comes out, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import pytest

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.batch_window import BatchWindow
from jaxinfer.config import SamplingParams
from jaxinfer.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    PoolLost,
    Unavailable,
)
from jaxinfer.request_stream import RequestStream
from jaxinfer.scheduling.request import FinishReason, Request
from tests.fakes import FakeRunner, FakeTokenizer, greedy_continuation, make_engine

PROMPT = (5, 7)


class Facts:
    """An observer that keeps everything."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.ends: list[FinishReason] = []
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.retries: list[int] = []
        self.rebuilds: list[float] = []

    def on_step(self, step, pool) -> None:
        self.steps.append((step, pool))

    def on_finish(self, stats, reason) -> None:
        self.ends.append(reason)

    def on_retry(self, num_sequences: int) -> None:
        self.retries.append(num_sequences)

    def on_rebuild(self, duration_s: float) -> None:
        self.rebuilds.append(duration_s)

    def on_first_token(self, ttft_s: float, version: str) -> None:
        self.first.append(ttft_s)

    def on_gap(self, gap_s: float, num_tokens: int, version: str) -> None:
        self.gaps.append(gap_s)


def request(request_id: str = "r", *, prompt: tuple[int, ...] = PROMPT, **fields: Any) -> Request:
    sampling: dict[str, Any] = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, **fields}
    deadline_s = sampling.pop("deadline_s", None)
    return Request(
        request_id,
        prompt,
        SamplingParams(**sampling),
        arrival_s=time.monotonic(),
        deadline_s=deadline_s,
    )


def waiting_for(gate: threading.Event) -> Callable[[Any], None]:
    """A step that hangs until the gate opens."""

    def wait(_: Any) -> None:
        gate.wait(5)

    return wait


@contextlib.asynccontextmanager
async def running(
    on_step: Callable[[Any], None] | None = None,
    facts: Facts | None = None,
    window: BatchWindow | None = None,
    **runner: Any,
) -> AsyncGenerator[AsyncEngine]:
    core = make_engine(
        FakeRunner(on_step=on_step, **runner), tokenizer=FakeTokenizer(), clock=time.monotonic
    )
    engine = AsyncEngine(core, observer=facts, window=window)
    engine.start()
    try:
        yield engine
        assert engine.pool_stats.pages_used == 0 or not engine.is_alive
    finally:
        await engine.close()


async def tokens_of(stream: RequestStream) -> list[int]:
    return [token async for output in stream for token in output.token_ids]


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.002)


def is_idle(engine: AsyncEngine) -> bool:
    pool = engine.pool_stats
    return not (engine.num_open or pool.num_running or pool.num_waiting or pool.pages_used)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), 20)

    asyncio.run(bounded())


def test_a_request_yields_the_tokens_of_the_engine():
    async def scenario() -> None:
        async with running() as engine:
            assert await tokens_of(engine.submit(request())) == greedy_continuation(PROMPT, 5)

    run(scenario)


def test_many_requests_at_once_each_get_their_own_tokens():
    async def scenario() -> None:
        async with running() as engine:
            prompts = [(i, i + 1, i + 2) for i in range(40)]
            streams = [
                engine.submit(request(f"r{i}", prompt=p, max_tokens=3 + i % 7))
                for i, p in enumerate(prompts)
            ]
            found = await asyncio.gather(*map(tokens_of, streams))
            wanted = [greedy_continuation(p, 3 + i % 7) for i, p in enumerate(prompts)]
            assert list(found) == wanted

    run(scenario)


def test_requests_submitted_together_come_over_one_stream():
    async def scenario() -> None:
        async with running() as engine:
            stream = engine.submit(request("a", n=2), request("b", prompt=(9,)))
            await stream.accepted()
            found: dict[tuple[str, int], list[int]] = {}
            async for output in stream:
                found.setdefault((output.request_id, output.index), []).extend(output.token_ids)
            assert sorted(found) == [("a", 0), ("a", 1), ("b", 0)]
            assert found["b", 0] == greedy_continuation((9,), 5)

    run(scenario)


def test_a_refused_request_raises_from_accepted_and_from_read():
    async def scenario() -> None:
        async with running() as engine:
            with pytest.raises(ContextLengthExceeded):
                await engine.submit(request("long", prompt=(1,) * 300)).accepted()
            with pytest.raises(InvalidRequest, match="prompt"):
                await engine.submit(request("empty", prompt=())).read()
            assert await tokens_of(engine.submit(request())) == greedy_continuation(PROMPT, 5)

    run(scenario)


def test_when_one_of_several_is_refused_the_others_are_aborted():
    async def scenario() -> None:
        facts = Facts()
        async with running(facts=facts) as engine:
            stream = engine.submit(request("good", max_tokens=200), request("bad", prompt=()))
            with pytest.raises(InvalidRequest):
                await stream.accepted()
            await until(lambda: is_idle(engine) and len(facts.ends) == 1)
            assert facts.ends == [FinishReason.ABORT]

    run(scenario)


def test_a_request_that_breaks_the_engines_submission_does_not_end_the_thread():
    async def scenario() -> None:
        async with running() as engine:
            odd = Request("odd", PROMPT, SamplingParams(), arrival_s="yesterday")  # type: ignore[arg-type]
            with pytest.raises(EngineFailure, match="submission failed"):
                await engine.submit(odd).accepted()
            assert engine.is_alive

    run(scenario)


def test_a_request_id_can_be_used_again_only_after_its_end():
    async def scenario() -> None:
        async with running() as engine:
            stream = engine.submit(request("same"))
            with pytest.raises(ValueError, match="in use"):
                engine.submit(request("same"))
            await tokens_of(stream)
            assert await tokens_of(engine.submit(request("same")))

    run(scenario)


def test_what_arrives_within_the_window_shares_one_prefill_step():
    async def scenario() -> None:
        batches: list[Any] = []
        window = BatchWindow(0.2, max_tokens=64, max_seqs=8)
        async with running(batches.append, window=window) as engine:
            streams = []
            for i in range(3):
                streams.append(engine.submit(request(f"r{i}", prompt=(i, 9), max_tokens=2)))
                await streams[-1].accepted()
                await asyncio.sleep(0.01)
            for stream in streams:
                assert len(await tokens_of(stream)) == 2
            assert [batch.num_seqs for batch in batches] == [3, 3]

    run(scenario)


def test_a_full_step_does_not_wait_for_the_window_to_end():
    async def scenario() -> None:
        window = BatchWindow(1000.0, max_tokens=64, max_seqs=3)
        async with running(window=window) as engine:
            streams = [engine.submit(request(f"r{i}", prompt=(i,))) for i in range(3)]
            await asyncio.gather(*map(tokens_of, streams))

    run(scenario)


def test_an_abort_within_the_window_is_done_at_once_and_leaves_the_engine_idle():
    async def scenario() -> None:
        facts, window = Facts(), BatchWindow(1000.0, max_tokens=64, max_seqs=8)
        async with running(facts=facts, window=window) as engine:
            stream = engine.submit(request())
            await stream.accepted()
            stream.close()
            await until(lambda: is_idle(engine) and facts.ends == [FinishReason.ABORT])
            assert not facts.steps

    run(scenario)


def test_a_running_engine_does_not_wait_for_the_window():
    async def scenario() -> None:
        window = BatchWindow(0.02, max_tokens=64, max_seqs=8)
        async with running(lambda batch: time.sleep(0.002), window=window) as engine:
            first = engine.submit(request("first", max_tokens=200))
            await first.read()
            window._wait_s = 1000.0  # whoever waited now would never end
            assert await tokens_of(engine.submit(request("second", prompt=(9,))))
            first.close()
            await until(lambda: is_idle(engine))

    run(scenario)


def test_closing_a_stream_frees_its_pages_within_a_step():
    async def scenario() -> None:
        facts = Facts()
        async with running(lambda batch: time.sleep(0.005), facts) as engine:
            stream = engine.submit(request(max_tokens=200))
            await stream.read()
            assert engine.pool_stats.pages_used > 0
            num_steps = len(facts.steps)
            stream.close()
            await until(lambda: is_idle(engine))
            assert len(facts.steps) <= num_steps + 2
            assert facts.ends == [FinishReason.ABORT]

    run(scenario)


def test_abort_by_id_ends_the_stream():
    async def scenario() -> None:
        async with running(lambda batch: time.sleep(0.002)) as engine:
            stream = engine.submit(request("r", max_tokens=200))
            await stream.read()
            engine.abort("unknown")
            engine.abort("r")
            assert await stream.read() is None
            await until(lambda: is_idle(engine))

    run(scenario)


def test_a_request_aborted_while_it_waits_never_runs():
    async def scenario() -> None:
        gate = threading.Event()
        async with running(waiting_for(gate)) as engine:
            running_one = engine.submit(request("first", max_tokens=2))
            await running_one.accepted()
            waiting = engine.submit(request("second", prompt=(50,), max_tokens=200))
            waiting.close()
            gate.set()
            assert len(await tokens_of(running_one)) == 2
            await until(lambda: is_idle(engine))

    run(scenario)


def test_a_forgotten_stream_aborts_its_request():
    async def scenario() -> None:
        facts = Facts()
        async with running(lambda batch: time.sleep(0.002), facts) as engine:
            stream = engine.submit(request(max_tokens=200))
            await stream.read()
            del stream
            gc.collect()
            await until(lambda: is_idle(engine))
            assert facts.ends == [FinishReason.ABORT]

    run(scenario)


def test_a_hundred_normal_requests_abort_nothing():
    async def scenario() -> None:
        facts = Facts()
        async with running(facts=facts) as engine:
            for i in range(100):
                await tokens_of(engine.submit(request(f"r{i}", max_tokens=2)))
            assert facts.ends == [FinishReason.LENGTH] * 100

    run(scenario)


def test_a_passed_deadline_ends_a_choice_with_its_error():
    async def scenario() -> None:
        async with running(lambda batch: time.sleep(0.01)) as engine:
            late = time.monotonic() + 0.05
            stream = engine.submit(request(max_tokens=200, deadline_s=late))
            outputs = [output async for output in stream]
            assert outputs[-1].finish_reason is FinishReason.TIMEOUT
            assert isinstance(outputs[-1].error, DeadlineExceeded)

    run(scenario)


def test_steps_that_fail_too_often_end_their_request_and_the_engine_goes_on():
    async def scenario() -> None:
        facts = Facts()
        async with running(facts=facts, fail_at=frozenset({1, 2, 3})) as engine:
            outputs = [output async for output in engine.submit(request("r1"))]
            assert outputs[-1].finish_reason is FinishReason.ERROR
            assert isinstance(outputs[-1].error, EngineFailure)
            assert facts.retries == [1, 1, 0]
            assert await tokens_of(engine.submit(request("r2"))) == greedy_continuation(PROMPT, 5)

    run(scenario)


def test_a_stream_over_a_failed_step_goes_on_unbroken():
    async def scenario() -> None:
        facts = Facts()
        async with running(
            facts=facts, fail_at=frozenset({1}), fail_collect_at=frozenset({4})
        ) as engine:
            assert await tokens_of(engine.submit(request())) == greedy_continuation(PROMPT, 5)
            assert (facts.retries, facts.rebuilds) == ([1, 1], [])

    run(scenario)


def test_a_lost_pool_is_made_anew_and_streams_go_on():
    lost = [PoolLost("gone"), None, None, PoolLost("gone again")]

    def lose(batch: Any) -> None:
        if lost and (error := lost.pop()) is not None:
            raise error

    async def scenario() -> None:
        facts = Facts()
        async with running(lose, facts) as engine:
            streams = [engine.submit(request(f"r{i}", prompt=(i, 7))) for i in range(3)]
            found = await asyncio.gather(*map(tokens_of, streams))
            assert list(found) == [greedy_continuation((i, 7), 5) for i in range(3)]
            assert len(facts.rebuilds) == 2
            assert engine.is_alive

    run(scenario)


def test_a_fault_outside_of_a_step_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch):
    """Neither one of the engine nor one of the observer."""

    async def scenario() -> None:
        facts = Facts()
        async with running(lambda batch: time.sleep(0.001), facts) as engine:
            core = engine._engine
            stats, left = core.pool_stats, [None, None, ValueError("of ours"), None]

            def stumbling() -> Any:
                if left and (error := left.pop()) is not None:
                    raise error
                return stats()

            def refuse(*_: Any) -> None:
                raise ValueError("of the observer")

            monkeypatch.setattr(core, "pool_stats", stumbling)
            monkeypatch.setattr(facts, "on_step", refuse)
            monkeypatch.setattr(facts, "on_finish", refuse)
            found = await tokens_of(engine.submit(request(max_tokens=20)))
            assert found == greedy_continuation(PROMPT, 20)
            assert len(facts.rebuilds) == 1
            assert engine.is_alive

    run(scenario)


def test_each_step_is_judged_on_the_event_loop():
    async def scenario() -> None:
        verdicts: list[tuple[bool, bool]] = []
        here = threading.get_ident()
        core = make_engine(FakeRunner(fail_at=frozenset({2})), clock=time.monotonic)
        engine = AsyncEngine(
            core,
            on_verdict=lambda verdict: verdicts.append(
                (verdict.is_good, threading.get_ident() == here)
            ),
        )
        engine.start()
        try:
            await tokens_of(engine.submit(request(max_tokens=3)))
            await until(lambda: len(verdicts) == 4)
            assert verdicts == [(True, True), (True, True), (False, True), (True, True)]
        finally:
            await engine.close()

    run(scenario)


def test_when_the_thread_dies_streams_fail_and_later_submits_are_unavailable():
    class Dying(BaseException):
        pass

    def die(batch: Any) -> None:
        raise Dying("the device is gone")

    async def scenario() -> None:
        async with running(die) as engine:
            stream = engine.submit(request())
            with pytest.raises(EngineFailure, match="the device is gone"):
                await tokens_of(stream)
            await until(lambda: not engine.is_alive)
            with pytest.raises(Unavailable):
                engine.submit(request("next"))

    run(scenario)


def test_an_idle_engine_is_in_no_turn_and_one_whose_step_hangs_is_in_a_long_one():
    async def scenario() -> None:
        gate = threading.Event()
        async with running(waiting_for(gate)) as engine:
            await asyncio.sleep(0.1)
            assert engine.seconds_in_turn < 0.1
            stream = engine.submit(request(max_tokens=1))
            await until(lambda: engine.seconds_in_turn > 0.2)
            gate.set()
            await tokens_of(stream)
            await until(lambda: engine.seconds_in_turn == 0.0)

    run(scenario)


def test_an_idle_engine_makes_no_steps():
    async def scenario() -> None:
        facts = Facts()
        async with running(facts=facts) as engine:
            await tokens_of(engine.submit(request(max_tokens=3)))
            num_steps = len(facts.steps)
            await asyncio.sleep(0.05)
            assert len(facts.steps) == num_steps == 3

    run(scenario)


def test_draining_lets_open_requests_end_and_refuses_new_ones():
    async def scenario() -> None:
        async with running(lambda batch: time.sleep(0.002)) as engine:
            reader = asyncio.ensure_future(tokens_of(engine.submit(request(max_tokens=50))))
            await asyncio.sleep(0.01)
            draining = asyncio.ensure_future(engine.drain(5.0))
            await asyncio.sleep(0)
            with pytest.raises(Unavailable):
                engine.submit(request("late"))
            assert await draining is True
            assert len(await reader) == 50

    run(scenario)


def test_draining_aborts_what_is_left_after_the_timeout():
    async def scenario() -> None:
        async with running(lambda batch: time.sleep(0.01)) as engine:
            reader = asyncio.ensure_future(tokens_of(engine.submit(request(max_tokens=200))))
            await asyncio.sleep(0.02)
            assert await engine.drain(0.05) is False
            with pytest.raises(Unavailable):
                await reader
            await until(lambda: is_idle(engine))

    run(scenario)


def test_draining_an_idle_engine_returns_at_once():
    async def scenario() -> None:
        async with running() as engine:
            assert await asyncio.wait_for(engine.drain(60.0), 1) is True

    run(scenario)


def test_closing_ends_the_thread_and_what_still_reads():
    async def scenario() -> None:
        async with running(lambda batch: time.sleep(0.005)) as engine:
            reader = asyncio.ensure_future(tokens_of(engine.submit(request(max_tokens=200))))
            await asyncio.sleep(0.02)
            await engine.close()
            with pytest.raises(Unavailable):
                await reader
            assert not engine.is_alive

    run(scenario)


def test_the_observer_hears_of_steps_first_tokens_gaps_and_ends():
    async def scenario() -> None:
        facts = Facts()
        async with running(facts=facts) as engine:
            await tokens_of(engine.submit(request(max_tokens=4)))
            steps = [step for step, _ in facts.steps]
            assert [s.kind for s in steps] == ["prefill", "decode", "decode", "decode"]
            assert [s.num_tokens for s in steps] == [2, 1, 1, 1]
            assert facts.ends == [FinishReason.LENGTH]
            assert len(facts.first) == 1
            assert len(facts.gaps) == 3
            assert facts.first[0] >= 0

    run(scenario)


def test_a_reader_that_is_behind_is_paused_and_reads_on_what_it_would_have_read():
    async def check() -> None:
        async with running(lambda _: time.sleep(0.002)) as engine:
            stream = engine.submit(request(max_tokens=200))
            engine._max_unread_tokens = 20
            slow = engine.submit(request("slow", max_tokens=200, n=2))
            assert len(await tokens_of(stream)) == 200
            await until(lambda: engine.pool_stats.num_paused == 2)
            await until(lambda: engine.pool_stats.pages_used == 0)
            unread = sum(len(gain.output().token_ids) for gain in slow._unread.values())
            assert 40 < unread < 200  # the engine runs on until the event loop has its turn
            answers: dict[int, list[int]] = {0: [], 1: []}
            async for output in slow:
                answers[output.index] += output.token_ids
            assert answers == dict.fromkeys((0, 1), greedy_continuation(PROMPT, 200))
            assert engine.pool_stats.num_preemptions == 0

    asyncio.run(check())


def test_the_deadline_of_a_paused_request_runs_on():
    async def check() -> None:
        async with running() as engine:
            engine._max_unread_tokens = 5
            stream = engine.submit(request(max_tokens=200, deadline_s=time.monotonic() + 0.3))
            await until(lambda: engine.pool_stats.num_paused == 1)
            await until(lambda: engine.num_open == 0)
            outputs = [o async for o in stream]
            assert outputs[-1].finish_reason is FinishReason.TIMEOUT

    asyncio.run(check())


def test_a_paused_stream_that_is_closed_or_lost_leaves_nothing():
    async def check() -> None:
        async with running() as engine:
            engine._max_unread_tokens = 5
            closed, lost = (engine.submit(request(name, max_tokens=200)) for name in "ab")
            await until(lambda: engine.pool_stats.num_paused == 2)
            closed.close()
            del lost
            gc.collect()
            await until(lambda: engine.pool_stats.num_paused == 0 and is_idle(engine))

    asyncio.run(check())


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_request_that_is_ended_gives_its_reader_what_it_had(is_paused: bool):
    async def check() -> None:
        async with running(lambda _: time.sleep(0.001)) as engine:
            engine._max_unread_tokens = 20 if is_paused else 1000
            stream = engine.submit(request(max_tokens=200, n=2))
            if is_paused:
                await until(lambda: engine.pool_stats.num_paused == 2)
            else:
                await until(lambda: bool(stream._unread))
            engine.end("r")
            engine.end("nobody")
            outputs = [o async for o in stream]
            ends = [o.finish_reason for o in outputs if o.finish_reason is not None]
            assert ends == [FinishReason.ABORT] * 2
            for index in (0, 1):
                tokens = [t for o in outputs if o.index == index for t in o.token_ids]
                assert tokens == greedy_continuation(PROMPT, len(tokens))
                assert 0 < len(tokens) < 200

    asyncio.run(check())

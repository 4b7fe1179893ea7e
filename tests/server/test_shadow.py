"""Shadow comparisons of two versions on one engine: what is told, and that no user notices.

The runner counts (house.py): after "a", v1 says "b" and v2 says "c". v2 finds whatever it says, or
is made to say, one nat less likely than v1 does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import pytest

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.canary.divergence import kl_at_least
from jaxinfer.canary.facts import RequestFacts, ShadowFacts
from jaxinfer.config import SamplingParams
from jaxinfer.engine import Engine
from jaxinfer.errors import EngineFailure
from jaxinfer.guidance import Guidance
from jaxinfer.outputs import TokenLogprob
from jaxinfer.request_rules import MAX_PRIORITY
from jaxinfer.scheduling.batch import Batch, StepResult
from jaxinfer.scheduling.request import FinishReason, Request
from jaxinfer.server import shadow_run
from jaxinfer.server.answered import Answered, AnsweredChoice
from jaxinfer.server.served_model import ServedModel
from jaxinfer.server.shadow import MAX_QUEUED, Shadow
from jaxinfer.server.shadow_record import ShadowRecord
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.versions import ModelVersion
from tests.server.house import CountingRunner, letter_tokenizer, make_engine
from tests.test_async_engine import Facts

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
LONG = "to be or not to be, that is the question"


class Tape:
    """In place of a ShadowFile."""

    def __init__(self) -> None:
        self.records: list[ShadowRecord] = []
        self.is_on = True

    def write(self, record: ShadowRecord) -> None:
        self.records.append(record)


@dataclass
class World:
    """Two versions on one engine, and what was told of them."""

    core: Engine
    runner: CountingRunner
    engine: AsyncEngine
    tokenizer: Tokenizer
    stable: ServedModel
    canary: ServedModel
    observer: Facts
    facts: list[ShadowFacts] = field(default_factory=list[ShadowFacts])
    failures: list[RequestFacts] = field(default_factory=list[RequestFacts])
    requests: list[Request] = field(default_factory=list[Request])  # as the engine got them
    broken: set[str] = field(default_factory=set[str])  # versions that give NaN
    shadows: list[Shadow] = field(default_factory=list[Shadow])

    def shadow(self, *, share: float = 1.0, record: Any = None, **fields: Any) -> Shadow:
        shadow = Shadow(
            fields.pop("stable", self.stable),
            fields.pop("canary", self.canary),
            share=share,
            random=Random(0),
            on_facts=self.facts.append,
            on_failure=self.failures.append,
            record=record,
            max_busy=fields.pop("max_busy", 1.0),
            wall_clock=lambda: 1000.5,
            look_again_s=0.001,
            **fields,
        )
        self.shadows.append(shadow)
        return shadow

    def request(self, prompt: str = LONG, name: str = "user", **fields: Any) -> Request:
        sampling = replace(GREEDY, **fields.pop("sampling", {}))
        token_ids = tuple(self.tokenizer.encode(prompt))
        return Request(name, token_ids, sampling, arrival_s=self.engine.clock(), **fields)

    def answered(
        self, prompt: str = LONG, text: str = "bcde", *, by: str = "v1", **fields: Any
    ) -> Answered:
        return Answered(
            model=self.stable if by == "v1" else self.canary,
            request=self.request(prompt, **fields),
            choices=(
                AnsweredChoice(tuple(self.tokenizer.encode(text)), text, FinishReason.LENGTH),
            ),
        )


@asynccontextmanager
async def a_world(**options: Any) -> AsyncGenerator[World]:
    """Checks in the end that nothing was left behind."""
    core, runner, _, tokenizer = make_engine(**options)
    core.add_version(ModelVersion("v2", tokenizer, frozenset(tokenizer.eos_token_ids)))
    observer = Facts()
    engine = AsyncEngine(core, observer=observer)

    def served(version: str) -> ServedModel:
        return ServedModel(
            engine=engine,
            tokenizer=tokenizer,
            names=("letters",),
            root="tests/letters",
            max_model_len=256,
            version=version,
            defaults={},
            pool=ThreadPoolExecutor(1),
            guidance=Guidance(tokenizer, tokenizer.vocab_size),
        )

    models = served("v1"), served("v2")
    world = World(core, runner, engine, tokenizer, *models, observer)
    submit = core.submit

    def noted(request: Request) -> None:
        world.requests.append(request)
        submit(request)

    core.submit = noted  # type: ignore[method-assign]
    give_voices(world)
    engine.start()
    try:
        yield world
        for shadow in world.shadows:
            await shadow.close()
        await until(lambda: engine.num_open == 0 and not engine.pool_stats.pages_used)
    finally:
        runner.gate.set()
        await engine.close()
        for model in models:
            model.close()


def give_voices(world: World) -> None:
    """v2 counts by two, and is a nat less sure."""
    runner, collect = world.runner, world.runner.collect
    ones = runner._next
    twos = {token_id: ones[after] for token_id, after in ones.items()}

    def collected(batch: Batch) -> StepResult:
        runner._next = ones if batch.version == "v1" else twos
        result = collect(batch)
        if batch.version in world.broken:
            return replace(result, logprobs=np.full_like(result.logprobs, np.nan))
        if batch.version == "v1":
            return result
        assert result.top_logprobs is not None
        return replace(result, logprobs=result.logprobs - 1, top_logprobs=result.top_logprobs - 1)

    runner.collect = collected  # type: ignore[method-assign]


async def until(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def test_both_versions_read_the_same_part_of_a_users_prompt():
    async def test() -> None:
        async with a_world() as world:
            shadow = world.shadow()
            shadow.note(world.answered(cache_salt="hers"))
            await until(lambda: world.facts)
            (facts,) = world.facts
            assert facts.num_tokens == 32
            assert facts.nll_increase == pytest.approx(1.0)
            top = tuple((i, -0.5 - i) for i in range(20))
            sure = TokenLogprob(0, -0.5, top)
            unsure = TokenLogprob(0, -1.5, tuple((i, logprob - 1) for i, logprob in top))
            assert facts.kl == pytest.approx(kl_at_least(sure, unsure))
            one, other = world.requests
            assert (one.version, other.version) == ("v1", "v2")
            assert one.token_ids == other.token_ids
            prompt = tuple(world.tokenizer.encode(LONG))
            place = len(one.token_ids)
            assert prompt[:place] == one.token_ids
            assert one.cache_salt == other.cache_salt == "hers"
            assert shadow.outcomes == {"compared": 1}

    run(test)


def test_it_comes_after_every_user_and_no_metric_counts_it():
    async def test() -> None:
        async with a_world() as world:
            world.shadow(record=Tape()).note(world.answered())
            await until(lambda: len(world.requests) == 3)
            await until(lambda: world.engine.num_open == 0)
            for request in world.requests:
                assert request.priority == MAX_PRIORITY
                assert request.is_shadow
                assert request.deadline_s == request.arrival_s + shadow_run.DEADLINE_S
            assert world.observer.steps
            assert world.observer.ends == []
            assert world.observer.first == []
            assert world.observer.gaps == []
            stream = world.engine.submit(world.request())
            assert [output async for output in stream]
            assert world.observer.ends == [FinishReason.LENGTH]

    run(test)


def test_a_call_of_either_version_is_compared_and_of_no_other():
    async def test() -> None:
        async with a_world() as world:
            shadow = world.shadow()
            pinned = replace(world.stable, version="v0")
            shadow.note(replace(world.answered(), model=pinned))
            shadow.note(world.answered(by="v2"))
            await until(lambda: world.facts)
            assert [request.version for request in world.requests] == ["v1", "v2"]

    run(test)


def test_each_version_may_have_an_engine_of_its_own():
    async def test() -> None:
        async with a_world() as one, a_world() as other:
            one.shadow(canary=other.canary, record=(tape := Tape())).note(one.answered())
            await until(lambda: tape.records)
            assert one.facts[0].nll_increase == pytest.approx(1.0)
            assert [request.version for request in one.requests] == ["v1"]
            assert [request.version for request in other.requests] == ["v2", "v2"]

    run(test)


@pytest.mark.parametrize(("num_tokens", "num_compared"), [(8, None), (9, 8), (12, 11), (40, 32)])
def test_a_window_has_8_to_32_tokens_of_the_prompt(num_tokens: int, num_compared: int | None):
    async def test() -> None:
        async with a_world() as world:
            shadow = world.shadow()
            shadow.note(world.answered(LONG[:num_tokens]))
            await until(lambda: shadow.outcomes)
            assert [facts.num_tokens for facts in world.facts] == (
                [] if num_compared is None else [num_compared]
            )
            assert bool(world.requests) == bool(world.facts)
            assert ("too_short" in shadow.outcomes) == (num_compared is None)

    run(test)


def test_windows_are_at_random_places_and_end_within_the_prompt():
    async def test() -> None:
        async with a_world() as world:
            shadow = world.shadow()
            for number in range(1, 9):
                shadow.note(world.answered())
                await until(lambda n=number: len(world.facts) == n)
            places = {len(request.token_ids) for request in world.requests}
            assert min(places) >= 1
            assert max(places) <= len(LONG) - 32
            assert len(places) > 2

    run(test)


def test_a_share_of_the_calls_is_taken_and_the_oldest_is_dropped():
    async def test() -> None:
        async with a_world() as world:
            world.runner.gate.clear()
            shadow = world.shadow(share=0.25)
            for _ in range(400):
                shadow.note(world.answered())
            num_taken = shadow.outcomes["dropped"] + MAX_QUEUED
            assert 80 < num_taken < 120
            await until(lambda: len(world.requests) == MAX_QUEUED)
            world.runner.gate.set()
            await until(lambda: shadow.outcomes["compared"] == MAX_QUEUED)
            assert shadow.outcomes["dropped"] == num_taken - MAX_QUEUED
            nobody = world.shadow(share=0.0)
            nobody.note(world.answered())
            assert nobody._task is None

    run(test)


def test_nothing_begins_while_a_user_waits():
    async def test() -> None:
        async with a_world(max_num_seqs=1) as world:
            world.runner.gate.clear()
            users = world.engine.submit(*(world.request(name=f"u{i}") for i in range(2)))
            await until(lambda: world.engine.pool_stats.num_waiting)
            shadow = world.shadow()
            shadow.note(world.answered())
            await asyncio.sleep(0.02)
            assert [request.request_id for request in world.requests] == ["u0", "u1"]
            world.runner.gate.set()
            assert [output async for output in users]
            await until(lambda: world.facts)

    run(test)


def test_a_user_takes_the_only_seat_and_the_comparison_goes_on_afterwards():
    async def test() -> None:
        async with a_world(max_num_seqs=1) as world:
            world.runner.step_s = 0.01
            shadow = world.shadow()
            shadow.note(world.answered())
            await until(lambda: world.engine.pool_stats.num_running)
            outputs = [output async for output in world.engine.submit(world.request())]
            assert outputs[-1].finish_reason is FinishReason.LENGTH
            assert not world.facts
            world.runner.step_s = 0.0
            await until(lambda: world.facts)
            assert world.facts[0].num_tokens == 32
            assert world.engine.pool_stats.num_preemptions > 0

    run(test)


def test_it_rests_between_two_calls_as_long_as_there_are_users():
    async def test() -> None:
        async with a_world() as world:
            shadow = world.shadow(max_busy=1e-4)
            for _ in range(2):
                shadow.note(world.answered())
            await until(lambda: len(world.facts) == 2)  # nobody is there
            world.runner.gate.clear()
            user = world.engine.submit(world.request(sampling={"max_tokens": 200}))
            shadow.note(world.answered())
            world.runner.step_s = 0.003
            world.runner.gate.set()
            await until(lambda: len(world.facts) == 3)
            shadow.note(world.answered())
            await asyncio.sleep(0.05)
            assert world.engine.num_open == 1
            user.close()
            world.runner.step_s = 0.0
            await until(lambda: len(world.facts) == 4)

    run(test)


def test_what_the_canary_fails_is_told_and_no_user_notices():
    async def test() -> None:
        async with a_world() as world:
            world.broken = {"v2"}
            shadow = world.shadow()
            shadow.note(world.answered())
            user = world.engine.submit(world.request())
            assert "".join([output.text async for output in user]) == "opqr"
            await until(lambda: world.failures)
            assert world.facts == []
            (failure,) = world.failures
            assert failure == RequestFacts("v2", FinishReason.ERROR, 0, 0.0, None, True)
            assert shadow.outcomes == {"canary_failed": 1}

    run(test)


def test_another_failure_of_the_canary_is_judged_by_its_steps_alone():
    async def test() -> None:
        async with a_world(max_retries=0) as world:
            world.runner.failing["v2"] = EngineFailure("on purpose")
            shadow = world.shadow()
            shadow.note(world.answered())
            await until(lambda: shadow.outcomes)
            assert shadow.outcomes == {"canary_failed": 1}
            assert not world.failures

    run(test)


def test_what_the_stable_version_fails_says_nothing_of_the_canary():
    async def test() -> None:
        async with a_world(max_retries=0) as world:
            world.runner.fail_with = EngineFailure("on purpose")
            shadow = world.shadow()
            shadow.note(world.answered())
            await until(lambda: shadow.outcomes)
            assert shadow.outcomes == {"failed": 1}
            assert not world.failures
            assert [request.version for request in world.requests] == ["v1"]
            world.runner.fail_with = None
            shadow.note(world.answered())
            await until(lambda: world.facts)

    run(test)


def test_a_version_that_is_gone_is_no_failure():
    async def test() -> None:
        async with a_world() as world:
            await world.engine.change(lambda engine: engine.drop_version("v2"))
            shadow = world.shadow()
            shadow.note(world.answered())
            await until(lambda: shadow.outcomes)
            assert shadow.outcomes == {"refused": 1}
            assert not world.failures

    run(test)


def test_a_comparison_that_comes_too_late_says_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shadow_run, "DEADLINE_S", -1.0)

    async def test() -> None:
        async with a_world() as world:
            shadow = world.shadow()
            shadow.note(world.answered())
            await until(lambda: shadow.outcomes)
            assert shadow.outcomes == {"too_late": 1}
            assert not world.facts
            assert not world.failures

    run(test)


def test_closing_ends_what_is_under_way_and_nothing_is_told_any_more():
    async def test() -> None:
        async with a_world() as world:
            world.runner.step_s = 0.01
            tape = Tape()
            shadow = world.shadow(record=tape)
            for _ in range(3):
                shadow.note(world.answered())
            await until(lambda: world.engine.pool_stats.num_running == 3)
            await shadow.close()
            assert world.engine.num_open == 0
            shadow.note(world.answered())
            await asyncio.sleep(0.03)
            assert len(world.requests) == 3
            assert not world.facts
            assert not tape.records

    run(test)


def test_a_record_shows_both_outputs_and_how_far_they_are_apart():
    async def test() -> None:
        async with a_world() as world:
            tape = Tape()
            world.shadow(record=tape).note(world.answered("count on, a", "bcde"))
            await until(lambda: tape.records)
            (record,) = tape.records
            assert (record.stable, record.canary, record.answered_by) == ("v1", "v2", "v1")
            assert record.prompt == "count on, a"
            assert record.time_s == 1000.5
            assert record.sampling == {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
            assert record.stable_output.text == "bcde"
            assert record.canary_output.text == "cegi"
            assert record.canary_output.finish is FinishReason.LENGTH
            assert record.first_difference == 0
            assert record.edit_distance == 1.0
            assert record.is_same_draw
            assert record.facts == world.facts[0]

    run(test)


def test_where_the_canary_answered_the_stable_version_is_asked():
    async def test() -> None:
        async with a_world() as world:
            tape = Tape()
            asked = world.answered("a", "ceg", by="v2", sampling={"seed": 7, "max_tokens": 3})
            world.shadow(record=tape).note(asked)
            await until(lambda: tape.records)
            (record,) = tape.records
            assert record.facts is None  # the prompt is too short
            assert record.answered_by == "v2"
            assert record.stable_output.text == "bcd"
            assert record.canary_output.text == "ceg"
            assert record.edit_distance == 1.0
            (request,) = world.requests
            assert request.version == "v1"
            assert request.sampling.seed == 7
            assert request.sampling.max_tokens == 3

    run(test)


def test_draws_without_a_seed_are_marked_and_all_but_the_first_choice_left_out():
    async def test() -> None:
        async with a_world() as world:
            tape = Tape()
            shadow = world.shadow(record=tape)
            for seed in (None, 5):
                sampling = {"temperature": 0.7, "n": 3, "seed": seed}
                shadow.note(world.answered("a", sampling=sampling))
            await until(lambda: len(tape.records) == 2)
            assert [record.is_same_draw for record in tape.records] == [False, True]
            assert all(record.sampling["n"] == 3 for record in tape.records)
            assert all(request.sampling.n == 1 for request in world.requests)

    run(test)


def test_a_record_of_a_canary_that_fails_says_so():
    async def test() -> None:
        async with a_world() as world:
            world.broken = {"v2"}
            tape = Tape()
            world.shadow(record=tape).note(world.answered("a"))
            await until(lambda: tape.records)
            assert tape.records[0].canary_output.finish is FinishReason.ERROR
            assert len(world.failures) == 1

    run(test)


def test_nothing_is_recorded_in_a_file_that_was_switched_off():
    async def test() -> None:
        async with a_world() as world:
            tape = Tape()
            tape.is_on = False
            shadow = world.shadow(record=tape)
            shadow.note(world.answered())
            await until(lambda: world.facts)
            await until(lambda: shadow._task is None or shadow._task.done())
            assert len(world.requests) == 2
            assert tape.records == []

    run(test)


def test_versions_with_other_vocabularies_are_not_compared(caplog: pytest.LogCaptureFixture):
    async def test() -> None:
        async with a_world() as world:
            canary = replace(world.canary, tokenizer=letter_tokenizer(marks=("<extra>",)))
            shadow = world.shadow(canary=canary, record=Tape())
            for _ in range(2):
                shadow.note(world.answered())
                await until(lambda: shadow._task is None or shadow._task.done())
            assert world.requests == []
            assert caplog.messages == [
                "no shadow comparison: the versions have different vocabularies"
            ]

    run(test)


def test_an_engine_that_shuts_down_ends_it_quietly(caplog: pytest.LogCaptureFixture):
    async def test() -> None:
        async with a_world() as world:
            shadow = world.shadow()
            await world.engine.drain(0.0)
            shadow.note(world.answered())
            await until(lambda: shadow.outcomes)
            assert shadow.outcomes == {"refused": 1}
            assert not caplog.records

    run(test)

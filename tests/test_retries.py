"""Steps fail and pools are lost, and nobody can tell from the answers."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.engine import MAX_REBUILDS, Engine
from jaxinfer.errors import EngineFailure, PoolLost
from jaxinfer.scheduling.batch import Batch
from jaxinfer.scheduling.request import FinishReason, Request
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.scheduling.seating import Seating
from jaxinfer.scheduling.sequence import Sequence
from tests.failing_runner import Failing, FailingRunner
from tests.fakes import (
    Answer,
    Answers,
    FakeRunner,
    FakeTokenizer,
    greedy_continuation,
    make_engine,
    run_all,
)

POISON = 66
LIMITS: dict[str, Any] = {"max_num_batched_tokens": 16, "max_model_len": 64, "max_num_seqs": 4}
ERRORS: dict[str, tuple[str, Callable[[], Exception]]] = {
    "dispatch fails": ("dispatch", lambda: RuntimeError("by hand")),
    "collect fails": ("collect", lambda: RuntimeError("by hand")),
    "dispatch loses the pool": ("dispatch", lambda: PoolLost("by hand")),
    "collect loses the pool": ("collect", lambda: PoolLost("by hand")),
}


def request(name: str, prompt: tuple[int, ...], **sampling: Any) -> Request:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True} | sampling
    return Request(name, prompt, SamplingParams(**fields))


def mixed_requests() -> list[Request]:
    """Every kind of request, more than run at once; two begin alike, one has several chunks."""
    return [
        request("greedy", (1, 2, 3), logprobs=2),
        request("long", tuple(range(40)), max_tokens=6),
        request("drawn", (5, 6), temperature=0.8, seed=7, n=2, logprobs=0),
        request("alike", (*range(38), 9), temperature=0.7, top_k=5, seed=1),
        request("counted", (8, 9), presence_penalty=0.5, logit_bias={3: 1.0, 90: -2.0}),
        request("stopped", (1, 1), max_tokens=30, stop=("ab", "b")),
    ]


def engine_of(runner: FakeRunner, **settings: Any) -> Engine:
    return make_engine(runner, tokenizer=FakeTokenizer(), **{**LIMITS, **settings})


def facts(answer: Answer) -> tuple[Any, ...]:
    return answer.token_ids, answer.text, answer.logprobs, answer.finish_reason, answer.stop


def assert_same(answers: Answers, expected: Answers) -> None:
    assert {key: facts(a) for key, a in answers.items()} == {
        key: facts(a) for key, a in expected.items()
    }


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_pages", [64, 9])
def test_whichever_step_fails_the_answers_are_those_of_an_undisturbed_run(kind, caching, num_pages):
    where, error = ERRORS[kind]
    undisturbed = FakeRunner(num_pages)
    expected = run_all(engine_of(undisturbed, enable_prefix_caching=caching), mixed_requests())
    for failing in range(caching, len(undisturbed.batches), 2):

        def fails(at: str, number: int, _: Batch, failing: int = failing) -> Exception | None:
            return error() if (at, number) == (where, failing) else None

        runner = FailingRunner(fails, num_pages)
        engine = engine_of(runner, enable_prefix_caching=caching)
        assert_same(run_all(engine, mixed_requests()), expected)
        assert runner.num_rebuilds == ("pool" in kind)
        assert engine.pool_stats().pages_used == 0
        engine._scheduler.check_integrity()


@pytest.mark.parametrize("kind", ERRORS)
def test_an_answer_outlasts_any_number_of_failures_with_progress_in_between(kind):
    """Every third step fails: two in a row would be too many."""
    where, error = ERRORS[kind]
    runner = FailingRunner(lambda at, n, _: error() if at == where and n % 3 == 2 else None)
    engine = engine_of(runner, max_retries=1, max_num_batched_tokens=64)
    answers = run_all(engine, [request("r", (1, 2), max_tokens=40)])
    assert answers["r", 0].token_ids == greedy_continuation((1, 2), 40)


@pytest.mark.parametrize("max_retries", [0, 1, 2, 5])
@pytest.mark.parametrize("where", ["dispatch", "collect"])
def test_a_request_is_tried_so_often_and_then_says_so(max_retries, where):
    runner = FailingRunner(lambda at, n, _: RuntimeError("no") if at == where else None)
    answer = run_all(engine_of(runner, max_retries=max_retries), [request("r", (1, 2))])["r", 0]
    tries = max_retries + 1
    assert answer.finish_reason is FinishReason.ERROR
    assert isinstance(answer.error, EngineFailure)
    assert answer.error.message == f"a step failed, {tries} of {tries} tries: RuntimeError: no"
    assert answer.token_ids == []


def poisoned(error: Callable[[str], Exception], where: str = "dispatch") -> Failing:
    """A step that computes the token POISON fails."""

    def fails(at: str, _: int, batch: Batch) -> Exception | None:
        is_in_it = POISON in batch.token_ids[: batch.num_tokens].tolist()
        return error("poison") if at == where and is_in_it else None

    return fails


@pytest.mark.parametrize("where", ["dispatch", "collect"])
@pytest.mark.parametrize("error", [RuntimeError, PoolLost])
@pytest.mark.parametrize("max_retries", [1, 2])
def test_a_request_that_makes_steps_fail_ends_alone(where, error, max_retries):
    """Several of them, one after the other and at once, and in company of those that come later."""
    runner = FailingRunner(poisoned(error, where))
    engine = engine_of(runner, max_retries=max_retries)
    answers, expected = Answers(), run_all(engine_of(FakeRunner()), mixed_requests())
    bad = [request(f"bad{i}", (*range(i, i + 7 * i), POISON, 1)) for i in range(4)]
    good = mixed_requests()
    for arriving in (bad[:2] + good[:3], [], good[3:5], [], bad[2:], [good[5]]):
        for each in arriving:
            engine.submit(each)
        answers.add(engine.step().outputs)
    while engine.has_work():
        answers.add(engine.step().outputs)
    for i in range(4):
        error_of_it = answers.pop((f"bad{i}", 0)).error
        assert isinstance(error_of_it, EngineFailure)
        assert error_of_it.message.startswith(f"a step failed, {max_retries + 1} of ")
    assert_same(answers, expected)
    assert engine.pool_stats().pages_used == 0


def test_a_prompt_whose_last_chunk_fails_does_not_begin_again_for_ever():
    """Its first chunks are progress only the first time."""
    runner = FailingRunner(poisoned(RuntimeError))
    answers = run_all(engine_of(runner), [request("r", (*range(35), POISON))], max_steps=60)
    assert answers["r", 0].error is not None
    assert len(runner.batches) == 3 * 3  # three tries of three chunks


def test_on_its_last_try_a_sequence_is_alone_on_the_device_until_that_was_read():
    runner = FailingRunner(poisoned(RuntimeError))
    engine = engine_of(runner)
    run_all(engine, [request("bad", (POISON,)), *mixed_requests()])
    tries = [i for i, b in enumerate(runner.batches) if POISON in b.token_ids[: b.num_tokens]]
    assert len(tries) == 3
    assert [runner.batches[i].num_seqs for i in tries] == [4, 4, 1]


def test_a_step_says_what_failed_and_who_begins_again():
    runner = FailingRunner(lambda at, n, _: PoolLost("gone") if n == 3 else None)
    runner.fail_at = frozenset({1})
    engine = engine_of(runner)
    engine.submit(request("a", (1, 2)))
    engine.submit(request("b", (3, 4)))
    seen = [engine.step() for _ in range(6)]
    assert [len(s.failed_versions) for s in seen] == [0, 1, 0, 1, 0, 0]
    assert [s.num_retried for s in seen] == [0, 2, 0, 2, 0, 0]
    assert [s.rebuild_s is not None for s in seen] == [False, False, False, True, False, False]


class Stumbling(Scheduler):
    """Raises, after the work was done, in so many calls of one method."""

    def stumble(self, method: str, calls: frozenset[int], counter: list[int]) -> None:
        inner = getattr(self, method)

        def stumbling(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            counter[0] += 1
            if counter[0] in calls:
                raise ZeroDivisionError(f"in {method}")
            return result

        setattr(self, method, stumbling)


def stumbling_engine(method: str, calls: set[int], **settings: Any) -> Engine:
    """Every scheduler of the engine counts its calls on."""
    engine = engine_of(FakeRunner(), **settings)
    make, counter = engine._make_scheduler, [0]

    def make_stumbling() -> Scheduler:
        scheduler = make()
        scheduler.__class__ = Stumbling
        assert isinstance(scheduler, Stumbling)
        scheduler.stumble(method, frozenset(calls), counter)
        return scheduler

    engine._make_scheduler = make_stumbling
    engine._scheduler = make_stumbling()
    return engine


@pytest.mark.parametrize("method", ["schedule", "update", "expire", "finish"])
@pytest.mark.parametrize("first", range(1, 9))
def test_a_fault_of_our_own_code_changes_no_answer(method, first):
    """Also between a token that was noted and the output that was made of it."""
    expected = run_all(engine_of(FakeRunner()), mixed_requests())
    engine = stumbling_engine(method, {first, first + 3})
    assert_same(run_all(engine, mixed_requests()), expected)
    assert engine.pool_stats().pages_used == 0
    assert not engine._choices


def test_a_request_that_breaks_the_scheduler_ends_alone(monkeypatch: pytest.MonkeyPatch):
    sit = Seating._sit

    def breaking(self: Seating, sequence: Sequence, *rest: Any) -> None:
        if POISON in sequence.token_ids[:1]:
            raise ZeroDivisionError("by its prompt")
        return sit(self, sequence, *rest)

    expected = run_all(engine_of(FakeRunner()), mixed_requests())
    monkeypatch.setattr(Seating, "_sit", breaking)
    good = mixed_requests()
    answers = run_all(engine_of(FakeRunner()), [*good[:2], request("bad", (POISON, 1)), *good[2:]])
    error = answers.pop(("bad", 0)).error
    assert error is not None
    assert error.message == "a step failed, 3 of 3 tries: ZeroDivisionError: by its prompt"
    assert_same(answers, expected)


def test_an_abort_that_fails_ends_its_request_all_the_same():
    engine = stumbling_engine("abort", {1})
    engine.submit(request("gone", (1, 2)))
    engine.submit(request("kept", (3, 4)))
    engine.step()
    (output,) = engine.abort("gone")
    assert output.finish_reason is FinishReason.ABORT
    answers = run_all(engine)
    assert answers["kept", 0].token_ids == greedy_continuation((3, 4), 8)


@pytest.mark.parametrize("method", ["pause", "resume"])
def test_a_pause_or_a_resume_that_fails_is_made_all_the_same(method: str):
    engine = stumbling_engine(method, {1})
    engine.submit(request("slow", (1, 2)))
    answers = Answers()
    answers.add(engine.step().outputs)
    engine.pause("slow")
    answers.add(engine.step().outputs)
    assert (engine.has_work(), engine.pool_stats().num_paused) == (False, 1)
    engine.resume("slow")
    while engine.has_work():
        answers.add(engine.step().outputs)
    assert answers["slow", 0].token_ids == greedy_continuation((1, 2), 8)


def test_a_request_that_can_be_queued_only_in_part_leaves_nothing():
    engine = stumbling_engine("submit", {2})
    with pytest.raises(ZeroDivisionError):
        engine.submit(request("part", (1, 2), n=2))
    assert not engine.has_work()
    answers = run_all(engine, [request("part", (1, 2))])
    assert answers["part", 0].token_ids == greedy_continuation((1, 2), 8)


def test_who_ends_by_a_fault_between_two_steps_is_told_by_the_next():
    engine = engine_of(FakeRunner(), max_retries=0)
    engine.submit(request("r", (1, 2)))
    engine.recover(ZeroDivisionError("by hand"))
    assert engine.has_work()
    (output,) = engine.step().outputs
    assert isinstance(output.error, EngineFailure)
    assert (engine.has_work(), engine.has_requests) == (False, False)


def test_a_device_that_never_comes_back_ends_the_engine():
    runner = FailingRunner(lambda at, n, _: PoolLost("on fire"))
    engine = engine_of(runner)
    for each in mixed_requests() * 2:
        engine.submit(Request(f"{each.request_id}{len(engine._choices)}", each.token_ids))
    for _ in range(MAX_REBUILDS + 2):
        engine.step()
    with pytest.raises(EngineFailure, match="no step could be read in between: PoolLost: on fire"):
        engine.step()
    assert runner.num_rebuilds == MAX_REBUILDS + 2
    engine.abort_all(EngineFailure("over"))
    assert (engine.has_work(), engine.pool_stats().pages_used) == (False, 0)


def test_what_was_counted_since_the_start_is_counted_on_after_a_rebuild():
    runner = FailingRunner(lambda at, n, _: PoolLost("gone") if n == 30 else None, num_pages=7)
    engine = engine_of(runner)
    for each in mixed_requests():
        engine.submit(each)
    counts = [engine.pool_stats()]
    while engine.has_work():
        engine.step()
        counts.append(engine.pool_stats())
    assert runner.num_rebuilds == 1
    for name in ("num_preemptions", "prefix_query_tokens", "prefix_hit_tokens"):
        values = [getattr(stats, name) for stats in counts]
        assert values == sorted(values)
        assert values[-1] > 0


@pytest.mark.parametrize("seed", range(3))
def test_a_tenth_of_all_steps_fails_and_every_answer_is_whole(seed):
    random = Random(seed)
    kinds = [*ERRORS.values()]

    def fails(at: str, _n: int, _b: Batch) -> Exception | None:
        where, error = random.choice(kinds)
        return error() if at == where and random.random() < 0.2 else None

    requests = [
        Request(f"{i}", each.token_ids, each.sampling, arrival_s=float(i))
        for i, each in enumerate(mixed_requests() * 8)
    ]
    expected = run_all(engine_of(FakeRunner(24), enable_prefix_caching=False), requests)
    runner = FailingRunner(fails, 24)
    engine = engine_of(runner, max_retries=20)
    answers, left = Answers(), requests[::-1]
    while left or engine.has_work():
        for _ in range(min(len(left), random.choice([0, 0, 1, 4]))):
            engine.submit(left.pop())
        answers.add(engine.step().outputs)
    assert_same(answers, expected)
    assert runner.num_rebuilds > 5
    assert engine.pool_stats().pages_used == 0
    engine._scheduler.check_integrity()

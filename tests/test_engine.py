"""Tests of the engine on a runner whose tokens can be computed by hand."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.engine import Engine, EngineStep
from jaxinfer.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from jaxinfer.outputs import Truncation
from jaxinfer.scheduling.request import FinishReason, Request
from tests.fakes import (
    EOS,
    VOCAB_SIZE,
    Answer,
    Answers,
    FakeClock,
    FakeRunner,
    FakeTokenizer,
    greedy_continuation,
    make_engine,
    run_all,
)

PROMPT = (1, 2, 3)


def request(
    prompt: tuple[int, ...] = PROMPT, name: str = "r", *, where: Any = None, **sampling: Any
) -> Request:
    """Greedy unless a temperature is given."""
    settings: dict[str, Any] = {"temperature": 0} | sampling
    return Request(name, prompt, SamplingParams(**settings), **(where or {}))


def solo(asked: Request, runner: FakeRunner | None = None, **settings) -> Answer:
    """The answer to a request of one choice in an engine of its own."""
    return run_all(make_engine(runner, **settings), [asked])[asked.request_id, 0]


def letters(text: str) -> tuple[int, ...]:
    return tuple(FakeTokenizer().encode(text))


def says(text: str, *more: int) -> FakeRunner:
    """A runner that says `text`, and then these tokens, after PROMPT."""
    return FakeRunner(scripts={PROMPT: [*letters(text), *more]})


def test_the_tokens_are_those_of_the_formula():
    runner = FakeRunner()
    answer = solo(request(max_tokens=5), runner, eos_token_ids=())
    assert answer.token_ids == greedy_continuation(PROMPT, 5) == [17, 86, 12, 85, 75]
    assert answer.finish_reason is FinishReason.LENGTH
    assert runner.faults == []


def test_a_step_without_work_does_nothing():
    engine = make_engine()
    assert not engine.has_work()
    assert engine.step() == EngineStep(outputs=(), stats=None)


def test_without_a_tokenizer_there_are_tokens_and_no_text():
    answer = solo(request(max_tokens=5))
    assert (answer.text, len(answer.token_ids)) == ("", 5)


def test_text_comes_with_the_tokens_that_spell_it():
    answer = solo(request(max_tokens=4), says("hello"), tokenizer=FakeTokenizer())
    assert answer.text == "hell"
    assert answer.token_ids == list(letters("hell"))


def test_stats_tell_the_story_of_a_request():
    clock = FakeClock(10.0)
    engine = make_engine(clock=clock)
    engine.submit(request(max_tokens=3, where={"arrival_s": 7.0}))
    answers = Answers()
    for _ in range(4):
        clock.now += 1
        answers.add(engine.step().outputs)
    stats = answers["r", 0].stats
    assert stats is not None
    assert (stats.arrival_s, stats.first_scheduled_s, stats.first_token_s) == (7.0, 11.0, 12.0)
    assert (stats.finished_s, stats.num_output_tokens, stats.tpot_s) == (14.0, 3, 1.0)


def test_a_step_says_how_much_it_computed():
    engine = make_engine()
    engine.submit(request(max_tokens=2))
    none_yet, first, second = (engine.step().stats for _ in range(3))
    assert none_yet is None
    assert first is not None
    assert second is not None
    assert (first.kind, first.num_tokens, first.num_padded_tokens) == ("prefill", 3, 16)
    assert (second.kind, second.num_tokens, second.num_padded_tokens) == ("decode", 1, 8)
    assert first.num_sampled == second.num_sampled == second.num_seqs == 1


def test_logprobs_come_one_per_token_when_asked_for():
    answer = solo(request(max_tokens=3, logprobs=0))
    assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
    assert answer.logprobs[0].logprob == pytest.approx(-0.5 - answer.token_ids[0] / 1024)
    assert answer.logprobs[0].top == ()
    assert solo(request(max_tokens=3)).logprobs == []


def test_as_many_likeliest_tokens_come_as_were_asked_for():
    runner = FakeRunner()
    engine = make_engine(runner)
    answers = run_all(
        engine,
        [request(name="two", max_tokens=2, logprobs=2), request(name="none", logprobs=0)],
    )
    first = answers["two", 0].logprobs[0]
    assert [token_id for token_id, _ in first.top] == [first.token_id, first.token_id + 1]
    assert first.top[0][1] == pytest.approx(first.logprob)
    assert all(entry.top == () for entry in answers["none", 0].logprobs)


def test_eos_ends_the_answer_and_has_no_text():
    answer = solo(request(max_tokens=9), says("ab", EOS, 0), tokenizer=FakeTokenizer())
    assert (answer.text, answer.finish_reason, answer.stop) == ("ab", FinishReason.STOP, None)
    assert answer.token_ids == [0, 1, EOS]


@pytest.mark.parametrize("prompt", [PROMPT, tuple(range(100))])
def test_before_min_tokens_any_of_the_eos_tokens_is_an_ordinary_token(prompt):
    runner = FakeRunner(scripts={prompt: [7] * 50})
    asked = request(prompt, max_tokens=30, min_tokens=4)
    answer = solo(asked, runner, eos_token_ids=(2, 7))
    assert answer.token_ids == [7] * 5  # four of output, and the one that ends it
    assert answer.finish_reason is FinishReason.STOP


def test_min_tokens_equal_to_max_tokens_ends_at_the_length():
    runner = FakeRunner(scripts={PROMPT: [7] * 50})
    answer = solo(request(max_tokens=4, min_tokens=4), runner, eos_token_ids=(7,))
    assert (len(answer.token_ids), answer.finish_reason) == (4, FinishReason.LENGTH)


def test_ignore_eos_covers_every_eos_token_but_not_stop_token_ids():
    runner = FakeRunner(scripts={PROMPT: [2, 7, 2, 7, 9, 1]})
    asked = request(max_tokens=9, ignore_eos=True, stop_token_ids=(9,))
    answer = solo(asked, runner, eos_token_ids=(2, 7))
    assert answer.token_ids == [2, 7, 2, 7, 9]
    assert (answer.finish_reason, answer.stop) == (FinishReason.STOP, 9)


def test_ignore_eos_runs_to_max_tokens():
    runner = FakeRunner(scripts={PROMPT: [7] * 50})
    answer = solo(request(max_tokens=20, ignore_eos=True), runner, eos_token_ids=(7,))
    assert (len(answer.token_ids), answer.finish_reason) == (20, FinishReason.LENGTH)


def test_a_stop_token_is_counted_and_shown_only_on_demand():
    hidden = request(max_tokens=9, stop_token_ids=letters("c"))
    shown = request(max_tokens=9, stop_token_ids=letters("c"), include_stop_str_in_output=True)
    for asked, text in ((hidden, "ab"), (shown, "abc")):
        answer = solo(asked, says("abcd"), tokenizer=FakeTokenizer())
        assert (answer.text, answer.stop, answer.token_ids) == (text, 2, [0, 1, 2])


def test_a_stop_string_over_several_tokens_leaks_no_part():
    engine = make_engine(says("defghijxx"), tokenizer=FakeTokenizer())
    engine.submit(request(max_tokens=9, stop=("defghij",)))
    answers = Answers()
    while engine.has_work():
        step = engine.step()
        assert all(output.text == "" for output in step.outputs)
        answers.add(step.outputs)
    answer = answers["r", 0]
    assert (answer.finish_reason, answer.stop) == (FinishReason.STOP, "defghij")
    assert len(answer.token_ids) == 7


def test_text_held_for_a_stop_string_is_released_at_the_end():
    answer = solo(request(max_tokens=3, stop=("abcd",)), says("abcd"), tokenizer=FakeTokenizer())
    assert (answer.text, answer.finish_reason) == ("abc", FinishReason.LENGTH)


def test_an_end_token_releases_the_text_that_was_held():
    answer = solo(request(max_tokens=9, stop=("abcd",)), says("ab", EOS), tokenizer=FakeTokenizer())
    assert (answer.text, answer.finish_reason) == ("ab", FinishReason.STOP)


def test_a_stop_string_in_the_last_token_is_a_stop_and_not_the_length():
    answer = solo(request(max_tokens=2, stop=("ab",)), says("abc"), tokenizer=FakeTokenizer())
    assert (answer.text, answer.finish_reason) == ("", FinishReason.STOP)


def test_a_stop_string_before_min_tokens_is_mere_text():
    asked = request(max_tokens=9, stop=("ab",), min_tokens=3)
    answer = solo(asked, says("ababab"), tokenizer=FakeTokenizer())
    assert answer.text == "ab"
    assert len(answer.token_ids) == 4


def test_a_stop_string_that_never_comes_changes_nothing():
    plain = solo(request(max_tokens=20), tokenizer=FakeTokenizer(), eos_token_ids=())
    held = solo(
        request(max_tokens=20, stop=("zzzz",), logprobs=0),
        tokenizer=FakeTokenizer(),
        eos_token_ids=(),
    )
    assert (held.text, held.token_ids) == (plain.text, plain.token_ids)
    assert len(held.logprobs) == 20


@pytest.mark.parametrize("max_model_len", [16, 24])
def test_a_prompt_may_fill_the_context_but_for_one_token(max_model_len):
    engine = make_engine(max_model_len=max_model_len)
    answer = run_all(engine, [request((1,) * (max_model_len - 1), max_tokens=None)])["r", 0]
    assert (len(answer.token_ids), answer.finish_reason) == (1, FinishReason.LENGTH)
    for length in (max_model_len, max_model_len + 1):
        with pytest.raises(ContextLengthExceeded) as info:
            engine.submit(request((1,) * length, max_tokens=1))
        assert info.value.code == "context_length_exceeded"
    with pytest.raises(ContextLengthExceeded):
        engine.submit(request((1,) * (max_model_len - 2), max_tokens=3))
    assert (
        run_all(engine, [request(name="next", max_tokens=2)])["next", 0].finish_reason
        is FinishReason.LENGTH
    )


def test_without_max_tokens_an_answer_goes_to_the_end_of_the_context():
    answer = solo(request(max_tokens=None), max_model_len=50, eos_token_ids=())
    assert len(answer.token_ids) == 47


def test_a_deadline_ends_an_answer_with_its_error_and_its_text():
    clock = FakeClock()
    engine = make_engine(says("abcdefgh"), tokenizer=FakeTokenizer(), clock=clock)
    engine.submit(request(max_tokens=8, stop=("bz",), where={"deadline_s": 5.0}))
    answers = Answers()
    for _ in range(3):
        answers.add(engine.step().outputs)
    clock.now = 6.0
    step = engine.step()
    answers.add(step.outputs)
    answer = answers["r", 0]
    assert (answer.finish_reason, answer.text) == (FinishReason.TIMEOUT, "ab")
    assert isinstance(answer.error, DeadlineExceeded)
    assert step.stats is None  # of the step under way nothing is left
    assert (engine.has_work(), engine.pool_stats().pages_used) == (False, 0)


@pytest.mark.parametrize(("arrival_s", "retry_after_s"), [(0.0, 6.0), (-500.0, 60.0), (5.9, 1.0)])
def test_who_has_not_started_by_its_queue_deadline_is_told_to_come_back(arrival_s, retry_after_s):
    clock = FakeClock()
    engine = make_engine(says("abcdefgh"), clock=clock, max_num_seqs=1)
    where = {"queue_deadline_s": 5.0, "deadline_s": 9.0}
    engine.submit(request(name="runs", max_tokens=3, where=where | {"arrival_s": -1000.0}))
    engine.submit(request(name="waits", max_tokens=3, where=where | {"arrival_s": arrival_s}))
    answers = Answers()
    answers.add(engine.step().outputs)
    clock.now = 6.0
    answers.add(engine.step().outputs)
    answer = answers["waits", 0]
    assert (answer.finish_reason, answer.token_ids) == (FinishReason.TIMEOUT, [])
    assert isinstance(answer.error, Overloaded)
    assert answer.error.code == "queue_timeout"
    assert answer.error.retry_after_s == pytest.approx(retry_after_s)
    assert f"waited {6.0 - arrival_s:.1f} s" in answer.error.message
    while engine.has_work():
        answers.add(engine.step().outputs)
    assert answers["runs", 0].finish_reason is FinishReason.LENGTH


def test_the_deadline_of_a_run_goes_before_that_of_the_queue():
    clock = FakeClock()
    engine = make_engine(says("abc"), clock=clock)
    engine.submit(request(max_tokens=3, where={"queue_deadline_s": 5.0, "deadline_s": 5.0}))
    clock.now = 6.0
    (output,) = engine.step().outputs
    assert isinstance(output.error, DeadlineExceeded)


def test_a_short_prompt_is_answered_in_the_next_step_however_long_another_one_is():
    engine = make_engine(FakeRunner(num_pages=64), max_num_batched_tokens=32)
    engine.submit(request((1,) * 200, name="long", max_tokens=2))
    for _ in range(2):
        engine.step()
    engine.submit(request((2, 3), name="short", max_tokens=2))
    assert engine.step().outputs == ()  # of a step that was under way when it came
    assert [output.request_id for output in engine.step().outputs] == ["short"]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (request(()), "prompt"),
        (request((1, VOCAB_SIZE)), "prompt"),
        (request((1, -1)), "prompt"),
        (request((1, 2**40)), "prompt"),
        (request(cast("Any", (1, 1.5))), "prompt"),
        (request(stop_token_ids=(10**9,)), "stop_token_ids"),
        (request(stop_token_ids=(VOCAB_SIZE,)), "stop_token_ids"),
        (request(stop=("x",)), "stop"),
        (request(where={"priority": 10**400}), "priority"),
        (request(where={"priority": -1001}), "priority"),
    ],
)
def test_what_can_not_be_served_is_refused_and_the_next_is_served(asked, param):
    engine = make_engine(eos_token_ids=())
    with pytest.raises(InvalidRequest) as info:
        engine.submit(asked)
    assert info.value.param == param
    assert not engine.has_work()
    assert run_all(engine, [request(max_tokens=3)])["r", 0].token_ids == [17, 86, 12]


def test_a_refused_request_leaves_no_choice_behind():
    engine = make_engine()
    with pytest.raises(ContextLengthExceeded):
        engine.submit(request(n=4, max_tokens=10**9))
    assert engine.pool_stats().num_waiting == 0


def test_an_id_in_use_is_refused_until_its_request_has_ended():
    engine = make_engine()
    engine.submit(request())
    with pytest.raises(InvalidRequest, match="in use") as info:
        engine.submit(request((9,)))
    assert info.value.param == "request_id"
    run_all(engine)
    engine.submit(request())


def test_a_prompt_over_the_pool_is_refused_and_does_not_block_the_queue():
    engine = make_engine(FakeRunner(num_pages=8), max_model_len=256)
    with pytest.raises(ContextLengthExceeded, match="KV pool"):
        engine.submit(request((1,) * 72, max_tokens=1))
    small = request(name="small", max_tokens=3)
    long = request((1,) * 48, name="long", max_tokens=None)
    answers = run_all(engine, [long, small])
    assert answers["small", 0].finish_reason is FinishReason.LENGTH
    assert len(answers["long", 0].token_ids) == 17  # 8 pages of 8, and the token that needs none
    assert answers["long", 0].finish_reason is FinishReason.LENGTH


def drawn(engine: Engine, **sampling: Any) -> list[list[int]]:
    settings: dict[str, Any] = {"temperature": 1.0} | sampling
    asked = request(max_tokens=8, ignore_eos=True, **settings)
    answers = run_all(engine, [asked])
    return [answers[asked.request_id, index].token_ids for index in range(asked.sampling.n)]


def test_choices_differ_and_repeat_with_their_seed():
    first = drawn(make_engine(), n=4, seed=7)
    assert len({tuple(choice) for choice in first}) == 4
    assert first == drawn(make_engine(), n=4, seed=7)
    assert first != drawn(make_engine(), n=4, seed=8)


def test_the_first_of_n_choices_is_the_only_one_of_one():
    assert drawn(make_engine(), n=4, seed=7)[:1] == drawn(make_engine(), n=1, seed=7)


def test_a_request_without_a_seed_draws_from_the_engines_own():
    seeds = iter([1, 2, 1])
    engine = make_engine(random_seed=lambda: next(seeds))
    first, second, third = (drawn(engine)[0] for _ in range(3))
    assert first == third != second


def test_a_seeded_request_does_not_change_with_its_neighbours():
    asked = request(name="seeded", temperature=0.8, seed=42, max_tokens=12, ignore_eos=True)
    alone = solo(asked).token_ids
    neighbours: list[dict[str, Any]] = [
        {"temperature": 0.9},
        {"temperature": 0.9, "seed": 3},
        {"top_k": 4},
    ]
    for neighbour in neighbours:
        other = request((4, 4, 4), name="other", max_tokens=20, **neighbour)
        for order in ([asked, other], [other, asked]):
            assert run_all(make_engine(), order)["seeded", 0].token_ids == alone
    crowd = [
        request((i,) * 20, name=str(i), max_tokens=30, ignore_eos=True, temperature=1.0)
        for i in range(6)
    ]
    engine = make_engine(FakeRunner(num_pages=12))
    answers = run_all(engine, [*crowd, dataclasses.replace(asked, priority=1)])
    assert answers["seeded", 0].token_ids == alone


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_an_abort_ends_every_choice_and_frees_its_pages_at_once(num_steps):
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=16)
    engine.submit(request((5,) * 40, n=4, max_tokens=50, temperature=1.0, ignore_eos=True))
    answers = Answers()
    for _ in range(num_steps):
        answers.add(engine.step().outputs)
    last = engine.abort("r")
    answers.add(last)
    assert [output.finish_reason for output in last] == [FinishReason.ABORT] * 4
    assert all(output.stats is not None for output in last)
    assert (engine.has_work(), engine.pool_stats().pages_used) == (False, 0)
    assert engine.step().outputs == ()


def test_an_unknown_or_ended_id_is_no_abort():
    engine = make_engine()
    run_all(engine, [request()])
    assert engine.abort("r") == engine.abort("never") == ()


def test_an_abort_leaves_the_choices_that_have_ended_alone():
    runner = FakeRunner(scripts={PROMPT: [EOS]})
    engine = make_engine(runner, max_num_seqs=1)
    engine.submit(request(n=2, max_tokens=9))
    first = engine.step().outputs + engine.step().outputs
    assert [output.index for output in first] == [0]
    assert [output.index for output in engine.abort("r")] == [1]


def test_an_abort_does_not_change_the_others():
    engine = make_engine(eos_token_ids=())
    engine.submit(request(name="kept", max_tokens=20))
    engine.submit(request(name="gone", max_tokens=20))
    answers = Answers()
    for _ in range(5):
        answers.add(engine.step().outputs)
    engine.abort("gone")
    while engine.has_work():
        answers.add(engine.step().outputs)
    assert answers["kept", 0].token_ids == greedy_continuation(PROMPT, 20)


def test_abort_all_ends_everything_with_the_error():
    engine = make_engine(max_num_seqs=1)
    engine.submit(request(name="running", max_tokens=20))
    engine.submit(request(name="waiting", max_tokens=20))
    engine.step()
    error = Unavailable("shutting down", retry_after_s=1.0)
    outputs = engine.abort_all(error)
    assert {output.request_id for output in outputs} == {"running", "waiting"}
    assert all(output.finish_reason is FinishReason.ERROR for output in outputs)
    assert all(output.error is error for output in outputs)
    assert (engine.has_work(), engine.pool_stats().pages_used) == (False, 0)


@pytest.mark.parametrize(
    "failing", [{"fail_at": frozenset({1})}, {"fail_collect_at": frozenset({1})}]
)
def test_without_retries_a_failed_step_takes_only_its_own_sequences(failing):
    runner = FakeRunner(**failing)
    engine = make_engine(runner, max_num_seqs=2, eos_token_ids=(), max_retries=0)
    requests = [request((i, i + 1), name=str(i), max_tokens=4) for i in range(4)]
    answers = run_all(engine, requests)
    for name in "01":
        answer = answers[name, 0]
        assert answer.finish_reason is FinishReason.ERROR
        assert isinstance(answer.error, EngineFailure)
        assert answer.stats is not None
    for name in "23":
        prompt = (int(name), int(name) + 1)
        assert answers[name, 0].token_ids == greedy_continuation(prompt, 4)
    assert (engine.pool_stats().pages_used, runner.faults) == (0, [])


def test_pages_of_a_failed_step_are_not_found_by_the_next_request():
    engine = make_engine(FakeRunner(fail_at=frozenset({0})), max_retries=0)
    prompt = tuple(range(40))
    run_all(engine, [request(prompt, max_tokens=2)])
    assert engine.pool_stats().pages_cached == 0
    answer = run_all(engine, [request(prompt, max_tokens=2)])["r", 0]
    assert answer.stats is not None
    assert answer.stats.num_cached_tokens == 0
    assert answer.token_ids == greedy_continuation(prompt, 2)


def test_pages_computed_before_the_failed_step_are_not_found_either():
    runner = FakeRunner(fail_at=frozenset({2}))
    engine = make_engine(runner, max_num_batched_tokens=16, max_retries=0)
    run_all(engine, [request(tuple(range(40)), max_tokens=2)])
    assert len(runner.batches) == 3
    assert engine.pool_stats().pages_cached == 0


def test_any_exception_of_the_runner_becomes_an_engine_failure():
    def on_step(_batch) -> None:
        raise ZeroDivisionError("by hand")

    answer = solo(request(), FakeRunner(on_step=on_step))
    assert isinstance(answer.error, EngineFailure)
    assert answer.error.message == "a step failed, 3 of 3 tries: ZeroDivisionError: by hand"
    assert isinstance(answer.error.__cause__, ZeroDivisionError)


def test_a_row_that_is_not_a_number_ends_alone():
    runner = FakeRunner(poison=frozenset({66}))
    engine = make_engine(runner, eos_token_ids=())
    prompt = tuple(range(20))
    answers = run_all(
        engine,
        [
            request((*prompt, 66), name="bad", max_tokens=6),
            request(prompt, name="good", max_tokens=6),
        ],
    )
    assert answers["bad", 0].finish_reason is FinishReason.ERROR
    assert isinstance(answers["bad", 0].error, EngineFailure)
    assert answers["bad", 0].token_ids == []
    assert answers["good", 0].token_ids == greedy_continuation(prompt, 6)


class BrokenTokenizer(FakeTokenizer):
    """Knows no 'c'."""

    def __init__(self) -> None:
        super().__init__()
        self.whole_texts[2] = None

    def spelled(self, token_id: int, *, is_first: bool = False) -> bytes | None:
        if token_id == 2:
            raise KeyError(token_id)
        return super().spelled(token_id, is_first=is_first)


def test_a_token_that_can_not_be_read_ends_only_its_own_answer():
    other = (50, 51)
    runner = FakeRunner(scripts={(1, 1): letters("abc"), other: letters("dddd")})
    engine = make_engine(runner, tokenizer=BrokenTokenizer())
    answers = run_all(
        engine,
        [request((1, 1), name="bad", max_tokens=4), request(other, name="good", max_tokens=4)],
    )
    assert (answers["bad", 0].finish_reason, answers["bad", 0].text) == (FinishReason.ERROR, "ab")
    assert answers["good", 0].text == "dddd"
    assert engine.pool_stats().pages_used == 0


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 24])
def test_the_same_prompt_twice_gives_the_same_answer(length):
    engine = make_engine(eos_token_ids=())
    prompt = tuple(range(length))
    first, second = (run_all(engine, [request(prompt, max_tokens=12)])["r", 0] for _ in range(2))
    assert first.token_ids == second.token_ids == greedy_continuation(prompt, 12)
    assert second.stats is not None
    assert second.stats.num_cached_tokens == (length - 1) // 8 * 8


def test_prompts_that_share_pages_in_one_step_are_answered_as_if_alone():
    engine = make_engine(eos_token_ids=())
    prompts = [(*range(16), last) for last in (20, 21)] + [tuple(range(30))] * 16
    requests = [request(p, name=str(i), max_tokens=9) for i, p in enumerate(prompts)]
    answers = run_all(engine, requests)
    for i, prompt in enumerate(prompts):
        assert answers[str(i), 0].token_ids == greedy_continuation(prompt, 9)


def test_colliding_digests_do_not_change_an_answer():
    runner = FakeRunner()
    engine = make_engine(runner, digest=lambda parent, tokens: b"same", eos_token_ids=())
    for start in (0, 1, 0, 1):
        prompt = tuple(range(start, start + 24))
        answer = run_all(engine, [request(prompt, max_tokens=5)])["r", 0]
        assert answer.token_ids == greedy_continuation(prompt, 5)
    assert runner.faults == []


def test_requests_of_another_salt_share_nothing():
    engine = make_engine()
    prompt = tuple(range(30))
    for salt in ("", "a", "b"):
        answer = run_all(engine, [request(prompt, where={"cache_salt": salt})])["r", 0]
        assert answer.stats is not None
        assert answer.stats.num_cached_tokens == 0
    again = run_all(engine, [request(prompt, where={"cache_salt": "a"})])["r", 0]
    assert again.stats is not None
    assert again.stats.num_cached_tokens == 24


def test_chunks_of_any_size_give_the_same_answer():
    prompt = tuple(i * i % 100 for i in range(90))
    for budget in (16, 17, 31, 64, 128):
        runner = FakeRunner()
        answer = solo(
            request(prompt, max_tokens=6), runner, max_num_batched_tokens=budget, eos_token_ids=()
        )
        assert answer.token_ids == greedy_continuation(prompt, 6)
        assert runner.faults == []


@pytest.mark.parametrize("tokenizer", [None, FakeTokenizer()])
def test_an_output_that_the_cap_ends_says_so(tokenizer: FakeTokenizer | None):
    cases: list[tuple[dict[str, Any], Truncation | None]] = [
        ({"max_tokens": None, "output_cap": 3}, Truncation(3, "token")),
        ({"max_tokens": 9, "output_cap": 3, "truncate": "sentence"}, Truncation(3, "token")),
        ({"max_tokens": 3, "output_cap": 3}, None),
        ({"max_tokens": None, "output_cap": 500}, None),
    ]
    for fields, truncation in cases:
        engine = make_engine(tokenizer=tokenizer, max_model_len=20)
        engine.submit(request(ignore_eos=True, **fields))
        outputs = [output for _ in range(30) for output in engine.step().outputs]
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert outputs[-1].truncation == truncation
        assert len(outputs) == (17 if fields.get("output_cap") == 500 else 3)


def test_a_cap_is_at_least_one_and_truncates_in_a_known_way():
    with pytest.raises(InvalidRequest, match="output_cap"):
        SamplingParams(output_cap=0)
    with pytest.raises(InvalidRequest, match="sentence or token"):
        SamplingParams(truncate=cast(Any, "word"))

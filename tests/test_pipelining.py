"""The next step is dispatched before the last one is read, and nobody can tell from the answers."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.errors import EngineFailure, PoolLost
from jaxinfer.scheduling.batch import Batch, StepResult
from jaxinfer.scheduling.request import FinishReason, Request
from jaxinfer.versions import ModelVersion
from tests.fakes import (
    EOS,
    Answers,
    FakeClock,
    FakeRunner,
    greedy_continuation,
    make_engine,
    run_all,
)

PROMPT = (5, 7)


class LoggingRunner(FakeRunner):
    """Notes the order of the two calls, by the number of the step."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.log: list[tuple[str, int]] = []

    def dispatch(self, batch: Batch) -> Any:
        self.log.append(("dispatch", len(self.batches)))
        return super().dispatch(batch)

    def collect(self, pending: Any) -> StepResult:
        self.log.append(("collect", pending[0]))
        return super().collect(pending)


def request(prompt: tuple[int, ...] = PROMPT, name: str = "r", **sampling: Any) -> Request:
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4} | sampling
    return Request(name, prompt, SamplingParams(**fields))


def test_each_step_is_dispatched_before_the_one_before_it_is_read():
    runner = LoggingRunner()
    answers = run_all(make_engine(runner, eos_token_ids=()), [request()])
    assert answers["r", 0].token_ids == greedy_continuation(PROMPT, 4)
    assert runner.log == [
        ("dispatch", 0),
        ("dispatch", 1),
        ("collect", 0),
        ("dispatch", 2),
        ("collect", 1),
        ("dispatch", 3),
        ("collect", 2),
        ("collect", 3),  # the last token was known to be the last: nothing is dispatched for it
    ]


def test_the_input_of_a_decode_step_never_comes_from_the_host():
    runner = FakeRunner()
    run_all(make_engine(runner, eos_token_ids=()), [request(name="a"), request((9,), name="b")])
    decodes = [batch for batch in runner.batches if batch.kind == "decode"]
    assert decodes
    for batch in decodes:
        assert (batch.from_seat[: batch.num_tokens] >= 0).all()
        assert not batch.token_ids.any()


def test_a_row_that_ended_is_computed_once_more_and_leaves_no_trace():
    runner = FakeRunner(scripts={PROMPT: [40, EOS, 41, 42]})
    engine = make_engine(runner)
    answers = run_all(engine, [request(max_tokens=9), request((1, 2, 3), name="other")])
    assert answers["r", 0].token_ids == [40, EOS]
    assert answers["r", 0].finish_reason is FinishReason.STOP
    assert answers["other", 0].token_ids == greedy_continuation((1, 2, 3), 4)
    assert [batch.num_seqs for batch in runner.batches] == [2, 2, 2, 1]  # one row too many
    assert engine.pool_stats().pages_used == 0
    assert runner.faults == []


def test_pages_of_a_row_that_ended_may_go_to_the_next_request_at_once():
    """The pool holds one request, so the second is dispatched onto pages that the first's last,
    superfluous step still writes."""
    runner = FakeRunner(num_pages=2, scripts={(1,) * 7: [EOS], (2,) * 7: [EOS]})
    engine = make_engine(runner, max_model_len=16, max_num_seqs=1)
    again = [request((i % 3,) * 7, name=str(i), max_tokens=9) for i in range(9)]
    answers = run_all(engine, again)
    for i in range(9):
        first = greedy_continuation((i % 3,) * 7, 9) if i % 3 == 0 else [EOS]
        assert answers[str(i), 0].token_ids == first
    assert runner.faults == []


def test_nothing_is_waited_for_when_all_have_ended():
    """An end token ends the work, though a superfluous step is under way."""
    runner = LoggingRunner(scripts={PROMPT: [40, EOS]})
    engine = make_engine(runner)
    engine.submit(request(max_tokens=9))
    while engine.has_work():
        engine.step()
    assert runner.log[-1] == ("collect", 1)
    assert len(runner.batches) == 3
    answers = run_all(engine, [request((8, 8), name="next")])
    assert list(answers) == [("next", 0)]
    assert answers["next", 0].token_ids == greedy_continuation((8, 8), 4)


@pytest.mark.parametrize("num_steps", range(1, 5))
def test_an_abort_frees_its_pages_at_once_whatever_is_under_way(num_steps):
    runner = FakeRunner()
    engine = make_engine(runner, eos_token_ids=())
    engine.submit(request(name="gone", max_tokens=20))
    engine.submit(request((1, 2, 3), name="kept", max_tokens=8))
    answers = Answers()
    for _ in range(num_steps):
        answers.add(engine.step().outputs)
    used = engine.pool_stats().pages_used
    answers.add(engine.abort("gone"))
    assert engine.pool_stats().pages_used < used
    while engine.has_work():
        answers.add(engine.step().outputs)
    assert answers["gone", 0].finish_reason is FinishReason.ABORT
    assert len(answers["gone", 0].token_ids) == num_steps - 1
    assert answers["kept", 0].token_ids == greedy_continuation((1, 2, 3), 8)


def test_a_request_may_come_back_under_its_id_while_its_last_step_is_under_way():
    engine = make_engine(eos_token_ids=())
    engine.submit(request())
    engine.step()
    engine.abort("r")
    assert run_all(engine, [request((9, 9))])["r", 0].token_ids == greedy_continuation((9, 9), 4)


def test_tokens_of_the_step_before_come_first_when_a_dispatch_fails():
    engine = make_engine(FakeRunner(fail_at=frozenset({2})), eos_token_ids=(), max_retries=0)
    engine.submit(request(max_tokens=9))
    outputs = [engine.step().outputs for _ in range(3)]
    assert [[output.finish_reason for output in some] for some in outputs] == [
        [],
        [None],
        [None, FinishReason.ERROR],
    ]
    assert [o.token_ids for some in outputs for o in some][:2] == [
        (token,) for token in greedy_continuation(PROMPT, 2)
    ]
    assert engine.pool_stats().pages_used == 0


@pytest.mark.parametrize("max_retries", [0, 1])
def test_a_step_that_fails_when_it_is_read_takes_the_one_behind_it_along(max_retries):
    """Without retries its sequence ends; with them what the one behind it drew is drawn again."""
    runner = FakeRunner(fail_collect_at=frozenset({1}))
    engine = make_engine(runner, eos_token_ids=(), max_retries=max_retries)
    answers = run_all(engine, [request(max_tokens=9)])
    if max_retries:
        assert answers["r", 0].token_ids == greedy_continuation(PROMPT, 9)
        assert sum(batch.num_sampled for batch in runner.batches) == 9 + 2
    else:
        assert answers["r", 0].token_ids == greedy_continuation(PROMPT, 1)
        assert isinstance(answers["r", 0].error, EngineFailure)
    assert run_all(engine, [request(name="b")])["b", 0].token_ids == greedy_continuation(PROMPT, 4)
    assert runner.faults == []


def test_a_lost_pool_that_can_not_be_made_anew_leaves_no_step_under_way():
    def lose(batch: Batch) -> None:
        if len(runner.batches) == 3:
            raise PoolLost("the device is gone")

    def rebuild() -> None:
        raise RuntimeError("out of memory")

    runner = FakeRunner(on_step=lose)
    runner.rebuild = rebuild
    engine = make_engine(runner, eos_token_ids=())
    engine.submit(request(max_tokens=9))
    engine.step()
    engine.step()
    with pytest.raises(EngineFailure, match="could not be made anew: out of memory"):
        engine.step()
    assert len(engine.abort_all(EngineFailure("the device is gone"))) == 1
    assert (engine.has_work(), engine.pool_stats().pages_used) == (False, 0)


def test_a_preempted_sequence_keeps_the_token_that_was_on_its_way():
    """Two that the pool cannot hold together: what one of them draws in the step in which it gives
    its pages back is a token of its answer, and is not drawn again."""
    runner = FakeRunner(num_pages=5, page_size=8)
    engine = make_engine(runner, eos_token_ids=(), max_model_len=33)
    prompts = {"a": (1, 2, 3, 4, 5, 6, 7), "b": (9, 8, 7, 6, 5, 4, 3)}
    requests = [request(prompt, name=name, max_tokens=20) for name, prompt in prompts.items()]
    answers = run_all(engine, requests)
    assert engine.pool_stats().num_preemptions >= 1
    for name, prompt in prompts.items():
        assert answers[name, 0].token_ids == greedy_continuation(prompt, 20)
    num_drawn = sum(batch.num_sampled for batch in runner.batches)
    assert num_drawn == 40
    assert runner.faults == []


def test_versions_of_the_weights_take_turns_and_never_share_a_step():
    runner = FakeRunner()
    engine = make_engine(runner, eos_token_ids=())
    engine.add_version(ModelVersion("v2", None, frozenset({EOS})))
    for version in ("v1", "v2"):
        engine.serve_version(version)
        for i in range(2):
            engine.submit(request((i, 3), name=f"{version} {i}", max_tokens=6))
    answers = run_all(engine)
    for version in ("v1", "v2"):
        for i in range(2):
            assert answers[f"{version} {i}", 0].token_ids == greedy_continuation((i, 3), 6)
    versions = [batch.version for batch in runner.batches]
    assert versions[:8] == ["v1", "v2"] * 4
    assert runner.faults == []


class InterruptedRunner(FakeRunner):
    """Ctrl-C arrives once in call `number` of `where`."""

    def __init__(self, where: str, number: int):
        super().__init__()
        self.left = {where: number}

    def dispatch(self, batch: Batch) -> Any:
        self.interrupt("dispatch")
        return super().dispatch(batch)

    def collect(self, pending: Any) -> StepResult:
        self.interrupt("collect")
        return super().collect(pending)

    def interrupt(self, where: str) -> None:
        self.left[where] = self.left.get(where, -1) - 1
        if self.left[where] == 0:
            raise KeyboardInterrupt


def run_on(engine: Any, answers: Answers) -> None:
    while engine.has_work():
        answers.add(engine.step().outputs)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_step_that_was_waited_for_when_ctrl_c_came_is_read_later(number):
    engine = make_engine(InterruptedRunner("collect", number), eos_token_ids=())
    engine.submit(request(max_tokens=6))
    answers = Answers()
    with pytest.raises(KeyboardInterrupt):
        run_on(engine, answers)
    run_on(engine, answers)
    assert answers["r", 0].token_ids == greedy_continuation(PROMPT, 6)
    assert engine.pool_stats().pages_used == 0


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_dispatch_that_ctrl_c_broke_off_is_a_failed_try_of_what_was_in_it(number):
    runner = InterruptedRunner("dispatch", number)
    engine = make_engine(runner, eos_token_ids=())
    engine.submit(request(max_tokens=6))
    answers = Answers()
    with pytest.raises(KeyboardInterrupt):
        run_on(engine, answers)
    run_on(engine, answers)
    assert answers["r", 0].token_ids == greedy_continuation(PROMPT, 6)
    assert engine.pool_stats().pages_used == 0
    again = run_all(engine, [request(name="next")])
    assert again["next", 0].token_ids == greedy_continuation(PROMPT, 4)
    assert runner.faults == []


def test_outputs_of_a_call_that_was_broken_off_come_with_the_next():
    clock = FakeClock()
    engine = make_engine(InterruptedRunner("collect", 1), eos_token_ids=(), clock=clock)
    engine.submit(Request("late", PROMPT, SamplingParams(max_tokens=9), deadline_s=5.0))
    engine.submit(request(max_tokens=2))
    engine.step()
    clock.now = 6.0
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    answers = Answers()
    run_on(engine, answers)
    assert answers["late", 0].finish_reason is FinishReason.TIMEOUT
    assert answers["r", 0].token_ids == greedy_continuation(PROMPT, 2)


def test_a_step_that_nobody_waits_for_has_no_duration():
    """The last step of an answer that ended early is read when the next request comes."""
    clock = FakeClock()
    engine = make_engine(FakeRunner(scripts={PROMPT: [EOS]}), clock=clock)
    run_all(engine, [request()])
    clock.now = 3600.0
    engine.submit(request((9, 9), name="next"))
    stats = [engine.step().stats for _ in range(3)]
    assert stats[0] is None
    assert [s.duration_s for s in stats[1:] if s] == [0.0, 0.0]


class TimedRunner(FakeRunner):
    """Its steps take a while."""

    def __init__(self, clock: FakeClock, step_s: float):
        super().__init__()
        self._clock, self._step_s = clock, step_s

    def collect(self, pending: Any) -> StepResult:
        self._clock.now += self._step_s
        return super().collect(pending)


@pytest.mark.parametrize(("step_s", "num_under_way"), [(0.01, 1), (0.1, 0)])
def test_nothing_is_dispatched_behind_a_step_while_steps_take_long(
    step_s: float, num_under_way: int
):
    """So who comes during a step is in the next one."""
    clock = FakeClock()
    runner = TimedRunner(clock, step_s)
    engine = make_engine(runner, clock=clock, eos_token_ids=())
    engine.submit(request(max_tokens=8))
    answers = Answers()
    for _ in range(4):
        answers.add(engine.step().outputs)
    assert len(runner.batches) - len(answers["r", 0].token_ids) == num_under_way
    engine.submit(request((9, 9), name="next"))
    engine.step()
    assert runner.batches[-1].num_seqs == 2

"""The fake runner notices what a device would suffer in silence, or tests with it prove nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.engine import Engine
from jaxinfer.errors import EngineFailure
from jaxinfer.scheduling.batch import Batch
from jaxinfer.scheduling.request import FinishReason, Request
from tests.fakes import (
    FakeRunner,
    FakeTokenizer,
    batch_faults,
    greedy_continuation,
    make_engine,
    next_token,
    run_all,
)

GREEDY = SamplingParams(max_tokens=6, temperature=0)


class Tampering(FakeRunner):
    """Changes a batch before it runs."""

    def __init__(self, tamper, at_step: int):
        super().__init__()
        self._tamper, self._at_step = tamper, at_step

    def dispatch(self, batch: Batch):
        if len(self.batches) == self._at_step:
            batch = dataclasses.replace(batch, **self._tamper(batch))
        return super().dispatch(batch)


def answer(
    runner: FakeRunner,
    prompt: tuple[int, ...] = tuple(range(20)),
    sampling: SamplingParams = GREEDY,
) -> list[int]:
    engine: Engine = make_engine(runner, eos_token_ids=())
    return run_all(engine, [Request("r", prompt, sampling)])["r", 0].token_ids


def changed(array: np.ndarray, place: tuple[int, ...], value: int) -> np.ndarray:
    copy = array.copy()
    copy[place] = value
    return copy


def test_the_next_token_can_be_computed_by_hand():
    assert next_token([5, 7]) == 1 * 5 + 2 * 7 + 2
    assert greedy_continuation([5, 7], 2) == [21, (1 * 5 + 2 * 7 + 3 * 21 + 3) % 101]


def test_an_honest_batch_has_no_faults():
    runner = FakeRunner()
    assert answer(runner) == greedy_continuation(range(20), 6)
    assert runner.faults == []


@pytest.mark.parametrize(
    ("tamper", "at_step"),
    [
        (lambda b: {"page_table": changed(b.page_table, (0, 1), 40)}, 1),
        (lambda b: {"page_table": changed(b.page_table, (0, 0), 5000)}, 1),
        (lambda b: {"page_table": changed(b.page_table, (3, 1), 1)}, 1),
        (lambda b: {"positions": changed(b.positions, (0,), 3)}, 1),
        (lambda b: {"positions": changed(b.positions, (7,), 0)}, 1),
        (lambda b: {"token_ids": b.token_ids.astype(np.int64)}, 1),
        (lambda b: {"rows": changed(b.rows, (3,), 2)}, 0),
        (lambda b: {"positions": changed(b.positions, (3,), 2)}, 0),
        (lambda b: {"sample_at": changed(b.sample_at, (0,), 25)}, 0),
        (lambda b: {"sample_at": changed(b.sample_at, (2,), 1)}, 0),
        (lambda b: {"blocks": None}, 0),
        (
            lambda b: {
                "blocks": dataclasses.replace(
                    b.blocks, wide=changed(b.blocks.wide, (0, 0), b.bucket)
                )
            },
            0,
        ),
        (
            lambda b: {
                "sampling": dataclasses.replace(
                    b.sampling, positions=changed(b.sampling.positions, (0,), 3)
                )
            },
            1,
        ),
    ],
)
def test_a_batch_that_was_tampered_with_is_noticed(tamper, at_step):
    runner = Tampering(tamper, at_step)
    answer(runner)
    assert runner.faults


def tampered(name: str, place: tuple[int, ...], value: int):
    """Changes a field of the batch's penalties."""

    def tamper(batch: Batch):
        penalties = batch.sampling.penalties
        assert penalties is not None
        wrong = {name: changed(getattr(penalties, name), place, value)}
        penalties = dataclasses.replace(penalties, **wrong)
        return {"sampling": dataclasses.replace(batch.sampling, penalties=penalties)}

    return tamper


@pytest.mark.parametrize("at_step", [0, 1, 3])
@pytest.mark.parametrize(
    "tamper",
    [
        tampered("history", (0, 4), 77),
        tampered("num_known", (0,), 19),
        tampered("num_known", (0,), 0),
        tampered("num_known", (5,), 3),
        tampered("num_prompt", (0,), 90),
        tampered("from_seat", (0,), 5),
        tampered("from_seat", (1,), 0),
        tampered("presence", (3,), 1),
        tampered("bias_ids", (4, 0), 1),
        lambda b: {"sampling": dataclasses.replace(b.sampling, penalties=None)},
        lambda b: {"sampling": dataclasses.replace(b.sampling, variant="full")},
    ],
)
def test_penalties_that_were_tampered_with_are_noticed(tamper, at_step):
    runner = Tampering(tamper, at_step)
    answer(runner, sampling=dataclasses.replace(GREEDY, presence_penalty=0.5))
    assert runner.faults


@pytest.mark.parametrize("at_step", [1, 3])
def test_a_newest_token_that_is_left_out_or_counted_twice_is_noticed(at_step):
    for field in (tampered("from_seat", (0,), -1), tampered("num_known", (0,), 20 + at_step)):
        runner = Tampering(field, at_step)
        answer(runner, sampling=dataclasses.replace(GREEDY, presence_penalty=0.5))
        assert runner.faults


def test_penalties_add_to_the_token():
    penalized = dataclasses.replace(GREEDY, presence_penalty=0.5)
    runner = FakeRunner()
    tokens, plain = answer(runner, sampling=penalized), greedy_continuation(range(20), 6)
    assert tokens[0] == plain[0]
    assert tokens[1] == (plain[1] + 4) % 101
    assert runner.faults == []


def test_a_wrong_page_gives_another_token():
    runner = Tampering(lambda b: {"page_table": changed(b.page_table, (0, 0), 50)}, 1)
    tokens, right = answer(runner), greedy_continuation(range(20), 6)
    assert tokens[0] == right[0]
    assert tokens[1] != right[1]


def test_a_wrong_token_is_remembered_in_its_page():
    runner = Tampering(lambda b: {"token_ids": changed(b.token_ids, (2,), 77)}, 0)
    prompt = [0, 1, 77, *range(3, 20)]
    assert answer(runner) == greedy_continuation(prompt, 6)


def test_a_script_is_said_as_long_as_it_lasts_and_then_the_formula():
    runner = FakeRunner(scripts={(1, 2): [50, 60]})
    assert answer(runner, (1, 2)) == [50, 60, *greedy_continuation((1, 2, 50, 60), 4)]


def test_a_poisoned_context_is_not_a_number():
    runner = FakeRunner(poison=frozenset({3}))
    engine = make_engine(runner)
    ended = run_all(engine, [Request("r", (1, 3), GREEDY)])["r", 0]
    assert ended.finish_reason is FinishReason.ERROR


def test_a_step_fails_where_it_was_told_to():
    runner = FakeRunner(fail_at=frozenset({2}))
    engine = make_engine(runner, eos_token_ids=(), max_retries=0)
    ended = run_all(engine, [Request("r", (1, 3), GREEDY)])["r", 0]
    assert (len(ended.token_ids), type(ended.error)) == (2, EngineFailure)


def test_the_hook_sees_every_batch_before_it_runs():
    seen: list[str] = []
    runner = FakeRunner(on_step=lambda batch: seen.append(batch.kind))
    answer(runner)
    assert seen == ["prefill", *["decode"] * 5]
    assert [batch.kind for batch in runner.batches] == seen
    assert all(batch_faults(batch) == [] for batch in runner.batches)


def test_draws_depend_on_seed_and_position():
    def drawn(seed: int) -> list[int]:
        sampling = SamplingParams(max_tokens=9, temperature=1.0, seed=seed, ignore_eos=True)
        return run_all(make_engine(), [Request("r", (1, 2), sampling)])["r", 0].token_ids

    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(1) != greedy_continuation((1, 2), 9)


def test_the_fake_tokenizer_reads_what_it_writes():
    tokenizer = FakeTokenizer()
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert tokenizer.decode([0, 100, 1]) == "ab"
    assert tokenizer.decode([0, 100], skip_special_tokens=False) == "a<eos>"

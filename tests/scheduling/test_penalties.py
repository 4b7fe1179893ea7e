"""What a batch says about penalties: each row's own tokens, up to the newest, wherever it is."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from jaxinfer.config import MAX_LOGIT_BIAS, SamplingParams
from jaxinfer.scheduling.batch import Batch, PenaltyBatch
from jaxinfer.scheduling.batch_builder import BatchBuilder
from jaxinfer.scheduling.buckets import Buckets
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.running_table import RunningTable
from jaxinfer.scheduling.sequence import Sequence
from jaxinfer.versions import ModelVersion
from tests.fakes import (
    FakeRunner,
    batch_faults,
    make_engine,
    next_token,
    run_all,
    shift_by_penalties,
)

ALL: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": -0.25,
    "repetition_penalty": 1.5,
    "logit_bias": {3: 1.0},
    "temperature": 0.0,
}
BUCKETS = Buckets.for_limits(
    max_num_seqs=16, max_num_batched_tokens=64, max_model_len=200, page_size=16
)


class World:
    """Sequences that sit at a table."""

    def __init__(self) -> None:
        self.table = RunningTable(16, BUCKETS.max_pages_per_seq, 16)
        self.builder = BatchBuilder(BUCKETS, self.table)

    def sit(self, token_ids: list[int], num_scheduled: int, **sampling: Any) -> Sequence:
        greedy: dict[str, Any] = {"temperature": 0.0}
        request = Request("r", tuple(token_ids), SamplingParams(**greedy | sampling))
        new = Sequence(request, index=0, seed=0, version="v")
        new.max_total_tokens = 200
        new.page_table = [1] * 13
        self.table.sit(new, num_scheduled)
        return new

    def draw(self, *sequences: Sequence) -> None:
        """A step draws a token of each, which nobody has read yet."""
        for each in sequences:
            self.table.num_scheduled[each.seat] += 1
            self.table.has_drawn[each.seat] = True

    def decode(self, *sequences: Sequence) -> tuple[list[Sequence], Batch]:
        rows, batch = self.builder.decode(np.array([s.seat for s in sequences], np.intp), "v")
        assert batch_faults(batch) == []
        return self.table.sequences(rows.seats), batch

    def prefill(self, *chunks: tuple[Sequence, int]) -> tuple[list[int], Batch]:
        """The rows that are sampled."""
        others, num_new = [s for s, _ in chunks], [n for _, n in chunks]
        rows, batch = self.builder.prefill(np.empty(0, np.intp), others, num_new, "v")
        return rows.sampled.tolist(), batch


def penalties_in(batch: Batch) -> PenaltyBatch:
    assert batch.sampling.variant == "penalized"
    assert batch.sampling.penalties is not None
    return batch.sampling.penalties


def known(penalties: PenaltyBatch, row: int) -> list[int]:
    return penalties.history[row, : int(penalties.num_known[row])].tolist()


def expected_tokens(prompt: tuple[int, ...], sampling: SamplingParams, number: int) -> list[int]:
    """What the fake model says, token by token."""
    context = list(prompt)
    for _ in range(number):
        shift = shift_by_penalties(context, len(prompt), sampling)
        context.append((next_token(context) + shift) % 101)
    return context[len(prompt) :]


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"temperature"}))
@pytest.mark.parametrize("others", [{}, {"temperature": 1.0, "top_k": 3, "logprobs": 5}])
def test_each_of_them_asks_for_the_penalized_sampler(name: str, others: dict[str, Any]):
    world = World()
    _, batch = world.decode(world.sit([1, 2], 1, **{name: ALL[name]} | others), world.sit([4], 0))
    assert batch.sampling.variant == "penalized"


def test_neutral_values_ask_for_nothing():
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": -0.0,
        "repetition_penalty": 1,
        "logit_bias": {},
    }
    world = World()
    _, batch = world.decode(world.sit([1, 2], 1, **neutral))
    assert (batch.sampling.variant, batch.sampling.penalties) == ("greedy", None)


def test_a_row_carries_its_own_tokens_and_penalties_and_its_neighbour_none():
    world = World()
    plain, mine = world.sit([9, 9], 1), world.sit([5, 6, 7], 2, **ALL)
    ordered, batch = world.decode(mine, plain)
    assert ordered == [plain, mine]
    penalties = penalties_in(batch)
    assert [known(penalties, row) for row in range(8)] == [[], [5, 6, 7], *[[]] * 6]
    assert penalties.num_prompt.tolist() == [0, 3, *[0] * 6]
    assert penalties.from_seat.tolist() == [-1] * 8
    assert penalties.presence.tolist() == [0, 0.5, *[0] * 6]
    assert penalties.frequency.tolist() == [0, -0.25, *[0] * 6]
    assert penalties.repetition.tolist() == [1, 1.5, *[1] * 6]
    assert penalties.history.shape == (8, 256)
    assert penalties.bias_ids.shape == penalties.bias.shape == (8, MAX_LOGIT_BIAS)
    assert penalties.bias_ids[1, :2].tolist() == [3, -1]
    assert penalties.bias[1, :2].tolist() == [1, 0]


def test_a_bias_alone_needs_no_tokens():
    world = World()
    _, batch = world.decode(world.sit([5, 6], 1, logit_bias={7: -100, 2: 0.5}))
    penalties = penalties_in(batch)
    assert known(penalties, 0) == []
    assert penalties.bias_ids[0, :3].tolist() == [2, 7, -1]
    assert penalties.bias[0, :3].tolist() == [0.5, -100, 0]


def test_a_token_that_was_not_read_comes_from_the_seat_and_is_counted_once():
    world = World()
    mine = world.sit([5, 6, 7], 2, **ALL)
    world.draw(mine)
    penalties = penalties_in(world.decode(mine)[1])
    assert (known(penalties, 0), penalties.from_seat[0]) == ([5, 6, 7], mine.seat)
    mine.token_ids.append(8)  # it was read; the device still has it too
    penalties = penalties_in(world.decode(mine)[1])
    assert (known(penalties, 0), penalties.from_seat[0]) == ([5, 6, 7, 8], -1)
    assert penalties.num_prompt[0] == 3


def test_step_after_step_takes_along_what_was_read_meanwhile():
    world = World()
    plain, mine = world.sit([9], 0), world.sit([5, 6, 7], 2, **ALL)
    world.decode(mine, plain)
    for step in range(150):
        world.draw(plain, mine)
        batch = world.decode(plain, mine)[1]
        penalties = penalties_in(batch)
        assert batch.sampling.positions[:2].tolist() == [2 + step, 4 + step]
        assert known(penalties, 1) == [5, 6, 7, *range(step)]
        assert penalties.from_seat.tolist() == [-1, mine.seat, *[-1] * 6]
        assert known(penalties, 0) == []
        mine.token_ids.append(step)
        plain.token_ids.append(0)


def test_a_batch_is_not_changed_by_the_next():
    world = World()
    mine = world.sit([5, 6, 7], 2, **ALL)
    _, batch = world.decode(mine)
    before = penalties_in(batch).history.copy()
    mine.token_ids.append(1)
    world.draw(mine)
    world.decode(mine)
    np.testing.assert_array_equal(penalties_in(batch).history, before)


def test_only_sampled_rows_of_a_prefill_step_have_penalties():
    world = World()
    whole, part = world.sit([4, 5], 0, **ALL), world.sit(list(range(40)), 0, **ALL)
    sampled, batch = world.prefill((part, 10), (whole, 2))
    assert sampled == [1]
    assert batch_faults(batch) == []
    assert known(penalties_in(batch), 0) == [4, 5]
    sampled, batch = world.prefill((part, 10))
    assert (sampled, batch.sampling.penalties) == ([], None)


@pytest.mark.parametrize(("asked", "kept"), [(1e-30, 1e-6), (10**400, 1e6), (0.5, 0.5)])
def test_a_repetition_penalty_stays_where_logits_stay_finite(asked: float, kept: float):
    world = World()
    _, batch = world.decode(world.sit([5], 0, repetition_penalty=asked))
    assert penalties_in(batch).repetition[0] == np.float32(kept)


def test_the_longest_sequence_fits_into_a_history():
    world = World()
    mine = world.sit([1] * 198, 197, **ALL)
    mine.token_ids = array("i", [1] * 199)
    world.draw(mine)
    assert known(penalties_in(world.decode(mine)[1]), 0) == [1] * 199


@pytest.mark.parametrize("fields", [{k: ALL[k]} for k in ALL if k != "temperature"] + [ALL])
def test_answers_are_what_the_formula_says(fields: dict[str, Any]):
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20}
    sampling = SamplingParams(**greedy | fields)
    runner = FakeRunner()
    engine = make_engine(runner, eos_token_ids=())
    answers = run_all(engine, [Request("a", (5, 7), sampling), Request("b", (5,) * 20, sampling)])
    assert answers["a", 0].token_ids == expected_tokens((5, 7), sampling, 20)
    assert answers["b", 0].token_ids == expected_tokens((5,) * 20, sampling, 20)
    assert runner.faults == []


def test_a_preempted_and_resumed_sequence_counts_all_its_tokens_once():
    sampling = SamplingParams(**ALL, max_tokens=30)
    runner = FakeRunner(num_pages=14, page_size=4)
    engine = make_engine(runner, eos_token_ids=(), max_model_len=64)
    prompts = [(*range(9), i) for i in range(6)]
    answers = run_all(engine, [Request(str(i), p, sampling) for i, p in enumerate(prompts)])
    assert engine.pool_stats().num_preemptions > 0
    for i, prompt in enumerate(prompts):
        assert answers[str(i), 0].token_ids == expected_tokens(prompt, sampling, 30)
    assert runner.faults == []


def test_a_sequence_that_sits_a_step_out_counts_its_newest_token_once():
    """Two versions take turns: when a row goes on, its token is in its seat and known as well."""
    sampling = SamplingParams(**ALL, max_tokens=12)
    runner = FakeRunner()
    engine = make_engine(runner, eos_token_ids=())
    engine.submit(Request("old", (5, 7), sampling))
    engine.add_version(ModelVersion("v2", None, frozenset()))
    engine.serve_version("v2")
    engine.submit(Request("new", (6, 8), sampling))
    answers = run_all(engine)
    assert answers["old", 0].token_ids == expected_tokens((5, 7), sampling, 12)
    assert answers["new", 0].token_ids == expected_tokens((6, 8), sampling, 12)
    assert runner.faults == []


def test_a_seat_that_changed_hands_carries_nothing_over():
    sampling = SamplingParams(**ALL, max_tokens=5)
    plain = SamplingParams(temperature=0.0, max_tokens=5)
    runner = FakeRunner()
    engine = make_engine(runner, eos_token_ids=(), max_num_seqs=1)
    order = [sampling, plain, sampling, sampling, plain]
    requests = [Request(str(i), (i, 7), each) for i, each in enumerate(order)]
    answers = run_all(engine, requests)
    for request in requests:
        want = expected_tokens(request.token_ids, request.sampling, 5)
        assert answers[request.request_id, 0].token_ids == want
    assert runner.faults == []

"""What exactness costs, measured on a tiny model."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bench.exactness import constraints
from bench.exactness.constraints import ROWS, DecodeSteps, Model, explain, metric, time_rows
from bench.table import LABEL_WIDTH, METRICS
from jaxinfer.config import MIN_ROWS
from jaxinfer.models.registry import decoder_for
from tests.tiny import tiny_config, write_checkpoint

SOME = (2, MIN_ROWS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny") / "model")
    return constraints.load(str(folder), folder)


@pytest.fixture(scope="module")
def steps(model: Model) -> DecodeSteps:
    return DecodeSteps(model)


def test_a_step_has_exactly_as_many_rows_as_are_asked_for(model: Model, steps: DecodeSteps):
    for rows in SOME:
        assert steps(rows).shape == (rows, model.decoder.config.vocab_size)


def test_fewer_rows_compute_the_same_numbers(steps: DecodeSteps):
    want = steps(MIN_ROWS)
    for rows in SOME:
        np.testing.assert_allclose(steps(rows), want[:rows], atol=1e-4)


def test_a_step_of_the_smallest_bucket_is_not_among_the_inexact(steps: DecodeSteps):
    assert set(constraints.inexact_rows(steps, SOME)) <= set(SOME) - {MIN_ROWS}


def test_all_numbers_of_rows_are_timed(steps: DecodeSteps):
    ticks = itertools.count()
    figures = time_rows(steps, lambda: next(ticks) / 2, SOME)
    assert figures == {metric(rows): 0.5 for rows in SOME}


def test_each_number_of_rows_has_a_line_in_the_table():
    for rows in ROWS:
        assert len(METRICS[metric(rows)].label) <= LABEL_WIDTH


def test_each_constraint_is_explained_in_one_line():
    def words(**changes: object) -> list[str]:
        return list(explain(decoder_for(tiny_config(**changes), dtype=np.dtype("float32")), [1, 7]))

    rows, heads, norms = words()
    assert "smallest" in rows
    assert rows.endswith("on this machine: 1, 7.")
    assert "16 is padded to 64" in heads
    assert "4.00 times" in heads
    assert "folded by halves" in norms
    _, heads, norms = words(head_dim=64, hidden_size=576)
    assert "nothing is padded" in heads
    assert "the compiler's own" in norms

"""What SamplingParams and the engine take for penalties and logit_bias, and what they refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxinfer.config import MAX_LOGIT_BIAS, SamplingParams
from jaxinfer.errors import InvalidRequest
from jaxinfer.scheduling.request import Request
from tests.fakes import VOCAB_SIZE, FakeRunner, make_engine, run_all

NOT_NUMBERS = [float("nan"), float("inf"), -float("inf"), True, False, "1", None, [1], 1j]


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [-2, -1.5, 0, 2.0])
def test_openais_penalties_go_from_minus_2_to_2(name: str, value: Any):
    assert SamplingParams(**{name: value}).has_penalties == (value != 0)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [-2.1, 2.1, 10**400, *NOT_NUMBERS])
def test_other_penalties_are_refused_by_name(name: str, value: Any):
    with pytest.raises(InvalidRequest, match=rf"{name} must be a number in \[-2, 2\]") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("value", [1e-9, 0.5, 1, 1.0, 3, 10**400])
def test_a_repetition_penalty_is_any_positive_number(value: float):
    assert SamplingParams(repetition_penalty=value).has_penalties == (value != 1)


@pytest.mark.parametrize("value", [0, 0.0, -0.0, -1, *NOT_NUMBERS])
def test_other_repetition_penalties_are_refused_by_name(value: Any):
    expected = r"repetition_penalty must be a number in \(0, inf\)"
    with pytest.raises(InvalidRequest, match=expected) as caught:
        SamplingParams(repetition_penalty=value)
    assert caught.value.param == "repetition_penalty"


@pytest.mark.parametrize(
    "bias", [{7: 1, 3: -100}, {"7": 1.0, "3": -100}, {"007": 1, 3: -100}, ((7, 1), (3, -100))]
)
def test_a_logit_bias_is_kept_as_pairs_in_order_of_the_ids(bias: Any):
    sampling = SamplingParams(logit_bias=bias)
    assert sampling.bias_pairs == ((3, -100), (7, 1))
    assert not sampling.has_penalties
    assert dataclasses.replace(sampling, n=2).bias_pairs == sampling.bias_pairs
    assert hash(sampling) == hash(SamplingParams(logit_bias={7: 1, 3: -100}))


def test_no_logit_bias_is_none_at_all():
    assert SamplingParams(logit_bias={}) == SamplingParams()
    assert SamplingParams().bias_pairs == ()


@pytest.mark.parametrize(
    "key", ["abc", "-1", -1, "", " 5", "5 ", "1.5", 1.5, "1_0", "+5", "٣", "9" * 5000, True, None]
)
def test_a_key_that_is_no_token_id_is_refused(key: Any):
    with pytest.raises(InvalidRequest, match="logit_bias must have token ids") as caught:
        SamplingParams(logit_bias={key: 1})
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize("value", [-100.1, 101, 10**400, *NOT_NUMBERS])
def test_a_bias_out_of_range_is_refused(value: Any):
    with pytest.raises(InvalidRequest, match=r"number in \[-100, 100\]") as caught:
        SamplingParams(logit_bias={5: value})
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize("bias", [5, "5", [1], [(1, 2, 3)], None, True])
def test_what_is_no_mapping_is_refused(bias: Any):
    with pytest.raises(InvalidRequest, match="logit_bias") as caught:
        SamplingParams(logit_bias=bias)
    assert caught.value.param == "logit_bias"


def test_a_token_may_be_named_once():
    with pytest.raises(InvalidRequest, match="names token 5 twice"):
        SamplingParams(logit_bias={"5": 1, "05": 1})


def test_a_logit_bias_has_at_most_300_entries():
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(300), 1)).bias_pairs) == MAX_LOGIT_BIAS
    with pytest.raises(InvalidRequest, match="has 301 entries; at most 300 are allowed"):
        SamplingParams(logit_bias=dict.fromkeys(range(301), 1))


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, 999999, 2**31, 10**17])
def test_the_engine_refuses_a_bias_past_its_vocabulary_and_its_neighbour_goes_on(token_id: int):
    runner = FakeRunner()
    engine = make_engine(runner)
    plain = SamplingParams(temperature=0, max_tokens=12)
    alone = run_all(make_engine(), [Request("a", (5, 7), plain)])["a", 0].token_ids
    engine.submit(Request("a", (5, 7), plain))
    engine.step()
    with pytest.raises(InvalidRequest, match="logit_bias must hold") as caught:
        engine.submit(Request("b", (5, 7), SamplingParams(logit_bias={5: 1, token_id: 5})))
    assert caught.value.param == "logit_bias"
    assert run_all(engine)["a", 0].token_ids == alone
    assert runner.faults == []
    assert {batch.sampling.variant for batch in runner.batches} == {"greedy"}


def test_the_last_token_of_the_vocabulary_may_have_a_bias():
    engine = make_engine()
    engine.submit(Request("a", (5,), SamplingParams(logit_bias={VOCAB_SIZE - 1: 5})))


def test_penalties_are_kept_in_single_precision():
    runner = FakeRunner()
    sampling = SamplingParams(temperature=0, max_tokens=1, presence_penalty=0.1)
    run_all(make_engine(runner), [Request("a", (5,), sampling)])
    penalties = runner.batches[0].sampling.penalties
    assert penalties is not None
    assert penalties.presence[0] == np.float32(0.1)

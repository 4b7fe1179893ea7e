"""What one choice gave, and the words for a difference."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.exactness.trace import Trace, difference
from jaxinfer.outputs import RequestOutput, TokenLogprob
from jaxinfer.scheduling.request import FinishReason


def trace(*token_ids: int, logprob: float = -0.5, top: tuple[tuple[int, float], ...] = ()) -> Trace:
    number = len(token_ids)
    return Trace(list(token_ids), [logprob] * number, [top] * number)


def after(x: float, steps: int = 1) -> float:
    """The float32 so many units in the last place further."""
    return float((np.float32(x).view(np.int32) + steps).view(np.float32))


def test_outputs_are_joined():
    joined = Trace()
    joined.add(RequestOutput("r", 0, "a", (5,), (TokenLogprob(5, -0.25, ((5, -0.25),)),)))
    joined.add(RequestOutput("r", 0, "", (6,), (TokenLogprob(6, -1.0),), FinishReason.LENGTH))
    assert joined.token_ids == [5, 6]
    assert joined.logprobs == [-0.25, -1.0]
    assert joined.tops == [((5, -0.25),), ()]
    assert joined.finish_reason is FinishReason.LENGTH
    assert len(joined) == 2


def test_equal_traces_do_not_differ():
    assert difference(trace(1, 2, 3), trace(1, 2, 3)) is None
    assert difference(Trace(), Trace()) is None
    nan = trace(1, logprob=math.nan)
    assert difference(nan, nan) is None


@pytest.mark.parametrize(
    ("got", "words"),
    [
        (trace(1, 2), "2 tokens, not 3"),
        (trace(1, 2, 3, 4), "4 tokens, not 3"),
        (trace(1, 9, 3), "token 1 is 9, not 2"),
        (
            trace(1, 2, 3, logprob=after(-0.5)),
            "logprob of token 0 is -0.50000006, not -0.5",
        ),
        (trace(1, 2, 3, top=((4, -0.5),)), "likeliest of token 0 are ((4, -0.5),), not ()"),
    ],
)
def test_the_first_difference_is_named(got: Trace, words: str):
    assert difference(got, trace(1, 2, 3)) == words


def test_the_sign_of_a_zero_is_a_difference():
    assert difference(trace(1, logprob=-0.0), trace(1, logprob=0.0)) is not None


def test_the_last_bit_of_a_likeliest_token_is_a_difference():
    tops = ((4, -0.5), (7, -2.0)), ((4, -0.5), (7, after(-2.0)))
    assert difference(trace(1, top=tops[0]), trace(1, top=tops[1])) is not None


def test_only_the_places_asked_for_are_compared():
    got, want = trace(1, 9, 3), trace(1, 2, 3, 4)
    assert difference(got, want, (0, 2)) is None
    assert difference(got, want, (0, 1)) == "token 1 is 9, not 2"
    assert difference(got, want, (3,)) == "3 tokens, not 4"


def test_the_first_tokens_and_two_traces_in_a_row():
    whole = trace(1, 2, 3, 4)
    assert difference(whole.first(2).followed_by(trace(3, 4)), whole) is None
    assert len(whole.first(0)) == 0
    assert len(whole.first(9)) == 4

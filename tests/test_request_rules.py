"""Tests of what is refused before it is queued."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.errors import ContextLengthExceeded, InvalidRequest
from jaxinfer.request_rules import MAX_PRIORITY, RequestRules
from jaxinfer.scheduling.length_limit import LengthLimit
from jaxinfer.scheduling.request import Request

RULES = RequestRules(50, LengthLimit(max_model_len=16, num_pool_tokens=64), has_tokenizer=False)


def request(token_ids: Any = (1, 2), *, priority: int = 0, **sampling: Any) -> Request:
    return Request("r", token_ids, SamplingParams(**sampling), priority=priority)


@pytest.mark.parametrize(
    "good",
    [
        request(max_tokens=14),
        request((0, 49), max_tokens=1),
        request(priority=-MAX_PRIORITY, max_tokens=1),
        request(max_tokens=1, stop_token_ids=(49,), logit_bias={49: 1.0}),
        request((1,) * 15, max_tokens=None),
    ],
)
def test_what_fits_is_taken(good: Request):
    RULES.check(good)


@pytest.mark.parametrize(
    ("bad", "field", "words"),
    [
        (request(priority=MAX_PRIORITY + 1), "priority", "-1000 to 1000; got 1001"),
        (request(()), "prompt", "at least 1 token"),
        (request((1, 50), max_tokens=1), "prompt", r"\[0, 50\); got 50"),
        (request((-1, 3), max_tokens=1), "prompt", r"got -1"),
        (request((1, 2.5), max_tokens=1), "prompt", "token ids"),
        (request((2**40,), max_tokens=1), "prompt", "token ids"),
        (request(max_tokens=1, stop_token_ids=(50,)), "stop_token_ids", r"\[0, 50\)"),
        (request(max_tokens=1, logit_bias={50: 1.0}), "logit_bias", r"\[0, 50\)"),
        (request(max_tokens=1, stop=("a",)), "stop", "need a tokenizer"),
    ],
)
def test_what_does_not_is_refused_by_its_name(bad: Request, field: str, words: str):
    with pytest.raises(InvalidRequest, match=words) as info:
        RULES.check(bad)
    assert info.value.param == field


@pytest.mark.parametrize("bad", [request((1,) * 16), request(max_tokens=15)])
def test_what_can_never_fit_is_too_long(bad: Request):
    with pytest.raises(ContextLengthExceeded):
        RULES.check(bad)


def test_the_length_is_checked_before_the_ids_are_read():
    with pytest.raises(ContextLengthExceeded):
        RULES.check(request((99,) * 17, max_tokens=1))


def test_a_stop_string_is_fine_where_there_is_text():
    rules = RequestRules(RULES.vocab_size, RULES.limit, has_tokenizer=True)
    rules.check(request(max_tokens=1, stop=("a",)))

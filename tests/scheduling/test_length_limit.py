"""Tests of what fits and what is refused at submission."""

from __future__ import annotations

import pytest

from jaxinfer.errors import ContextLengthExceeded
from jaxinfer.scheduling.length_limit import LengthLimit

MODEL = LengthLimit(max_model_len=20, num_pool_tokens=1000)
POOL = LengthLimit(max_model_len=1000, num_pool_tokens=20)


def test_a_prompt_and_its_output_may_fill_the_context():
    assert MODEL.total_tokens(15, 5) == 20


def test_without_max_tokens_the_rest_of_the_context_is_meant():
    assert MODEL.total_tokens(15, None) == 20


def test_without_max_tokens_the_pool_is_the_end_where_it_is_smaller():
    assert POOL.total_tokens(15, None) == 21


def test_the_last_token_needs_no_page():
    assert POOL.total_tokens(20, 1) == 21
    with pytest.raises(ContextLengthExceeded):
        POOL.total_tokens(21, 1)


@pytest.mark.parametrize("max_tokens", [None, 1, 10**9])
@pytest.mark.parametrize("num_prompt_tokens", [20, 21, 10**6])
def test_a_prompt_that_leaves_no_room_is_refused(num_prompt_tokens, max_tokens):
    with pytest.raises(
        ContextLengthExceeded, match=rf"prompt has {num_prompt_tokens} .* 19"
    ) as info:
        MODEL.total_tokens(num_prompt_tokens, max_tokens)
    assert (info.value.param, info.value.code) == ("prompt", "context_length_exceeded")


def test_a_prompt_one_below_the_context_may_have_one_token():
    assert MODEL.total_tokens(19, 1) == MODEL.total_tokens(19, None) == 20


def test_more_output_than_fits_is_refused_with_what_would_fit():
    with pytest.raises(ContextLengthExceeded, match=r"model holds 20.* at most 5 tokens") as info:
        MODEL.total_tokens(15, 6)
    assert info.value.param == "max_tokens"


def test_a_smaller_pool_ends_the_output_early():
    assert POOL.total_tokens(15, 7) == 21


def test_the_message_names_the_pool_when_the_pool_is_the_wall():
    with pytest.raises(ContextLengthExceeded, match="KV pool holds 21"):
        POOL.total_tokens(21, 7)


def test_a_cap_takes_the_place_of_max_tokens_and_refuses_nothing():
    assert MODEL.total_tokens(15, None, 3) == MODEL.total_tokens(15, 1000, 3) == 18
    assert MODEL.total_tokens(15, 1000, 100) == 20
    assert POOL.total_tokens(15, None, 100) == 21
    with pytest.raises(ContextLengthExceeded):
        MODEL.total_tokens(20, None, 3)

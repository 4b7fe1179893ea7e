"""Bodies into wire types, fields into SamplingParams."""

from __future__ import annotations

import logging

import msgspec
import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.errors import (
    ConfigError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from jaxinfer.server.protocol import (
    ACCEPTED_FIELDS,
    ChatRequest,
    CompletionRequest,
    parse,
    status_of,
)
from jaxinfer.server.replies import error_reply
from jaxinfer.server.sampling import chat_sampling, completion_sampling, usable_defaults
from jaxinfer.server.unsupported import NEUTRAL_VALUES, check_supported


def completion(**fields: object) -> CompletionRequest:
    return parse(msgspec.json.encode({"prompt": "a", **fields}), CompletionRequest)[0]


def chat(**fields: object) -> ChatRequest:
    return parse(msgspec.json.encode({"messages": [], **fields}), ChatRequest)[0]


def test_unknown_fields_are_named_and_known_ones_are_not():
    body = {"prompt": "a", "user": "u", "echo": False, "new_thing": 1, "n": 1}
    _, unknown = parse(msgspec.json.encode(body), CompletionRequest)
    assert unknown == {"new_thing"}


def test_no_field_is_both_supported_and_refused():
    for wire in (ChatRequest, CompletionRequest):
        assert not NEUTRAL_VALUES.keys() & set(wire.__struct_fields__)
    assert not NEUTRAL_VALUES.keys() & ACCEPTED_FIELDS


@pytest.mark.parametrize("name", sorted(NEUTRAL_VALUES))
def test_every_absent_feature_has_neutral_values_and_refuses_the_others(name: str):
    for value in NEUTRAL_VALUES[name]:
        assert check_supported({name: value}) == {name}
    for value in (3.5, "something", {"a": 1}, [1], True):
        with pytest.raises(InvalidRequest, match=name) as caught:
            check_supported({name: value})
        assert caught.value.param == name


def test_true_is_not_one():
    with pytest.raises(InvalidRequest):
        check_supported({"best_of": True})
    check_supported({"best_of": 1.0})


def test_whole_numbers_are_taken_for_floats():
    assert completion(temperature=1, top_p=1).temperature == 1.0


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("x"), 400),
        (ContextLengthExceeded("x"), 400),
        (ModelNotFound("x"), 404),
        (Overloaded("x", retry_after_s=3), 429),
        (Unavailable("x", retry_after_s=3), 503),
        (DeadlineExceeded("x"), 504),
        (EngineFailure("x"), 500),
        (ConfigError("x"), 500),
    ],
)
def test_every_error_has_one_status(error, status: int):
    assert status_of(error) == status
    assert error_reply(error).status_code == status


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0, "1"), (-5, "1"), (1.2, "2"), (60, "60"), (600, "60")]
)
def test_retry_after_is_a_whole_number_from_1_to_60(seconds: float, shown: str):
    for error in (Overloaded("x", retry_after_s=seconds), Unavailable("x", retry_after_s=seconds)):
        assert error_reply(error).headers["retry-after"] == shown


def test_only_a_500_asks_not_to_be_repeated():
    assert error_reply(EngineFailure("x")).headers["x-should-retry"] == "false"
    for error in (DeadlineExceeded("x"), Unavailable("x", retry_after_s=1), InvalidRequest("x")):
        assert "x-should-retry" not in error_reply(error).headers


def test_absent_fields_are_the_defaults_of_sampling_params():
    assert completion_sampling(completion(), {}, 100) == SamplingParams(max_tokens=16)
    assert chat_sampling(chat(), {}, 100) == SamplingParams(max_tokens=None)


def test_given_fields_win_over_the_models_defaults():
    defaults = {"temperature": 0.3, "top_p": 0.8, "top_k": 5}
    params = completion_sampling(completion(temperature=0, top_k=-1), defaults, 100)
    assert (params.temperature, params.top_p, params.top_k) == (0, 0.8, 0)


def test_every_sampling_field_is_passed_on():
    params = completion_sampling(
        completion(
            max_tokens=9,
            min_tokens=2,
            temperature=0.5,
            top_p=0.9,
            top_k=3,
            min_p=0.1,
            presence_penalty=0.5,
            frequency_penalty=-1,
            repetition_penalty=1.25,
            logit_bias={"8": 1, "7": -2.5},
            seed=-4,
            n=2,
            stop=["x"],
            stop_token_ids=[5],
            ignore_eos=True,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            logprobs=1,
        ),
        {},
        100,
    )
    assert params == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=-1,
        repetition_penalty=1.25,
        logit_bias={7: -2.5, 8: 1},
        seed=-4,
        n=2,
        stop=("x",),
        stop_token_ids=(5,),
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=1,
    )


def test_chat_logprobs_are_a_switch_and_a_number():
    assert chat_sampling(chat(), {}, 9).logprobs is None
    assert chat_sampling(chat(logprobs=False), {}, 9).logprobs is None
    assert chat_sampling(chat(logprobs=True), {}, 9).logprobs == 0
    assert chat_sampling(chat(logprobs=True, top_logprobs=4), {}, 9).logprobs == 4


def test_stop_may_be_one_string():
    assert completion_sampling(completion(stop="x"), {}, 9).stop == ("x",)


def test_stop_tokens_must_be_in_the_vocabulary():
    completion_sampling(completion(stop_token_ids=[99]), {}, 100)
    with pytest.raises(InvalidRequest, match="below the vocabulary's 100"):
        completion_sampling(completion(stop_token_ids=[100]), {}, 100)


def test_tokens_with_a_bias_must_be_in_the_vocabulary():
    completion_sampling(completion(logit_bias={"99": 1}), {}, 100)
    with pytest.raises(InvalidRequest, match="logit_bias must be below the vocabulary's 100"):
        completion_sampling(completion(logit_bias={"5": 1, "100": 1}), {}, 100)


def test_a_models_repetition_penalty_is_a_default_that_a_request_can_turn_off():
    defaults = usable_defaults({"repetition_penalty": 1.1})
    assert completion_sampling(completion(), defaults, 9).repetition_penalty == 1.1
    given = completion(repetition_penalty=1)
    assert not completion_sampling(given, defaults, 9).has_penalties
    assert usable_defaults({"repetition_penalty": -1}) == {}


def test_of_a_generation_config_only_usable_sampling_fields_count(caplog):
    caplog.set_level(logging.WARNING)
    config = {
        "temperature": 0.6,
        "top_p": 0,
        "top_k": 20,
        "do_sample": True,
        "eos_token_id": [2, 7],
        "repetition_penalty": 1.1,
        "max_new_tokens": 5,
        "min_p": None,
    }
    usable = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    assert usable_defaults(config) == usable
    assert "top_p" in caplog.text


def test_an_empty_generation_config_warns_of_nothing(caplog):
    assert usable_defaults({"repetition_penalty": None}) == {}
    assert not caplog.records

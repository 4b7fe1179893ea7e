"""What is told of a call's choices, and to whom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer.canary.facts import RequestFacts
from jaxinfer.config import SamplingParams
from jaxinfer.errors import EngineFailure, NotNumbers, Unavailable
from jaxinfer.outputs import RequestOutput
from jaxinfer.scheduling.request import FinishReason, Request
from jaxinfer.server.answered import Account, Answered, AnsweredChoice, repetition
from jaxinfer.stats import RequestStats

STATS = RequestStats(1, 0, 3, 0, 10.0, 10.1, 10.5, 11.0, "v2")
MODEL: Any = SimpleNamespace(version="v2")


def request(name: str, n: int = 1) -> Request:
    return Request(name, (1,), SamplingParams(n=n), arrival_s=10.0)


def output(
    name: str, text: str, reason: FinishReason | None = None, index: int = 0, **fields: Any
) -> RequestOutput:
    stats = None if reason is None else STATS
    return RequestOutput(
        name, index, text, tuple(map(ord, text)), (), reason, stats=stats, **fields
    )


class Ears:
    """Listens to an account of `requests`."""

    def __init__(self, *requests: Request):
        self.facts: list[RequestFacts] = []
        self.answered: list[Answered] = []
        self.account = Account(
            MODEL, requests, "k", on_request=self.facts.append, on_answered=self.answered.append
        )


@pytest.mark.parametrize(
    ("token_ids", "share"),
    [
        ([], 0.0),
        ([1, 1, 1], 0.0),
        ([1, 2, 3, 4, 5], 0.0),
        ([1, 1, 1, 1, 1], 0.5),  # of two 4-grams the second stood there
        ([1, 2, 3, 4, 1, 2, 3, 4], 0.2),  # of five the last
        ([7] * 103, 0.99),
    ],
)
def test_repetition_is_the_share_of_4_grams_that_stood_there_before(
    token_ids: list[int], share: float
):
    assert repetition(token_ids) == pytest.approx(share)


def test_a_choice_is_told_when_it_ends_and_a_request_when_all_its_choices_have():
    asked = request("r", n=2)
    ears = Ears(asked)
    ears.account.take(output("r", "aa"))
    assert not ears.facts
    ears.account.take(output("r", "aaa", FinishReason.STOP))
    ears.account.take(output("r", "b", index=1))
    assert [f.version for f in ears.facts] == ["v2"]
    assert not ears.answered
    ears.account.take(output("r", "", FinishReason.LENGTH, index=1))
    ears.account.leave()
    first, second = ears.facts
    assert first == RequestFacts("v2", FinishReason.STOP, 5, 0.5, 0.5, e2e_s=1.0, key="k")
    assert (second.finish, second.num_output_tokens) == (FinishReason.LENGTH, 1)
    choices = (
        AnsweredChoice((97,) * 5, "aaaaa", FinishReason.STOP),
        AnsweredChoice((98,), "b", FinishReason.LENGTH),
    )
    assert ears.answered == [Answered(MODEL, asked, choices)]


def test_what_was_open_when_the_client_left_was_aborted():
    ears = Ears(request("r"), request("s"))
    ears.account.take(output("r", "a", FinishReason.STOP))
    ears.account.take(output("s", "bc"))
    ears.account.leave()
    assert ears.facts[1] == RequestFacts("v2", FinishReason.ABORT, 2, 0.0, None, key="k")
    assert [a.request.request_id for a in ears.answered] == ["r"]


def test_a_dead_engine_fails_what_was_open_and_a_server_that_shuts_down_does_not():
    ears = Ears(request("r", n=2))
    ears.account.fail(Unavailable("the server shuts down", retry_after_s=1))
    assert not ears.facts
    ears.account.fail(EngineFailure("the engine stopped"))
    assert [f.finish for f in ears.facts] == [FinishReason.ERROR] * 2
    assert not ears.answered


def test_logits_that_were_not_numbers_are_told_apart():
    ears = Ears(request("r"))
    ears.account.take(output("r", "", FinishReason.ERROR, error=NotNumbers("no")))
    (facts,) = ears.facts
    assert (facts.finish, facts.is_not_numbers) == (FinishReason.ERROR, True)

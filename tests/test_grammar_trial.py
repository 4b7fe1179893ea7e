"""Grammars that would hang or end a process do so in another one, and the next is tried as ever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jaxinfer.errors import InvalidRequest
from jaxinfer.grammar_trial import GrammarTrial
from jaxinfer.guidance import Guidance
from jaxinfer.guided import Guided
from tests.fakes import VOCAB_SIZE
from tests.letters import LETTERS


@pytest.fixture(scope="module")
def trial() -> Iterator[GrammarTrial]:
    trial = GrammarTrial(LETTERS, VOCAB_SIZE, trial_s=1.0)
    yield trial
    trial.close()


def chain(length: int) -> dict[str, Any]:
    links = {
        f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(length)
    }
    return {"json_schema": {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {}}}}


ENDLESS = {"grammar": "start: R\nR: " + " & ".join(f"/[ab]*a[ab]{{{i}}}/" for i in range(40))}
DEADLY: dict[str, dict[str, Any]] = {
    "endless work": ENDLESS,
    "a chain of schemas": chain(2000),
}


@pytest.mark.parametrize("name", DEADLY)
def test_what_ends_the_process_is_refused_and_the_next_grammar_is_not(
    trial: GrammarTrial, name: str
):
    with pytest.raises(InvalidRequest, match="did not compile within 1 s on a stack of") as caught:
        trial(Guided.of(DEADLY[name]), "response_format")
    assert caught.value.param == "response_format"
    trial(Guided.of({"regex": "a"}), "guided")


@pytest.mark.parametrize(
    "rule", [{"regex": "a"}, {"json_object": True}, {"choice": ["a"]}, chain(20)]
)
def test_a_good_grammar_passes(trial: GrammarTrial, rule: Any):
    trial(Guided.of(rule), "guided")


def test_a_bad_grammar_comes_back_with_the_librarys_words(trial: GrammarTrial):
    with pytest.raises(InvalidRequest, match="guided_regex: not a usable regex") as got:
        trial(Guided.of({"regex": "(a"}), "guided_regex")
    assert got.value.param == "guided_regex"
    assert "unclosed group" in got.value.message


def test_a_grammar_is_tried_before_it_is_compiled(trial: GrammarTrial):
    guidance = Guidance(LETTERS, VOCAB_SIZE, trial=trial)
    with pytest.raises(InvalidRequest, match="did not compile"):
        guidance.compile(Guided.of(chain(2000)))
    assert not guidance.compile(Guided.of({"regex": "a"})).is_complete

"""Grammars by llguidance: what is admitted, when an answer is whole, what is refused, in time."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

import numpy as np
import pytest

from jaxinfer.constraint import Constraint, Mask
from jaxinfer.errors import EngineFailure, InvalidRequest
from jaxinfer.guidance import COMPILE_S, MASK_S, Guidance
from jaxinfer.guided import Guided
from tests.fakes import EOS, VOCAB_SIZE
from tests.letters import GUIDANCE, LETTERS, TEXTS
from tests.tiny_tokenizers import byte_fallback, byte_level, metaspace, unigram, wrapped


def compiled(guidance: Guidance = GUIDANCE, **rule: Any) -> Constraint:
    return guidance.compile(Guided.of(rule))


def ids_in(mask: Mask) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def admitted(constraint: Constraint, *, may_end: bool = True) -> set[str]:
    ids = ids_in(constraint.mask(may_end=may_end))
    return {"<eos>" if i == EOS else TEXTS[i] for i in ids}


def say(constraint: Constraint, text: str) -> Constraint:
    """Goes on by the tokens of `text`."""
    for token_id in LETTERS.encode(text):
        constraint.take(token_id)
        if not constraint.is_complete:
            constraint.prepare()
    return constraint


def test_a_regex_admits_what_it_says_and_is_complete_at_its_end():
    constraint = compiled(regex="[0-9]{2}x?")
    assert admitted(constraint) == set("0123456789")
    say(constraint, "4")
    assert not constraint.is_complete
    say(constraint, "2")
    assert admitted(constraint) == {"x", "<eos>"}
    assert not constraint.is_complete
    assert say(constraint, "x").is_complete


def test_an_end_token_ends_an_answer_that_may_go_on():
    constraint = say(compiled(regex="a+"), "aa")
    assert admitted(constraint) == {"a", "<eos>"}
    assert admitted(constraint, may_end=False) == {"a"}
    constraint.take(EOS)
    assert constraint.is_complete


def test_an_end_that_is_forced_is_admitted_whoever_forbids_it():
    constraint = compiled(grammar='start: "a" | ""')
    assert admitted(constraint, may_end=False) == {"a"}
    nothing = compiled(grammar='start: ""')
    assert admitted(nothing, may_end=False) == admitted(nothing) == {"<eos>"}


def test_tokens_of_several_characters_are_admitted_where_all_of_them_are():
    assert admitted(compiled(choice=["ab", "true"])) == {"a", "ab", "t", "true"}
    assert admitted(compiled(choice=["abc", "b"])) == {"a", "ab", "b"}


def test_one_text_of_a_choice_may_begin_another():
    constraint = say(compiled(choice=["yes", "yesterday", "no"]), "yes")
    assert admitted(constraint) == {"t", "<eos>"}
    assert say(constraint, "terday").is_complete


@pytest.mark.parametrize("text", ['a"b', "a\\n", "/x/", "{}", "[a]+", "a|b", "#", "$", "//", "%"])
def test_every_text_of_a_choice_is_meant_as_it_stands(text: str):
    assert say(compiled(choice=[text]), text).is_complete


@pytest.mark.parametrize("text", ["é", "日本", "🌶", "a\nb", "\t", "a\x00b", "\u2028", "<|im_end|>"])
@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
def test_a_choice_may_be_any_text(text: str, kind: Any):
    tokenizer = wrapped(kind(), eos_token_ids=(2,))
    constraint = compiled(Guidance(tokenizer, tokenizer.vocab_size), choice=[text])
    spelled = b""
    while not constraint.is_complete:
        token_id = ids_in(constraint.mask(may_end=True))[0]
        spelled += tokenizer.token_bytes(token_id)
        assert token_id not in tokenizer.special_token_ids
        constraint.take(token_id)
        if not constraint.is_complete:
            constraint.prepare()
    assert spelled.decode() == text


@pytest.mark.parametrize("kind", [byte_level, byte_fallback, metaspace, unigram])
def test_random_answers_of_every_kind_of_tokenizer_are_what_the_schema_says(kind: Any):
    tokenizer = wrapped(kind(), eos_token_ids=(2,))
    rng = np.random.default_rng(0)
    texts = {"a": ["the", "cat sat"], "b": ["ab"]}
    start = compiled(
        Guidance(tokenizer, tokenizer.vocab_size),
        regex="(the|cat sat) (abc )*ab" if kind is unigram else r'\{"a":"(the|cat sat)","b":"ab"\}',
    )
    for _ in range(20):
        constraint, ids = start.copy(), list[int]()
        while not constraint.is_complete:
            ids.append(int(rng.choice(ids_in(constraint.mask(may_end=True)))))
            constraint.take(ids[-1])
            if not constraint.is_complete:
                constraint.prepare()
        text = tokenizer.decode([5, *ids])[len(tokenizer.decode([5])) :]
        if kind is unigram:
            assert text.split()[-1] == "ab"
        else:
            answer = json.loads(text)
            assert all(answer[key] in texts[key] for key in ("a", "b"))


def test_copies_go_their_own_ways():
    first = compiled(choice=["ab", "ac"])
    second = first.copy()
    say(first, "a")
    third = first.copy()
    assert say(first, "b").is_complete
    assert admitted(second) == {"a", "ab"}
    assert admitted(third) == {"b", "c"}


def test_a_json_object_may_not_go_on_after_its_brace():
    constraint = compiled(json_object=True)
    assert admitted(constraint) == {"{", '{"'}
    assert say(constraint, "{}").is_complete


def test_white_space_between_parts_of_a_json_text_is_bounded():
    tokenizer = wrapped(byte_level(), eos_token_ids=(2,))
    blank, bracket = (tokenizer.encode(text)[0] for text in " [")
    constraint = compiled(Guidance(tokenizer, tokenizer.vocab_size), json_schema={"type": "array"})
    constraint.take(bracket)
    for _ in range(32):
        constraint.prepare()
        constraint.take(blank)
    constraint.prepare()
    assert blank not in ids_in(constraint.mask(may_end=True))


def test_optional_properties_come_in_the_order_of_the_schema():
    schema = {"properties": {"b": {"const": 1}, "a": {"const": 2}}, "additionalProperties": False}
    constraint = compiled(json_schema={"type": "object", **schema})
    assert say(constraint, '{"b":1,"a":2}').is_complete


def test_ids_past_the_tokenizers_are_never_admitted():
    wide = Guidance(LETTERS, 500)
    constraint = compiled(wide, regex="(?s:.*)")
    mask = constraint.mask(may_end=True)
    assert mask.shape == (16,)
    assert max(ids_in(mask)) == EOS
    assert 99 not in ids_in(mask)  # no token
    with pytest.raises(EngineFailure, match="token 499 was drawn"):
        constraint.take(499)


def test_a_model_may_know_fewer_ids_than_the_tokenizer():
    constraint = compiled(Guidance(LETTERS, 70), regex="[A-Za-z]*")
    assert max(ids_in(constraint.mask(may_end=True))) < 96
    with pytest.raises(EngineFailure, match="token 75 was drawn"):
        constraint.take(75)


def test_a_token_that_was_not_admitted_is_an_error_and_not_an_end():
    with pytest.raises(EngineFailure, match="which the grammar does not admit"):
        compiled(regex="[0-9]+").take(TEXTS.index("a"))


def test_gbnf_and_lark_are_both_understood():
    for grammar in ('root ::= "a" [bc]', 'start: "a" /[bc]/'):
        assert say(compiled(grammar=grammar), "ac").is_complete


NESTED = '{"type":"array","items":' * 200 + "{}" + "}" * 200
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "an open group": ({"regex": "(a"}, "unclosed group"),
    "a look-ahead": ({"regex": "(?=a)b"}, "look-around"),
    "a back-reference": ({"regex": r"(a)\1"}, "backreferences"),
    "an unknown rule": ({"grammar": "start: foo"}, "unknown name"),
    "no lark and no gbnf": ({"grammar": "hello"}, "neither Lark .* nor GBNF"),
    "gbnf without a root": ({"grammar": 'a ::= "b"'}, "No 'root' rule"),
    "deep gbnf": ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "recursion"),
    "a loop of rules": ({"grammar": "start: a\na: b\nb: a"}, "cannot go on"),
    "an end token in the middle": ({"grammar": 'start: <[100]> "a"'}, "no token may come"),
    "no object": ({"json_schema": "[1]"}, "object schema"),
    "no json": ({"json_schema": "{"}, "EOF"),
    "no such type": ({"json_schema": {"type": "nonsense"}}, "Invalid type"),
    "a schema of itself": ({"json_schema": {"$ref": "#"}}, "cannot go on"),
    "a required schema of itself": (
        {"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
        "cannot go on",
    ),
    "a remote schema": ({"json_schema": {"$ref": "http://127.0.0.1:9/x.json"}}, "not present"),
    "a schema in a file": ({"json_schema": {"$ref": "file:///etc/passwd"}}, "not present"),
    "a missing definition": ({"json_schema": {"$ref": "#/$defs/none"}}, "does not exist"),
    "an unknown keyword": ({"json_schema": {"not": {}}}, "Unimplemented"),
    "a nested schema": ({"json_schema": NESTED}, "recursion limit"),
    "what the vocabulary cannot say": ({"choice": ["日本"]}, "cannot go on"),
    "a product of alternatives": (
        {
            "json_schema": {
                "allOf": [
                    {"anyOf": [{"properties": {f"p{i}{j}": {"type": "null"}}} for j in range(4)]}
                    for i in range(12)
                ]
            }
        },
        "too large",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_grammar_is_refused_with_the_librarys_words(name: str):
    rule, words = BAD[name]
    with pytest.raises(InvalidRequest, match=words) as caught:
        GUIDANCE.compile(Guided.of(rule), param="response_format")
    assert caught.value.param == "response_format"
    assert len(caught.value.message) < 600
    assert "\n{" not in caught.value.message  # no dump of the parser's state


HOSTILE: dict[str, dict[str, Any]] = {
    "counts of counts": {"regex": "((a{0,1000}){0,1000}){0,1000}"},
    "stars of stars": {"regex": "(((a*)*)*)*b"},
    "many states": {"regex": "[ab]*a[ab]{30}"},
    "a long count": {"regex": ".{0,100000}x"},
    "many alternatives": {"regex": "|".join(f"{i}[a-z]*" for i in range(3000))},
    "ambiguous rules": {"grammar": 'start: x\nx: x x | x x x | "a" | ""'},
    "repeats of repeats": {"grammar": 'start: (("a"{0,1000}){0,1000}){0,1000}'},
    "a million items": {"grammar": 'start: x{1000000}\nx: "a"'},
    "a chain of gbnf rules": {
        "grammar": "root ::= r0\n"
        + "".join(f"r{i} ::= r{i + 1}\n" for i in range(900))
        + 'r900 ::= "a"\n'
    },
    "a tree of references": {
        "json_schema": {
            "$ref": "#/$defs/a0",
            "$defs": {
                **{
                    f"a{i}": {
                        "type": "object",
                        "properties": {x: {"$ref": f"#/$defs/a{i + 1}"} for x in "xy"},
                    }
                    for i in range(40)
                },
                "a40": {"type": "null"},
            },
        }
    },
    "many properties": {
        "json_schema": {
            "type": "object",
            "properties": {f"p{i}": {"type": "string", "pattern": "^[a-z]+$"} for i in range(1500)},
        }
    },
    "many values": {"json_schema": {"enum": [f"value {i}" for i in range(7000)]}},
    "a long array": {"json_schema": {"type": "array", "minItems": 10**6}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_followed_or_ends_its_request(name: str):
    guidance = Guidance(LETTERS, VOCAB_SIZE, clock=lambda: 0.0)  # here the machine may be busy
    rng = np.random.default_rng(0)
    with contextlib.suppress(InvalidRequest):
        constraint = guidance.compile(Guided.of(HOSTILE[name]))
        for _ in range(100):
            constraint.take(int(rng.choice(ids_in(constraint.mask(may_end=False)))))
            if constraint.is_complete:
                break
            constraint.prepare()


class SlowClock:
    """Each look at it is `step` seconds later."""

    def __init__(self) -> None:
        self.now, self.step = 0.0, 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_a_grammar_that_takes_too_long_to_compile_is_refused():
    clock = SlowClock()
    guidance = Guidance(LETTERS, VOCAB_SIZE, clock=clock)
    clock.step = COMPILE_S + 1
    with pytest.raises(InvalidRequest, match=r"took 6.00 s of work at once; at most 5 s"):
        compiled(guidance, regex="a")


def test_an_answer_whose_next_token_takes_too_long_to_find_ends():
    clock = SlowClock()
    constraint = compiled(Guidance(LETTERS, VOCAB_SIZE, clock=clock), regex="a+")
    constraint.take(TEXTS.index("a"))
    clock.step = MASK_S + 1
    with pytest.raises(InvalidRequest, match=r"guided: this grammar took 1.25 s"):
        constraint.prepare()


def test_a_model_without_an_end_token_follows_no_grammar():
    tokenizer = wrapped(byte_level())
    with pytest.raises(InvalidRequest, match="needs a model with an end token"):
        compiled(Guidance(tokenizer, tokenizer.vocab_size), regex="a")


def test_a_vocabulary_is_indexed_once_and_not_before_it_is_needed():
    class Counting(type(LETTERS)):
        num_calls = 0

        def spelled(self, token_id: int, *, is_first: bool = False) -> bytes | None:
            self.num_calls += 1
            return super().spelled(token_id, is_first=is_first)

    tokenizer = Counting()
    guidance = Guidance(tokenizer, VOCAB_SIZE)
    assert tokenizer.num_calls == 0
    threads = [
        threading.Thread(target=compiled, args=(guidance,), kwargs={"regex": text}) for text in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tokenizer.num_calls == VOCAB_SIZE

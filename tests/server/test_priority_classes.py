"""Which class a request is of, and what it may not ask for."""

from __future__ import annotations

import pytest

from jaxinfer.errors import ConfigError, Forbidden, InvalidRequest
from jaxinfer.server.priority_class import DEFAULT_CLASSES, PriorityClass
from jaxinfer.server.priority_classes import Claim, PriorityClasses

CLASSES = PriorityClasses(
    (
        PriorityClass("batch", 1, api_keys=("kb",)),
        PriorityClass("normal", 0),
        PriorityClass("interactive", -1, api_keys=("ki", "grün")),
    )
)


def claim(priority: str | None = None, key: str = "") -> Claim:
    return Claim.read(CLASSES, priority=priority, authorization=f"Bearer {key}" if key else "")


def test_the_best_class_comes_first():
    assert CLASSES.names == ("interactive", "normal", "batch")
    assert PriorityClasses().names == ("interactive", "normal", "batch")


def test_body_beats_header_beats_key_beats_default():
    assert claim().settled(None).name == "normal"
    assert claim(key="kb").settled(None).name == "batch"
    assert claim(key="other").settled(None).name == "normal"
    assert claim("batch", key="ki").settled(None).name == "batch"
    assert claim("batch", key="ki").settled("normal").name == "normal"
    assert claim("batch").settled("interactive").name == "interactive"


@pytest.mark.parametrize(
    ("asked", "name"),
    [(-100, "interactive"), (-1, "interactive"), (0, "normal"), (1, "batch"), (100, "batch")],
)
def test_an_integer_is_the_class_of_that_priority_and_none_gets_past_the_best(
    asked: int, name: str
):
    assert claim().settled(asked).name == name


def test_an_integer_between_two_classes_is_the_worse_one():
    classes = PriorityClasses((PriorityClass("a", -10), PriorityClass("b", 10)), "a")
    assert classes.find(0, "priority").name == "b"


@pytest.mark.parametrize("wanted", ["gold", "", "Normal", "0", "x" * 1000])
def test_an_unknown_class_is_refused_with_the_names_of_those_that_exist(wanted: str):
    with pytest.raises(InvalidRequest, match="interactive, normal, batch") as caught:
        claim().settled(wanted)
    assert caught.value.param == "priority"
    assert len(str(caught.value)) < 200
    with pytest.raises(InvalidRequest) as caught:
        claim(wanted)
    assert caught.value.param == "x-jaxinfer-priority"


def test_a_keys_class_is_its_ceiling():
    for wanted in ("interactive", "normal", 0, -5):
        with pytest.raises(Forbidden, match="'batch'"):
            claim(key="kb").settled(wanted)
    with pytest.raises(Forbidden):
        claim("normal", key="kb")
    assert claim(key="ki").settled("batch").name == "batch"
    assert claim(key="kb").settled(7).name == "batch"


def test_before_the_body_has_come_a_request_is_judged_by_the_best_that_it_may_be():
    assert claim().best.name == "interactive"
    assert claim(key="kb").best.name == "batch"
    assert claim("normal").best.name == "normal"


def test_a_key_of_other_letters_is_found_as_it_comes_in_a_header():
    assert CLASSES.of_key(b"Bearer gr\xc3\xbcn".decode("latin-1")) is CLASSES.classes[0]


@pytest.mark.parametrize(
    ("classes", "default", "words"),
    [
        ((), "normal", "1 to 16"),
        ((PriorityClass("a b", 0),), "a b", "letters, digits"),
        ((PriorityClass("a", 0), PriorityClass("a", 1)), "a", "there twice"),
        ((PriorityClass("a", 0), PriorityClass("b", 0)), "a", "both have priority 0"),
        (DEFAULT_CLASSES, "gold", "one of interactive, normal, batch; got 'gold'"),
        (
            (PriorityClass("a", 0, api_keys=("s3cret",)), PriorityClass("b", 1, None, None, None)),
            "c",
            "one of a, b",
        ),
    ],
)
def test_classes_that_cannot_work_are_refused(
    classes: tuple[PriorityClass, ...], default: str, words: str
):
    with pytest.raises(ConfigError, match=words):
        PriorityClasses(classes, default)


def test_no_message_and_no_repr_shows_a_key():
    one, other = (PriorityClass(n, p, api_keys=("s3cret",)) for n, p in (("a", 0), ("b", 1)))
    with pytest.raises(ConfigError, match="share an API key") as caught:
        PriorityClasses((one, other), "a")
    assert "s3cret" not in str(caught.value) + repr(one) + repr(PriorityClasses((one,), "a"))

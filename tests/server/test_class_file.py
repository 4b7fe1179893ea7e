"""The file that changes the classes: what it can say, and how each mistake is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.server.class_file import read_classes
from jaxinfer.server.priority_class import PriorityClass
from jaxinfer.server.priority_classes import PriorityClasses


def read(tmp_path: Path, text: str, default: str = "normal") -> PriorityClasses:
    file = tmp_path / "classes.yaml"
    file.write_text(text)
    return read_classes(file, default)


def test_without_a_file_there_are_three_classes():
    assert read_classes(None, "batch") == PriorityClasses(default_name="batch")


def test_a_class_is_adjusted_added_or_removed(tmp_path: Path):
    found = read(
        tmp_path,
        "interactive: {max_requests: 9, timeout: 2, queue_timeout: 0.5}\n"
        "batch: false\n"
        "bulk: {priority: 7, max_output_tokens: 64, api_keys: [k1, k2]}\n",
    )
    assert found.classes == (
        PriorityClass("interactive", -1, 9, 2.0, 0.5),
        PriorityClass("normal", 0),
        PriorityClass("bulk", 7, max_output_tokens=64, api_keys=("k1", "k2")),
    )
    assert found.api_keys == ("k1", "k2")


def test_null_takes_a_bound_away_and_one_key_needs_no_list(tmp_path: Path):
    found = read(tmp_path, "normal: {timeout: null, max_requests: null, api_keys: k}")
    assert found.default == PriorityClass("normal", 0, api_keys=("k",))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a mapping"),
        ("- a", "expected a mapping"),
        ("5: {priority: 1}", "must be text; got 5"),
        ("gold: {timeout: 1}", "gold: a new class needs its priority"),
        ("gold: false", "no such class to remove"),
        ("gold: null", "gold: expected a mapping .* got a NoneType"),
        ("normal: 5", "normal: expected a mapping"),
        ("normal: {timeoot: 5}", "'timeoot' is no field; these are: priority, max_requests"),
        ("normal: {priority: high}", "normal: priority: expected a whole number; got 'high'"),
        ("normal: {priority: true}", "expected a whole number"),
        ("normal: {priority: 101}", "-100 to 100; got 101"),
        ("normal: {max_requests: 0}", "at least 1; got 0"),
        ("normal: {max_output_tokens: 1.5}", "expected a whole number; got 1.5"),
        ("normal: {timeout: 0}", "seconds above 0"),
        ("normal: {timeout: .inf}", "seconds above 0"),
        ("normal: {timeout: .nan}", "seconds above 0"),
        ("normal: {queue_timeout: soon}", "queue_timeout: expected seconds; got 'soon'"),
        ("normal: {api_keys: [12345]}", "api_keys: expected a list of keys"),
        ("normal: {api_keys: ['12 345']}", "api_keys: expected a list of keys"),
        ("normal: {api_keys: ['']}", "api_keys: expected a list of keys"),
        ("normal: {api_keys: [12345], x: [", "no YAML in line 1"),
        ("normal: {priority: 1}", "'normal' and 'batch' both have priority 1"),
        ("normal: false", "default class must be one of interactive, batch"),
        ("'a b': {priority: 5}", "letters, digits"),
    ],
)
def test_a_mistake_is_told_with_file_and_class_but_no_key(tmp_path: Path, text: str, words: str):
    with pytest.raises(ConfigError, match=words) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert message.startswith("--priority-classes ")
    assert "classes.yaml" in message
    assert "345" not in message
    assert "\n" not in message


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="nowhere"):
        read_classes(tmp_path / "nowhere.yaml", "normal")

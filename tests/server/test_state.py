"""Phases of the server, and what it remembers of its clients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jaxinfer.errors import Unavailable
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.state import MAX_KNOWN_UNKNOWNS, Limits, ServerState


def state() -> ServerState:
    return ServerState(Limits(), Metrics("m"))


def test_a_loading_server_says_what_it_does():
    found = state()
    found.progress = "compile"
    with pytest.raises(Unavailable, match="compile") as caught:
        found.served()
    assert caught.value.code == "loading"
    assert found.ailment() is None


def test_a_draining_server_tells_the_seconds_that_are_left():
    found = state()
    found.begin_drain(20.0)
    with pytest.raises(Unavailable) as caught:
        found.served()
    assert caught.value.code == "draining"
    assert 10 < caught.value.retry_after_s <= 20


def test_a_model_that_comes_ready_while_draining_does_not_end_the_drain():
    found = state()
    found.begin_drain(20.0)
    found.become_ready(SimpleNamespace(version="v1"))  # type: ignore[arg-type]
    assert found.phase == "draining"


def test_each_unknown_field_is_new_once():
    found = state()
    assert found.new_unknown_fields(frozenset({"b", "a"})) == ["a", "b"]
    assert found.new_unknown_fields(frozenset({"a", "c"})) == ["c"]
    assert found.new_unknown_fields(frozenset()) == []


def test_the_memory_of_unknown_fields_is_bounded():
    found = state()
    for i in range(3 * MAX_KNOWN_UNKNOWNS):
        found.new_unknown_fields(frozenset({f"f{i}", f"g{i}"}))
    assert len(found._unknown_fields) == MAX_KNOWN_UNKNOWNS
    assert found.new_unknown_fields(frozenset({"one more"})) == []

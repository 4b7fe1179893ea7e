"""What counts as a compilation, in which phase, and for how long."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from jax._src import monitoring

from jaxinfer.runtime.compile_counter import CompileCounter

INPUT = np.arange(8, dtype=np.float32)


@pytest.fixture
def counter() -> Iterator[CompileCounter]:
    counter = CompileCounter()
    yield counter
    counter.close()


def test_the_counter_counts_compilations_until_it_is_closed(counter: CompileCounter):
    function = jax.jit(lambda x: x * 2 + 1)
    function(INPUT)
    assert counter.count == 1
    function(INPUT)
    assert counter.count == 1
    function(INPUT[:4])
    assert counter.count == 2
    other = CompileCounter()
    other.close()
    function(INPUT[:2])
    assert (counter.count, other.count) == (3, 0)


def test_compilations_after_the_start_are_counted_apart(counter: CompileCounter):
    function = jax.jit(lambda x: x * 3 + 1)
    assert counter.by_phase() == {"startup": 0, "serving": 0}
    function(INPUT)
    assert counter.by_phase() == {"startup": 1, "serving": 0}
    counter.mark_ready()
    assert counter.by_phase() == {"startup": 1, "serving": 0}
    function(INPUT[:4])
    assert counter.by_phase() == {"startup": 1, "serving": 1}


def test_closing_twice_is_closing_once():
    counter = CompileCounter()
    counter.close()
    counter.close()


def test_a_counter_that_nobody_holds_leaves_jaxs_list():
    gc.collect()
    before = len(monitoring.get_event_duration_listeners())
    counter = CompileCounter()
    assert len(monitoring.get_event_duration_listeners()) == before + 1
    del counter
    gc.collect()
    assert len(monitoring.get_event_duration_listeners()) == before

"""What counts as a compilation, in which phase, and for how long."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import numpy as np
import pytest
from jax._src import monitoring

from jaxinfer.runtime.aot import Program, make_ready, measure
from jaxinfer.runtime.compile_counter import CompileCounter, compiling_for_version

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


def phases(startup: int, serving: int = 0, version: int = 0) -> dict[str, int]:
    return {"startup": startup, "serving": serving, "version": version}


def test_compilations_after_the_start_are_counted_apart(counter: CompileCounter):
    function = jax.jit(lambda x: x * 3 + 1)
    assert counter.by_phase() == phases(0)
    function(INPUT)
    assert counter.by_phase() == phases(1)
    counter.mark_ready()
    assert counter.by_phase() == phases(1)
    function(INPUT[:4])
    assert counter.by_phase() == phases(1, 1)


def test_what_is_compiled_for_another_version_is_not_of_serving(counter: CompileCounter):
    function = jax.jit(lambda x: x * 5 + 1)
    counter.mark_ready()
    with compiling_for_version():
        function(INPUT)
    assert counter.by_phase() == phases(0, 0, 1)
    function(INPUT[:4])
    assert counter.by_phase() == phases(0, 1, 1)
    assert counter.count == 2


def test_serving_threads_count_as_serving_while_another_version_is_compiled(
    counter: CompileCounter,
):
    function = jax.jit(lambda x: x * 7 + 1)
    counter.mark_ready()
    with ThreadPoolExecutor(1) as serving:
        serving.submit(int).result()  # the thread is there before
        with compiling_for_version():
            function(INPUT)
            serving.submit(function, INPUT[:4]).result()
    assert counter.by_phase() == phases(0, 1, 1)


def test_programs_made_on_the_threads_of_a_pool_count_as_of_who_wants_them(
    counter: CompileCounter,
):
    def program(size: int) -> Program:
        return Program(f"p{size}", partial(jax.jit(lambda x: x * 9 + size).lower, INPUT[:size]))

    counter.mark_ready()
    with compiling_for_version():
        make_ready([program(1), program(2)], None)
        measure([program(3)], None, num_threads=1)
    assert counter.by_phase() == phases(0, 0, 3)
    make_ready([program(4)], None)
    assert counter.by_phase() == phases(0, 1, 3)


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

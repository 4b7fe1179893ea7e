"""Tests of what a failed step leaves behind."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.build import Built
from jaxinfer.engine import EngineStep
from jaxinfer.errors import EngineFailure
from jaxinfer.runtime.aot import Programs
from jaxinfer.runtime.runner import ModelRunner
from jaxinfer.scheduling.request import Request
from tests.tiny import build_tiny


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_tiny(tmp_path_factory.mktemp("runner"), fields={"max_num_batched_tokens": 16})


class Broken(Programs):
    """Programs of which one fails, before or after it has eaten the pages it was given."""

    broken: str
    eats_pages: bool

    def __getitem__(self, name: str) -> Any:
        program = super().__getitem__(name)
        if self.broken not in name:
            return program

        def fail(*args: Any) -> Any:
            if self.eats_pages:
                program(*args)
            raise RuntimeError("the device is on fire")

        return fail


def breaking(built: Built, name: str, *, eats_pages: bool) -> ModelRunner:
    runner = built.runner
    whole = runner._programs
    programs = Broken(**{f.name: getattr(whole, f.name) for f in dataclasses.fields(whole)})
    object.__setattr__(programs, "broken", name)
    object.__setattr__(programs, "eats_pages", eats_pages)
    pages = jax.tree.map(jnp.array, runner._pages)
    return ModelRunner(
        runner._params,
        pages,
        programs,
        layer_kinds=runner._layer_kinds,
        num_seats=built.buckets.max_rows,
        make_pages=runner._make_pages,
        vocab_size=built.engine.vocab_size,
    )


def run_one(built: Built, runner: ModelRunner) -> EngineStep:
    engine = built.engine
    engine.submit(Request("r", (1, 2, 3)))
    engine._runner, whole = runner, engine._runner
    try:
        return engine.step()
    finally:
        engine._runner = whole
        engine.abort("r")


def test_a_failure_that_leaves_the_pool_is_one_of_its_step(built: Built):
    """Told when it is its turn to be read: in the same call, if nothing is under way."""
    pool = built.engine.pool
    step = run_one(built, breaking(built, "sample", eats_pages=False))
    assert (step.outputs, len(step.failed_versions), step.num_retried) == ((), 1, 1)
    assert step.rebuild_s is None
    assert built.engine.pool is pool
    assert built.engine.pool_stats().pages_used == 0


def test_a_failure_that_takes_the_pool_has_it_made_anew(built: Built):
    runner = breaking(built, "layer", eats_pages=True)
    step = run_one(built, runner)
    assert (step.outputs, len(step.failed_versions), step.num_retried) == ((), 1, 1)
    assert step.rebuild_s is not None
    assert runner._has_pages()
    assert not any(page.any() for page in jax.tree.leaves(runner._pages))
    assert built.engine.pool_stats().pages_used == 0


def test_a_pool_that_could_not_be_made_anew_is_lost_to_the_next_step_too(built: Built):
    runner = breaking(built, "layer", eats_pages=True)
    runner._make_pages = lambda: (_ for _ in ()).throw(RuntimeError("no memory"))
    with pytest.raises(EngineFailure, match="could not be made anew: no memory"):
        run_one(built, runner)
    with pytest.raises(EngineFailure, match="could not be made anew: no memory"):
        run_one(built, runner)


def test_the_whole_pool_still_answers_after_them(built: Built):
    built.engine.submit(Request("again", (1, 2, 3)))
    outputs = [o for _ in range(40) for o in built.engine.step().outputs]
    assert outputs[-1].finish_reason is not None
    assert all(o.error is None for o in outputs)

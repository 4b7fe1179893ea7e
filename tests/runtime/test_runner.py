"""Tests of what a failed step leaves behind."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest

from jaxinfer.build import Built
from jaxinfer.errors import PoolLost
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
    pages = [(jnp.array(k), jnp.array(v)) for k, v in runner._pages]
    return ModelRunner(
        runner._params,
        pages,
        programs,
        num_seats=built.buckets.max_rows,
        vocab_size=built.engine.vocab_size,
    )


def run_one(built: Built, runner: ModelRunner) -> Any:
    engine = built.engine
    engine.submit(Request("r", (1, 2, 3)))
    engine._runner, whole = runner, engine._runner
    try:
        return engine.step()
    finally:
        engine._runner = whole
        engine.abort("r")


def test_a_failure_that_leaves_the_pool_ends_only_its_requests(built: Built):
    runner = breaking(built, "sample", eats_pages=False)
    (output,) = run_one(built, runner).outputs
    assert "on fire" in str(output.error)
    assert built.engine.pool_stats().pages_used == 0


def test_a_failure_that_takes_the_pool_ends_the_engine(built: Built):
    with pytest.raises(PoolLost, match="took the KV pool with it: the device is on fire"):
        run_one(built, breaking(built, "layer", eats_pages=True))


def test_the_whole_pool_still_answers_after_both(built: Built):
    built.engine.submit(Request("again", (1, 2, 3)))
    outputs = [o for _ in range(40) for o in built.engine.step().outputs]
    assert outputs[-1].finish_reason is not None
    assert all(o.error is None for o in outputs)

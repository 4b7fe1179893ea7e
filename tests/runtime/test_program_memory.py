"""Sums that can be done by hand, and what the compiler really says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from jaxinfer.runtime.program_memory import STEPS_IN_FLIGHT, ProgramMemory, programs_bytes


def test_scratch_counts_once_and_results_by_part_and_all_of_it_per_step_in_flight():
    memories = {
        "prefill tokens=32 begin": ProgramMemory(1, 100, 0, 7),
        "prefill tokens=16 begin": ProgramMemory(1, 50, 0, 7),
        "prefill tokens=32 layer": ProgramMemory(1000, 0, 5000, 7),
        "sample rows=8 full": ProgramMemory(900, 20, 0, 7),
    }
    assert STEPS_IN_FLIGHT == 2
    assert programs_bytes(memories, 0) == 4 * 7 + 2 * (1000 + 100 + 0 + 20)
    assert programs_bytes(memories, 50) == 4 * 7 + 2 * (1000 + 100 + 0 + 20 + 50)
    assert programs_bytes({}, 0) == 0


def test_donated_results_take_no_memory_of_their_own():
    def step(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x + 1, y.sum(keepdims=True)

    shape = jax.ShapeDtypeStruct((256,), np.float32)
    program = jax.jit(step, donate_argnums=0).lower(shape, shape).compile()
    memory = ProgramMemory.of(program, serialized_bytes=99)
    assert memory.alias_bytes == 256 * 4
    assert 4 <= memory.output_bytes <= 64  # a number, and the pointers to both
    told: Any = program.memory_analysis()
    assert memory.code_bytes == (told.generated_code_size_in_bytes or 99)


def test_a_backend_that_does_not_tell_counts_as_its_code():
    program: Any = SimpleNamespace(memory_analysis=lambda: None)
    got = ProgramMemory.of(program, serialized_bytes=10)
    assert got == ProgramMemory(0, 0, 0, 10)

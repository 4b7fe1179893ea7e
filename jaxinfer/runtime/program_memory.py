"""What executables need of the device's memory beside weights and KV pool, as the compiler says.

Kept beside each program on disk, so that a start that compiles nothing can plan, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jax.stages import Compiled

STEPS_IN_FLIGHT = 2  # the engine dispatches a step before the one before it is collected


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """Of one program, in bytes."""

    temp_bytes: int  # scratch while it runs
    output_bytes: int  # results with memory of their own: those that are not donated arguments
    alias_bytes: int  # results in the place of donated arguments
    code_bytes: int

    @classmethod
    def of(cls, program: Compiled, *, serialized_bytes: int = 0) -> ProgramMemory:
        """Zeros where a backend does not tell.

        Args:
            serialized_bytes: stands for the code where the compiler does not count that (CPU).
        """
        told = program.memory_analysis()
        if told is None:
            return cls(0, 0, 0, serialized_bytes)
        return cls(
            temp_bytes=told.temp_size_in_bytes,
            output_bytes=told.output_size_in_bytes - told.alias_size_in_bytes,
            alias_bytes=told.alias_size_in_bytes,
            code_bytes=told.generated_code_size_in_bytes or serialized_bytes,
        )


def programs_bytes(memories: Mapping[str, ProgramMemory], batch_bytes: int) -> int:
    """What all programs take while serving: their code, and the arrays of the steps in flight.

    A step's activations are bounded by the largest scratch plus the largest results of each of its
    parts (the last word of a program's name), which may live side by side.

    Args:
        batch_bytes: of the arrays that the largest step brings along.
    """
    outputs: dict[str, int] = {}
    for name, memory in memories.items():
        part = name.rpartition(" ")[2]
        outputs[part] = max(outputs.get(part, 0), memory.output_bytes)
    scratch = max((memory.temp_bytes for memory in memories.values()), default=0)
    code = sum(memory.code_bytes for memory in memories.values())
    return code + STEPS_IN_FLIGHT * (scratch + sum(outputs.values()) + batch_bytes)

"""The time of one launch, warm, with operands that come from memory.

A program makes one launch for each of several copies of the operands, which together are larger
than a GPU's L2 cache; they do not depend on each other, and are made to run one after the other all
the same, as those of a model's step do. The program is called again and again without waiting, and
the wall time is divided by the number of launches. What a launch costs is therefore in it:
`launch_s` says how much that is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bench.kernels.case import Arrays, Case, Form, Operands
from bench.kernels.costs import Card

SPREAD_BYTES = 256 << 20  # of all copies: several times the L2 cache of any card
MOST_COPIES, LEAST_COPIES = 64, 2
REPETITION_S = 0.02  # a repetition calls the program so often that it takes this long
IN_ORDER = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}  # within a CUDA graph
Clock = Callable[[], float]


def time_form(case: Case, form: Form, repeat: int, clock: Clock = time.perf_counter) -> float:
    """Seconds of one launch: the median of the repetitions."""

    def copy(number: int) -> Operands:
        operands = case.operands(number)
        return operands if form.prepare is None else form.prepare(operands)

    first = copy(0)
    copies = [first, *(copy(number) for number in range(1, num_copies(first)))]
    return time_launches(form.run, copies, repeat, clock)


def time_launches(
    run: Callable[..., Any], copies: Sequence[Operands], repeat: int, clock: Clock
) -> float:
    """Seconds of one of the launches that one program makes, one for each copy."""
    program = jax.jit(partial(_launches, run), donate_argnums=0, compiler_options=IN_ORDER)
    written, read = [copy.written for copy in copies], [copy.read for copy in copies]

    def call(times: int) -> None:
        nonlocal written
        out = None
        for _ in range(times):
            out = program(written, read)
            if copies[0].written:
                written = out
        jax.block_until_ready(out)

    return _median(call, len(copies), repeat, clock)


def _launches(
    run: Callable[..., Any], written: Sequence[Arrays], read: Sequence[Arrays]
) -> list[Any]:
    outs: list[Any] = []
    for given_up, kept in zip(written, read, strict=True):
        if outs:
            kept, _ = lax.optimization_barrier((kept, outs[-1]))
        outs.append(run(*given_up, *kept))
    return outs


def time_torch(torch: Any, case: Case, repeat: int, clock: Clock = time.perf_counter) -> float:
    """The same of PyTorch. Each launch is a call from Python: small ones wait for the host."""
    assert case.torch is not None
    launches = [case.torch(torch) for _ in range(num_copies(case.operands(0)))]

    def call(times: int) -> None:
        for _ in range(times):
            for launch in launches:
                launch()
        torch.cuda.synchronize()

    return _median(call, len(launches), repeat, clock)


def _median(call: Callable[[int], None], launches: int, repeat: int, clock: Clock) -> float:
    call(1)  # compiles

    def seconds(times: int) -> float:
        start = clock()
        call(times)
        return clock() - start

    times = max(1, round(REPETITION_S / max(seconds(2) / 2, 1e-9)))
    return statistics.median(seconds(times) for _ in range(repeat)) / (times * launches)


def num_copies(operands: Operands) -> int:
    """Whose bytes together are SPREAD_BYTES or more."""
    size = sum(x.nbytes for x in (*operands.written, *operands.read))
    return max(LEAST_COPIES, min(MOST_COPIES, -(-SPREAD_BYTES // size)))


def measure_card(
    name: str, repeat: int, *, size: int = 8192, clock: Clock = time.perf_counter
) -> Card:
    """What the card at hand does: copying 4 * size**2 bytes, a product of two bf16[size, size].

    int8 operations are taken to be twice as fast as bf16 ones, as they are on data sheets.
    """
    wide = [jnp.full((size, size), number, jnp.float32) for number in range(LEAST_COPIES)]
    copy_s = time_launches(lambda x: x + 1, [Operands((), (x,)) for x in wide], repeat, clock)
    half = [x.astype(jnp.bfloat16) for x in wide]
    product_s = time_launches(
        lambda x, y: x @ y, [Operands((), (x, half[0])) for x in half], repeat, clock
    )
    rate = 2 * size**3 / product_s
    return Card(name, 2 * wide[0].nbytes / copy_s, rate, 2 * rate)


def launch_s(repeat: int, *, clock: Clock = time.perf_counter) -> float:
    """Of a kernel with next to nothing to do, among many in a program."""
    few = [jnp.full(32, number, jnp.float32) for number in range(MOST_COPIES)]
    return time_launches(lambda x: x + 1, [Operands((), (x,)) for x in few], repeat, clock)

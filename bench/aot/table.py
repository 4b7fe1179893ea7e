"""Facts as plain text of at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bench.aot.facts import Facts
from bench.aot.launches import COMMAND_BUFFER, COPY, KERNEL, LOOP
from bench.aot.memory import UTILIZATION, Room
from bench.aot.targets import Target

WIDTH = 100
NAME_WIDTH = 30
MIB, GIB = 1 << 20, 1 << 30


def target_header(target: Target, jax_version: str) -> Iterator[str]:
    """The GPU, and the names of a kernel's columns."""
    yield f"{target.device_kind} ({target.arch}), compiled with JAX {jax_version}"
    columns = f"{'regs':>5}{'spill':>6}{'shared':>8}  {'loads 16/8/4/<4':17}products"
    yield f"{'':{NAME_WIDTH}}{columns}"


def case_block(facts: Facts) -> Iterator[str]:
    """One operation: its kernels, and what XLA launches beside them."""
    launched = [each for each in facts.launches.all if each.kind != COMMAND_BUFFER]
    others = sum(each.name not in facts.ours for each in launched)
    yield f"{facts.name}: temporaries {_mib(facts.memory.temp_bytes)}, {others} other launches"
    yield from kernel_rows(facts)


def program_block(facts: Facts) -> Iterator[str]:
    """A whole program, and those of its kernels that were disassembled."""
    yield from program_rows(facts)
    yield from kernel_rows(facts)
    yield ""


def kernel_rows(facts: Facts) -> Iterator[str]:
    """A line for each that was disassembled; * is a Pallas kernel."""
    for name, kernel in facts.kernels.items():
        if not kernel.opcodes:
            continue
        shared = f"{facts.shared_bytes(name) / 1024:.1f} K"
        figures = f"{kernel.registers:>5}{kernel.spill_bytes:>6}{shared:>8}"
        mark = "*" if name in facts.ours else " "
        line = f"{mark} {name[: NAME_WIDTH - 3]:{NAME_WIDTH - 2}}{figures}  "
        yield (line + f"{_loads(kernel.loads()):17}{_products(kernel.products())}").rstrip()[:WIDTH]


def program_rows(facts: Facts) -> Iterator[str]:
    """What stands for the whole program."""
    launches, memory = facts.launches, facts.memory
    outside = len(launches.outside_graphs())
    yield f"{facts.name}: lowered in {facts.lower_s:.1f} s, compiled in {facts.compile_s:.1f} s"
    yield (
        f"  {launches.count(KERNEL)} kernels, {launches.count(COPY)} copies, "
        f"{launches.count(LOOP)} loops, {launches.library_calls()} library calls; "
        f"{launches.count(COMMAND_BUFFER)} graphs, {outside} launches outside of them"
    )
    yield (
        f"  arguments {_mib(facts.argument_bytes)}, aliased {_mib(memory.alias_bytes)}, results "
        f"{_mib(memory.output_bytes)}, temporaries {_mib(memory.temp_bytes)}"
    )
    spilling = sum(kernel.spill_bytes > 0 for kernel in facts.kernels.values())
    yield f"  spills: {spilling} of {len(facts.kernels)} kernels"


def memory_rows(rooms: Sequence[Room], num_layers: int) -> Iterator[str]:
    """A line for each card and format of weights."""
    yield (
        f"what a model of {num_layers} layers leaves for KV in {UTILIZATION:g} of the card: "
        "GiB, tokens"
    )
    heads = ("weights", "programs", "KV", "of bf16 KV", "of int8 KV")
    yield f"{'card':8}{'weights':8}" + "".join(f"{head:>13}" for head in heads)
    for room in rooms:
        sizes = (room.weights_bytes, room.programs_bytes, room.kv_bytes)
        cells = [f"{size / GIB:.2f}" for size in sizes]
        cells += [f"{room.tokens_bf16:,}", f"{room.tokens_int8:,}"]
        yield f"{room.card:8}{room.weights:8}" + "".join(f"{cell:>13}" for cell in cells)


def _loads(loads: Mapping[int, int]) -> str:
    less = sum(count for width, count in loads.items() if width < 4)
    return "/".join(map(str, [*(loads.get(width, 0) for width in (16, 8, 4)), less]))


def _products(products: Mapping[str, int]) -> str:
    """HGMMA.64x64x16.F32.BF16 as HGMMA.64x64x16, with its number."""
    return " ".join(f"{_short(opcode)}:{count}" for opcode, count in sorted(products.items()))


def _short(opcode: str) -> str:
    return ".".join(opcode.split(".")[:2])


def _mib(size: int) -> str:
    return f"{size / MIB:,.1f} MiB"

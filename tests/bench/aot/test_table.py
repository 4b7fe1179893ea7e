"""The report's lines."""

from __future__ import annotations

from bench.aot.facts import Facts
from bench.aot.kernel import read_kernels
from bench.aot.launches import read_launches
from bench.aot.memory import Room
from bench.aot.table import WIDTH, block, memory_rows, target_header
from bench.aot.targets import H200
from jaxinfer.runtime.program_memory import ProgramMemory
from tests.bench.aot.test_kernel import LISTING, LOG
from tests.bench.aot.test_launches import LOOPED, PLAIN

MIB, GIB = 1 << 20, 1 << 30


def facts(launches: str = PLAIN) -> Facts:
    return Facts(
        name="decode rows=64 step",
        kernels=read_kernels(LOG, LISTING),
        launches=read_launches(launches),
        memory=ProgramMemory(3 * MIB, MIB // 2, 1024 * MIB, 1),
        argument_bytes=3690 * MIB,
        ours=frozenset({"matmul"}),
        copied=((8, 8), ()),
        lower_s=0.52,
        compile_s=7.21,
    )


def test_the_header_says_which_gpu_and_which_jax():
    first, columns = target_header(H200, "0.12.0")
    assert first == "NVIDIA H200 (sm_90a), compiled with JAX 0.12.0"
    assert columns.split()[:3] == ["regs", "spill", "shared"]


def test_a_program_is_its_launches_its_memory_and_its_kernels():
    head, launches, memory, spills, first, second, blank = block(facts(LOOPED))
    assert head == "decode rows=64 step: lowered in 0.5 s, compiled in 7.2 s"
    assert "4 kernels, 1 copies, 1 loops, 1 library calls" in launches
    assert launches.endswith("3 graphs, 3 launches outside of them")
    assert memory.split()[1:3] == ["3,690.0", "MiB,"]
    assert memory.endswith("temporaries 3.0 MiB")
    assert spills.split(": ")[1] == "1 of 2 kernels"
    figures = "50 0 0.0 K 3/1/1/1 HGMMA.64x32x16:2"
    assert " ".join(first.split()) == f"* matmul {figures}"
    assert second.split()[0] == "loop_add_fusion__2"
    assert second.endswith("HMMA.16816:1 IMMA.16832:1")
    assert blank == ""


def test_figures_stand_under_their_names():
    _, columns = target_header(H200, "0.12.0")
    row = list(block(facts()))[4]
    assert row.index("50") + 2 == columns.index("regs") + 4
    assert row.index("32.0 K") + 6 == columns.index("shared") + 6
    assert row.index("HGMMA") == columns.index("products")


def test_no_line_is_wider_than_a_hundred_columns():
    for line in [*target_header(H200, "0.12.0.1"), *block(facts())]:
        assert len(line) <= WIDTH
        assert line == line.rstrip()


def test_memory_is_a_line_per_card_and_format():
    room = Room("24 GB", "int4", 5 * GIB, GIB // 2, 16 * GIB, 131072, 250000)
    title, _, line = memory_rows([room], 32)
    assert "32 layers" in title
    assert "0.9" in title
    assert line.split() == ["24", "GB", "int4", "5.00", "0.50", "16.00", "131,072", "250,000"]

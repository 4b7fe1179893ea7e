"""What is read from a compilation: the tools are stand-ins, the texts are real ones, shortened."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from bench.aot.compiler import Compilation
from bench.aot.facts import Examiner, Facts, read_copies
from bench.aot.toolchain import Assembly
from tests.bench.aot.test_kernel import LISTING, LOG
from tests.bench.aot.test_launches import PLAIN

HLO = """\
%fused_computation (p.0: bf16[64,32,128]) -> bf16[64,32,128] {
  ROOT %copy.3 = bf16[64,32,128]{2,1,0} copy(%p.0), metadata={op_name="jit(f)/transpose"}
}
ENTRY %main {
  %copy-start.1 = (s32[8]{0}, s32[8]{0}, u32[]) copy-start(%a)
  %copy.9 = f32[] copy(%b)
  %copied = bf16[4,4]{1,0} add(%copy.1, %copy.2)
  %pallas_call.2 = bf16[64,256]{1,0} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(f)/jit(g)/matmul/pallas_call" stack_frame_id=3}
}
"""
MATMUL = ".version 8.6\n.visible .entry matmul(\n)\n{ wgmma.mma_async.sync.aligned; }\n"
OTHER = ".version 8.6\n.visible .entry loop_add_fusion__2(\n)\n{ add.s32; }\n"
CONSTANTS = ".version 8.6\n.global .align 4 .b8 table[24];\n"


class FakeTools:
    """Assembles everything to the two kernels of the recorded log."""

    def __init__(self):
        self.assembled: list[str] = []
        self.disassembled = 0

    def assemble(self, ptx: str, arch: str) -> Assembly:
        assert arch == "sm_90a"
        self.assembled.append(ptx)
        log = LOG if ptx == MATMUL else ""
        return Assembly(log, b"12345")

    def disassemble(self, cubin: bytes) -> str:
        assert cubin == b"12345"
        self.disassembled += 1
        return LISTING


def compilation(*ptx: str, hlo: str = HLO) -> Compilation:
    told = SimpleNamespace(
        temp_size_in_bytes=7,
        output_size_in_bytes=30,
        alias_size_in_bytes=20,
        argument_size_in_bytes=40,
        generated_code_size_in_bytes=0,
    )
    executable: Any = SimpleNamespace(memory_analysis=lambda: told)
    return Compilation("p", executable, ptx, PLAIN, hlo, lower_s=0.5, compile_s=1.5)


def examined(tools: Any, *ptx: str, hlo: str = HLO) -> Facts:
    return Examiner(tools, "sm_90a").facts(compilation(*ptx, hlo=hlo))


def test_copies_are_found_in_fusions_and_at_the_top():
    assert read_copies(HLO) == ((64, 32, 128), ())


def test_a_pallas_kernel_is_known_by_the_name_that_it_was_given():
    facts = examined(FakeTools(), MATMUL, OTHER)
    assert facts.ours == {"matmul"}
    assert facts.our_kernels() == {"matmul": facts.kernels["matmul"]}


def test_the_second_kernel_of_one_name_is_ours_too():
    renamed = OTHER.replace("loop_add_fusion__2", "matmul__2")
    assert examined(FakeTools(), renamed).ours == {"matmul__2"}


def test_kernels_of_the_compiler_are_only_listed_if_they_use_tensor_cores():
    tools = FakeTools()
    examined(tools, OTHER, hlo="")
    assert tools.disassembled == 0
    facts = examined(tools, MATMUL, hlo="")
    assert tools.disassembled == 1
    assert facts.ours == frozenset()
    assert "matmul" in facts.with_products()


def test_a_file_without_kernels_is_passed_over():
    tools = FakeTools()
    assert examined(tools, CONSTANTS).kernels == {}
    assert tools.assembled == []


def test_a_kernel_that_is_known_is_not_assembled_again():
    tools: Any = FakeTools()
    examiner = Examiner(tools, "sm_90a")
    first, second = (examiner.facts(compilation(MATMUL)) for _ in range(2))
    assert tools.assembled == [MATMUL]
    assert first == second


def test_shared_memory_is_that_of_the_kernel_and_of_its_launch():
    facts = examined(FakeTools(), MATMUL)
    assert facts.shared_bytes("matmul") == 32768
    assert facts.shared_bytes("loop_add_fusion__2") == 1024  # it is not launched


def test_memory_is_what_the_compiler_says_and_code_is_counted_where_it_does_not():
    memory = examined(FakeTools(), MATMUL, OTHER).memory
    assert (memory.temp_bytes, memory.output_bytes, memory.alias_bytes) == (7, 10, 20)
    assert memory.code_bytes == 10


def test_json_has_the_listed_kernels():
    told = examined(FakeTools(), MATMUL).as_json()
    names = [kernel["name"] for kernel in told["kernels"]]
    assert names == ["matmul", "loop_add_fusion__2"]
    first = told["kernels"][0]
    assert first["is_ours"]
    assert first["loads"] == {16: 3, 8: 1, 4: 1, 1: 1}
    assert told["launches"]["kCustomKernel"] == 2

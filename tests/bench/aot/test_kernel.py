"""Logs of ptxas and listings of nvdisasm, as they were written for real kernels, shortened."""

from __future__ import annotations

from bench.aot.kernel import Kernel, read_kernels

LOG = """\
ptxas info    : 24 bytes gmem
ptxas info    : Compiling entry function 'matmul' for 'sm_90a'
ptxas info    : Function properties for matmul
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 50 registers, used 1 barriers
ptxas info    : Compile time = 9.558 ms
ptxas info    : Compiling entry function 'loop_add_fusion__2' for 'sm_90a'
ptxas info    : Function properties for loop_add_fusion__2
    72 bytes stack frame, 60 bytes spill stores, 56 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 72 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compile time = 3.277 ms
"""
LISTING = """\

	.target	sm_90a

//--------------------- .text.matmul               --------------------------
	.section	.text.matmul,"ax",@progbits
	.align	128
        .global         matmul
.text.matmul:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*00f0*/                   LDG.E.128 R20, desc[UR12][R20.64] ;
        /*0120*/              @!P0 LDG.E.128.CONSTANT R16, desc[UR12][R16.64] ;
        /*0130*/                   LDG.E R16, desc[UR12][R16.64] ;
        /*0140*/                   LDG.E.U8 R16, desc[UR12][R16.64] ;
        /*0150*/                   LDG.E.LTC128B.64 R16, desc[UR12][R16.64] ;
        /*0220*/               @P2 LDGSTS.E.BYPASS.LTC128B.128 [R7], desc[UR12][R8.64], P1 ;
        /*0410*/                   MEMBAR.ALL.CTA ;
        /*04a0*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*04f0*/                   HGMMA.64x32x16.F32.BF16 R24, gdesc[UR4], R24 ;
.L_x_0:
        /*0500*/             @!UP0 UIADD3 UR4, UR4, 0x1, URZ ;
        /*0930*/                   BRA `(.L_x_0);
.L_x_2:


//--------------------- .text.loop_add_fusion__2    --------------------------
	.section	.text.loop_add_fusion__2,"ax",@progbits
.text.loop_add_fusion__2:
        /*0000*/                   STL.64 [R1], R2 ;
        /*0010*/                   LDL.LU.64 R2, [R1] ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0030*/                   IMMA.16832.S8.S8.SAT R4, R8, R12, R4 ;
"""


def kernel(**opcodes: int) -> Kernel:
    counts = {name.replace("_", "."): count for name, count in opcodes.items()}
    return Kernel("k", registers=32, spill_bytes=0, stack_bytes=0, shared_bytes=0, opcodes=counts)


def test_registers_and_spills_are_those_of_each_kernel():
    found = read_kernels(LOG)
    assert list(found) == ["matmul", "loop_add_fusion__2"]
    plain, spilling = found.values()
    assert (plain.registers, plain.spill_bytes, plain.stack_bytes) == (50, 0, 0)
    assert (spilling.registers, spilling.spill_bytes, spilling.stack_bytes) == (255, 116, 72)
    assert (plain.shared_bytes, spilling.shared_bytes) == (0, 1024)


def test_without_a_listing_no_instruction_is_known():
    assert not read_kernels(LOG)["matmul"].opcodes


def test_instructions_are_counted_in_their_own_kernel():
    found = read_kernels(LOG, LISTING)
    assert sum(found["matmul"].opcodes.values()) == 12
    assert sum(found["loop_add_fusion__2"].opcodes.values()) == 4
    assert found["matmul"].opcodes["UIADD3"] == 1  # behind a predicate


def test_products_are_the_instructions_of_tensor_cores():
    found = read_kernels(LOG, LISTING)
    assert found["matmul"].products() == {"HGMMA.64x32x16.F32.BF16": 2}
    both = {"HMMA.16816.F32.BF16": 1, "IMMA.16832.S8.S8.SAT": 1}
    assert found["loop_add_fusion__2"].products() == both


def test_loads_are_counted_by_their_width_in_bytes():
    assert read_kernels(LOG, LISTING)["matmul"].loads() == {16: 3, 8: 1, 4: 1, 1: 1}


def test_streams_are_the_loads_that_go_to_shared_memory():
    assert read_kernels(LOG, LISTING)["matmul"].streams() == {16: 1}
    assert kernel(LDG_E_128=4, LDGSTS_E=2, LDGSTS_E_64=3, LDGDEPBAR=9).streams() == {4: 2, 8: 3}


def test_a_cache_hint_is_not_a_width():
    assert kernel(LDG_E_LTC128B=3, LDGSTS_E_BYPASS_LTC128B_128=1).loads() == {4: 3, 16: 1}


def test_loads_from_shared_memory_are_no_loads_of_global_memory():
    assert kernel(LDS_128=4, LDSM_16_M88_4=2).loads() == {}


def test_local_memory_is_seen_even_where_nothing_is_called_a_spill():
    found = read_kernels(LOG, LISTING)
    assert found["loop_add_fusion__2"].local_accesses() == 2
    assert found["matmul"].local_accesses() == 0

"""Every kernel of ours in every configuration that is shipped, compiled for GPUs not at hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.aot.cases import Case, cases
from bench.aot.kernel import Kernel
from tests.aot.findings import Findings

pytestmark = pytest.mark.aot

CASES = cases()
GROUPS = sorted({case.sums for case in CASES if case.sums})


def by_name(case: Case) -> str:
    return case.name


every_case = pytest.mark.parametrize("case", CASES, ids=by_name)
every_product = pytest.mark.parametrize("case", [c for c in CASES if c.has_products], ids=by_name)


def kernels(findings: Findings, case: Case) -> Iterator[Kernel]:
    found = list(findings.case(case).our_kernels().values())
    assert found, "no Pallas kernel was compiled"
    yield from found


@every_case
def test_no_kernel_spills_or_uses_local_memory(findings: Findings, case: Case):
    for kernel in kernels(findings, case):
        assert kernel.spill_bytes == 0
        assert kernel.local_accesses() == 0


@every_case
def test_a_block_has_the_shared_memory_that_it_asks_for(findings: Findings, case: Case):
    facts = findings.case(case)
    for kernel in kernels(findings, case):
        assert facts.shared_bytes(kernel.name) <= findings.target.shared_limit_bytes


@every_product
def test_products_run_on_tensor_cores(findings: Findings, case: Case):
    assert any(kernel.products() for kernel in kernels(findings, case))


@every_product
def test_operands_are_loaded_by_sixteen_bytes(findings: Findings, case: Case):
    streaming = [kernel for kernel in kernels(findings, case) if kernel.streams()]
    assert streaming
    for kernel in streaming:
        assert 16 in kernel.streams()
        assert set(kernel.streams()) <= {16, *case.narrow}
        assert min(kernel.loads()) >= 4 or case.has_byte_loads


@pytest.mark.parametrize("group", GROUPS)
def test_sums_that_must_agree_use_one_instruction(findings: Findings, group: str):
    """Few and many rows, decode and prefill: a row's bits must not depend on its company."""
    same = [case for case in CASES if case.sums == group]
    instructions = {
        frozenset(kernel.products())
        for case in same
        for kernel in kernels(findings, case)
        if kernel.products()
    }
    assert len(instructions) == (1 if any(case.has_products for case in same) else 0)


@pytest.mark.parametrize("case", [c for c in CASES if c.donate], ids=by_name)
def test_keys_and_values_are_written_in_place_in_one_launch(findings: Findings, case: Case):
    facts = findings.case(case)
    pools = [case.args[place] for place in case.donate]
    assert facts.memory.alias_bytes == sum(p.size * p.dtype.itemsize for p in pools)
    assert facts.memory.temp_bytes == 0
    assert facts.copied == ()
    assert len(facts.launches.all) == 1

"""Whole steps of a 7B-shaped model, compiled for GPUs that are not here."""

from __future__ import annotations

import pytest

from bench.aot.programs import NUM_LAYERS
from tests.aot.findings import FEW_LAYERS, Findings

pytestmark = pytest.mark.aot

KINDS = ("decode", "prefill")
MIB = 1 << 20
MOST_TEMPORARIES = {"decode": 24 * MIB, "prefill": 64 * MIB}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_writes_its_keys_and_values_in_place(findings: Findings, kind: str):
    model, facts = findings.model(), findings.step(kind)
    assert facts.memory.alias_bytes == model.pool_bytes()
    assert model.pool_shape() not in facts.copied


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_copies_no_weight(findings: Findings, kind: str):
    model, facts = findings.model(), findings.step(kind)
    turned = {shape[::-1] for shape in model.weight_shapes()}
    assert not (model.weight_shapes() | turned) & set(facts.copied)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_keeps_no_temporary_of_a_weights_size(findings: Findings, kind: str):
    facts = findings.step(kind)
    assert 0 < facts.memory.temp_bytes <= MOST_TEMPORARIES[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_no_kernel_of_a_step_spills(findings: Findings, kind: str):
    kernels = findings.step(kind).kernels
    assert len(kernels) > 10
    assert not [kernel for kernel in kernels.values() if kernel.spill_bytes]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_calls_no_library(findings: Findings, kind: str):
    assert findings.step(kind).launches.library_calls() == 0


def test_temporaries_do_not_grow_with_the_layers(findings: Findings):
    few, all_of_them = (findings.step("decode", layers) for layers in (FEW_LAYERS, NUM_LAYERS))
    assert all_of_them.memory.temp_bytes < 2 * few.memory.temp_bytes

"""Whole steps of a 7B-shaped model and of others, compiled for GPUs that are not here."""

from __future__ import annotations

import pytest

from bench.aot.launches import COMMAND_BUFFER, COPY, LOOP
from bench.aot.programs import FORMATS, LLAMA, MODELS, NUM_LAYERS
from tests.aot.findings import FEW_LAYERS, Findings

pytestmark = pytest.mark.aot

MIB = 1 << 20
MOST_TEMPORARIES = {"decode": 24 * MIB, "prefill": 80 * MIB}
MORE_TEMPORARIES = {"qwen3-moe": 32 * MIB}  # a token has a row with each of its 8 experts
COPIES = {"qwen3-moe": FEW_LAYERS}  # of the experts that a layer's tokens choose: to be sorted
INTEGER = ("IMMA", "IGMMA")  # products of int8
every_kind = pytest.mark.parametrize("kind", ["decode", "prefill"])
every_model = pytest.mark.parametrize(
    ("model", "weights"),
    [
        *((LLAMA, weights) for weights in FORMATS),
        *((name, "bf16") for name in MODELS if name != LLAMA),
    ],
)


@every_model
@every_kind
def test_a_step_is_one_graph(findings: Findings, kind: str, model: str, weights: str):
    launches = findings.step(kind, model, weights).launches
    assert launches.count(COMMAND_BUFFER) == 1
    assert launches.outside_graphs() == []
    assert (launches.count(LOOP), launches.library_calls()) == (0, 0)
    assert launches.count(COPY) <= COPIES.get(model, 0)


@every_model
@every_kind
def test_a_step_writes_its_keys_and_values_in_place(
    findings: Findings, kind: str, model: str, weights: str
):
    programs, facts = findings.model(model, weights), findings.step(kind, model, weights)
    assert facts.memory.alias_bytes == programs.pool_bytes()
    assert programs.pool_shape() not in facts.copied


@every_model
@every_kind
def test_a_step_copies_no_weight(findings: Findings, kind: str, model: str, weights: str):
    programs, facts = findings.model(model, weights), findings.step(kind, model, weights)
    turned = {shape[::-1] for shape in programs.weight_shapes()}
    assert not (programs.weight_shapes() | turned) & set(facts.copied)


@every_model
@every_kind
def test_a_step_keeps_no_temporary_of_a_weights_size(
    findings: Findings, kind: str, model: str, weights: str
):
    facts = findings.step(kind, model, weights)
    most = MOST_TEMPORARIES[kind] + MORE_TEMPORARIES.get(model, 0)
    assert 0 < facts.memory.temp_bytes <= most


@every_model
@every_kind
def test_no_kernel_of_a_step_spills(findings: Findings, kind: str, model: str, weights: str):
    kernels = findings.step(kind, model, weights).kernels
    assert len(kernels) > 10
    assert [kernel.name for kernel in kernels.values() if kernel.spill_bytes] == []


@every_model
def test_decode_and_prefill_use_the_same_instructions(findings: Findings, model: str, weights: str):
    """Or a token's bits would depend on which of them computed it. Sums of integers are exact."""
    decode, prefill = (
        {
            op
            for k in findings.step(kind, model, weights).with_products().values()
            for op in k.products()
            if not op.startswith(INTEGER)
        }
        for kind in ("decode", "prefill")
    )
    assert decode == prefill


@pytest.mark.parametrize("model", MODELS)
def test_products_and_attention_are_our_own(findings: Findings, model: str):
    """What XLA makes of a product depends on its shape."""
    facts = findings.step("decode", model)
    assert set(facts.with_products()) <= facts.ours
    assert {"rms_norm", "kv_write"} <= facts.ours


def test_all_layers_are_one_graph_with_no_more_temporaries(findings: Findings):
    few = findings.step("decode", num_layers=FEW_LAYERS)
    every = findings.step("decode", num_layers=NUM_LAYERS)
    assert every.launches.count(COMMAND_BUFFER) == 1
    assert every.launches.outside_graphs() == []
    assert every.memory.alias_bytes == findings.model(num_layers=NUM_LAYERS).pool_bytes()
    assert every.memory.temp_bytes < 2 * few.memory.temp_bytes
    assert len(every.launches.all) < 20 * NUM_LAYERS

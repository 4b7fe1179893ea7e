"""Exactness on tiny models: tokens and logprobs are the same bits in every circumstance.

One test per request and circumstance (bench/exactness); each circumstance is brought about once per
model, for all the requests that suit it together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from bench.exactness.circumstance import Circumstance, Lab
from bench.exactness.probes import KINDS, Probe, random_probes
from bench.exactness.restart import in_this_process
from bench.exactness.subject import Limits, Subject
from bench.exactness.suite import cases, circumstances
from bench.exactness.trace import difference
from checkpoints.formats import Quantization, WeightFormat
from jaxinfer.build import build
from jaxinfer.config import EngineConfig
from jaxinfer.scheduling.buckets import Buckets
from tests.tiny import tiny_engine_config, write_checkpoint

PAGE_SIZE, NUM_PAGES, MAX_MODEL_LEN = 16, 160, 1024
NUM_LAYERS, FLOAT_BYTES = 2, 4
VOCAB_SIZE = 250  # of the prompts' ids: fewer than the models know
LENGTHS = (1, 2, 16, 17, 31, 100, 128, 129, 200, 5, 40, 33)
PROBES = random_probes(LENGTHS, VOCAB_SIZE, seed=0)
SMALL: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 64}
LARGE: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 512}
BIASED: dict[str, Any] = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grouped heads": ({}, LARGE),
    "one kv head each": ({"num_attention_heads": 3, "num_key_value_heads": 3}, SMALL),
    "one shared kv head, bias, untied": (
        {
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        SMALL,
    ),
    "head dim 64": ({"num_attention_heads": 4, "head_dim": 64}, SMALL),
    "head dim 80": ({"num_attention_heads": 4, "head_dim": 80}, SMALL),
    "fused steps": ({}, SMALL | {"step_programs": "fused"}),
    "GPU kernels, interpreted": ({}, SMALL | {"kernel_backend": "interpret"}),
    "mixed formats": (BIASED, SMALL),
    "mixed formats, fused steps": (BIASED, SMALL | {"step_programs": "fused"}),
    "mixed formats, interpreted": (BIASED, SMALL | {"kernel_backend": "interpret"}),
    "int8": ({}, LARGE),
    "int8 in groups, zero points": ({}, SMALL),
    "int4 in groups": (BIASED, SMALL),
    "int4, odd width": ({"intermediate_size": 85}, SMALL),
    "int8 rows": (BIASED, SMALL),
    "int8 rows of one scale": ({}, SMALL),
}
"""Changes of config.json, and fields of the engine's configuration."""

SOME_KEPT_OTHERWISE = Quantization(
    WeightFormat(4, 32, has_zero=True),
    exceptions=(
        ("layers.0.mlp.down_proj", WeightFormat(8, activations="int8")),
        ("layers.0.self_attn.k_proj", None),
        ("layers.1.mlp.gate_proj", WeightFormat(8, 64)),
        ("layers.1.self_attn.o_proj", WeightFormat(4, 64)),
    ),
)
QUANTIZED: dict[str, Quantization] = {
    "mixed formats": SOME_KEPT_OTHERWISE,
    "mixed formats, fused steps": SOME_KEPT_OTHERWISE,
    "mixed formats, interpreted": SOME_KEPT_OTHERWISE,
    "int8": Quantization(WeightFormat(8)),
    "int8 in groups, zero points": Quantization(WeightFormat(8, 32, has_zero=True), head=None),
    "int4 in groups": Quantization(WeightFormat(4, 32)),
    "int4, odd width": Quantization(WeightFormat(4)),
    "int8 rows": Quantization(WeightFormat(8, activations="int8")),
    "int8 rows of one scale": Quantization(WeightFormat(8, activations="int8_static")),
}
"""Of these models. They compile for long; groups are not full."""


def limits_of(fields: dict[str, Any]) -> Limits:
    """What the engine will say of itself: cases are known before a model is built."""
    buckets = Buckets.for_limits(
        max_num_seqs=fields["max_num_seqs"],
        max_num_batched_tokens=fields["max_num_batched_tokens"],
        max_model_len=MAX_MODEL_LEN,
        page_size=PAGE_SIZE,
    )
    return Limits(buckets, PAGE_SIZE, NUM_PAGES, MAX_MODEL_LEN)


def all_cases() -> Iterator[Any]:
    for model, (_, fields) in MODELS.items():
        for circumstance, probe in cases(circumstances(limits_of(fields), PROBES), PROBES):
            name = f"{model}-{circumstance.name}-{probe.name}"
            marks = pytest.mark.slow if model in QUANTIZED else ()
            yield pytest.param(model, circumstance, probe, id=name, marks=marks)


CASES = list(all_cases())


def engine_config(factory: pytest.TempPathFactory, model: str) -> EngineConfig:
    changes, fields = MODELS[model]
    folder = factory.mktemp("exact")
    heads = {"num_key_value_heads": 2, "head_dim": 16} | changes
    token_bytes = 2 * NUM_LAYERS * heads["num_key_value_heads"] * heads["head_dim"] * FLOAT_BYTES
    checkpoint = write_checkpoint(
        folder / "model",
        quantization=QUANTIZED.get(model),
        max_position_embeddings=MAX_MODEL_LEN,
        **changes,
    )
    return tiny_engine_config(
        checkpoint,
        folder / "cache",
        kv_cache_bytes=NUM_PAGES * PAGE_SIZE * token_bytes,
        max_kl=math.inf,  # of formats that nobody certified
        **fields,
    )


@pytest.fixture(scope="module")
def labs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Lab]:
    return {}


def lab_of(labs: dict[str, Lab], factory: pytest.TempPathFactory, model: str) -> Lab:
    if model not in labs:
        config = engine_config(factory, model)
        subject = Subject(build(config), restart=in_this_process(partial(build, config)))
        assert subject.limits == limits_of(MODELS[model][1])
        labs[model] = Lab(subject, PROBES)
    return labs[model]


@pytest.mark.parametrize(("model", "circumstance", "probe"), CASES)
def test_it_changes_no_bit(
    labs: dict[str, Lab],
    tmp_path_factory: pytest.TempPathFactory,
    model: str,
    circumstance: Circumstance,
    probe: Probe,
) -> None:
    case = lab_of(labs, tmp_path_factory, model).check(circumstance, probe)
    assert case.wrong is None, f"{model}: {case}"


def test_there_are_enough_cases_of_every_kind() -> None:
    assert len(CASES) >= 1000
    for kind in KINDS:
        assert sum(kind in case.id for case in CASES) >= 50, kind
    rows = {case.values[1].name for case in CASES if case.values[1].name.startswith("row ")}
    assert rows == {f"row {row} of {bucket}" for bucket in (8, 16, 32) for row in range(bucket)}


def test_fused_and_layered_steps_give_the_same_bits(
    labs: dict[str, Lab], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two forms of the same model: not promised for every shape, so that a failure here would
    only mean that a change of `step_programs` may change an answer's last bits.
    """
    layered, fused = (
        lab_of(labs, tmp_path_factory, model) for model in ("grouped heads", "fused steps")
    )
    for probe in PROBES:
        assert difference(fused.reference(probe), layered.reference(probe)) is None


@pytest.mark.slow
def test_layers_of_several_formats_choose_the_same_tokens_in_fused_and_layered_steps(
    labs: dict[str, Lab], tmp_path_factory: pytest.TempPathFactory
) -> None:
    layered, fused = (
        lab_of(labs, tmp_path_factory, model)
        for model in ("mixed formats", "mixed formats, fused steps")
    )
    for probe in PROBES:
        assert fused.reference(probe).token_ids == layered.reference(probe).token_ids


def test_interpreted_kernels_choose_the_tokens_of_the_reference_form(
    labs: dict[str, Lab], tmp_path_factory: pytest.TempPathFactory
) -> None:
    interpreted, reference = (
        lab_of(labs, tmp_path_factory, model)
        for model in ("GPU kernels, interpreted", "grouped heads")
    )
    for probe in PROBES:
        assert interpreted.reference(probe).token_ids == reference.reference(probe).token_ids

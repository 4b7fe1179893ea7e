"""Families that compute what Llama does not: the same bits in every circumstance.

One layer of each type, requests shorter and longer than the window, which ends inside a page. A few
circumstances of Gemma 2 (capped scores, windows) and of a mixture of experts beside dense layers
always run; the other families and all circumstances are slow.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from bench.exactness.circumstance import Lab
from bench.exactness.probes import random_probes
from bench.exactness.subject import Subject
from bench.exactness.suite import cases, circumstances
from checkpoints.formats import Quantization, WeightFormat
from jaxinfer.build import build
from tests.models.tiny_decoder import (
    GEMMA2,
    GEMMA3,
    GRANITE,
    MISTRAL,
    MIXTRAL,
    OLMO2,
    OLMOE,
    PHI3,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    SMOLLM3,
)
from tests.tiny import tiny_engine_config, write_checkpoint

PAGE_SIZE, NUM_PAGES, MAX_MODEL_LEN, WINDOW = 16, 160, 1024, 40
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # keys and values, 2 layers, 2 heads of 16 floats
PROBES = random_probes((1, 17, WINDOW - 1, 128, 200), 250, seed=0)
QUICK = ("7 neighbours", "chunks of 32", "a hit on 1 page", "preempted once")
INT4 = Quantization(WeightFormat(4, 32, has_zero=True))
WINDOWS: dict[str, Any] = {"sliding_window": WINDOW}
LONGROPE: dict[str, Any] = {
    "type": "longrope",
    "short_factor": [1.0] * 6,
    "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0],
    "original_max_position_embeddings": 100,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": GEMMA2
    | WINDOWS
    | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "hidden_act": None},
    "gemma3": GEMMA3 | WINDOWS | {"num_hidden_layers": 2, "sliding_window_pattern": 2},
    "smollm3": SMOLLM3 | {"no_rope_layers": [1, 0]},
    "mistral": MISTRAL | WINDOWS,
    "qwen3": QWEN3 | WINDOWS | {"use_sliding_window": True, "max_window_layers": 1},
    "granite": GRANITE | {"residual_multiplier": 0.22, "embedding_multiplier": 12.0},
    "olmo2": OLMO2,
    "mixtral": MIXTRAL | WINDOWS,
    "qwen2 moe": QWEN2_MOE | {"mlp_only_layers": [1]},
    "qwen3 moe": QWEN3_MOE,
    "qwen3 moe in int4": QWEN3_MOE | {"quantization": INT4},
    "olmoe": OLMOE,
    "phi3": PHI3 | WINDOWS | {"partial_rotary_factor": 0.75, "rope_scaling": LONGROPE},
}
ALWAYS = ("gemma2", "qwen2 moe")


@pytest.fixture(
    scope="module",
    params=[
        name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES
    ],
)
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    folder = tmp_path_factory.mktemp("exact")
    changes: dict[str, Any] = FAMILIES[request.param] | {"max_position_embeddings": MAX_MODEL_LEN}
    config = tiny_engine_config(
        write_checkpoint(folder / "model", **changes),
        folder / "cache",
        kv_cache_bytes=NUM_PAGES * PAGE_SIZE * TOKEN_BYTES,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_kl=math.inf,
    )
    return Lab(Subject(build(config)), PROBES)


@pytest.mark.parametrize("name", QUICK)
def test_it_changes_no_bit(lab: Lab, name: str):
    (circumstance,) = (c for c in circumstances(lab.limits, PROBES) if c.name == name)
    probes = [probe for _, probe in cases([circumstance], PROBES)]
    assert probes
    for probe in probes:
        case = lab.check(circumstance, probe)
        assert case.wrong is None, str(case)


@pytest.mark.slow
def test_no_circumstance_changes_a_bit(lab: Lab):
    every = [c for c in circumstances(lab.limits, PROBES) if "restart" not in c.name]
    checked = [lab.check(c, probe) for c, probe in cases(every, PROBES)]
    assert len(checked) > 100
    assert [str(case) for case in checked if case.wrong is not None] == []

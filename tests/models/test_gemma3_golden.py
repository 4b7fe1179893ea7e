"""Gemma 3 against what transformers said of it, recorded by tests/oracle/make_gemma3_golden.py."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.load import load_params
from jaxinfer.models.attention import DenseKV
from jaxinfer.models.registry import decoder_for
from tests.models.test_quantized_layers import Held
from tests.oracle.gemma3_tiny import CASES, SHOWN, config_of, tensors_of, token_ids

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "gemma3.json").read_text("utf-8"))
TINY = {entry["case"]: entry for entry in GOLDEN["tiny"]}
ERROR = 1e-4  # of the largest logit


def test_the_golden_file_is_of_these_cases_and_weights():
    assert list(TINY) == list(CASES)
    for case, entry in TINY.items():
        digest = hashlib.sha256()
        for _, tensor in sorted(tensors_of(case).items()):
            digest.update(np.ascontiguousarray(tensor).tobytes())
        assert digest.hexdigest() == entry["weights"], "another generator; make the file again"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cut", [None, 690], ids=["at once", "two chunks"])
def test_logits_are_transformers(case: str, cut: int | None):
    decoder = decoder_for(config_of(case), dtype=jnp.dtype("float32"))
    params = load_params(
        Held(tensors_of(case)), decoder.weight_plan(), dtype=np.float32, file="tensors"
    )

    @jax.jit
    def run(params: dict[str, Any], ids: jax.Array) -> jax.Array:
        caches = [DenseKV(decoder.config) for _ in params["layers"]]
        first = decoder.run_dense(params, ids[:cut], caches)
        if cut is None:
            return first
        return jnp.concatenate([first, decoder.run_dense(params, ids[cut:], caches, cut)])

    got = run(params, np.array(token_ids(case), np.int32))[np.array(SHOWN)]
    want = np.array(TINY[case]["logits"])
    assert np.abs(want).max() > 2  # neither flat nor degenerate
    np.testing.assert_allclose(got, want, rtol=0, atol=ERROR * np.abs(want).max())

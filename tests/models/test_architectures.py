"""Each family against what transformers said, recorded by oracle/make_architectures_golden.py."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.layout import arranged
from checkpoints.load import load_params
from jaxinfer.models.registry import FAMILIES, decoder_for
from tests.held_tensors import Held
from tests.models.tiny_decoder import dense_logits
from tests.oracle.architectures import (
    CASES,
    NUM_TOKENS,
    SHOWN,
    config_of,
    tensors_of,
    token_ids,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "architectures.json").read_text("utf-8"))
RECORDED = {entry["case"]: entry for entry in GOLDEN["models"]}
ERROR = 1e-4  # of the largest logit
ELSEWHERE = {"Gemma3ForCausalLM"}  # test_gemma3_golden.py


def test_every_family_has_a_case():
    covered = {name for case in CASES.values() for name in case["architectures"]}
    assert covered | ELSEWHERE == set(FAMILIES)


def test_the_golden_file_is_of_these_cases_and_weights():
    assert list(RECORDED) == list(CASES)
    for case, entry in RECORDED.items():
        digest = hashlib.sha256()
        for _, tensor in sorted(tensors_of(case).items()):
            digest.update(np.ascontiguousarray(tensor).tobytes())
        assert digest.hexdigest() == entry["weights"], "another generator; make the file again"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "cuts",
    [pytest.param((), id="at once", marks=pytest.mark.slow), (130, 199)],
    ids=[None, "two chunks and a token"],
)
def test_logits_are_transformers(case: str, cuts: tuple[int, ...]):
    config = config_of(case)
    decoder = decoder_for(config, dtype=jnp.dtype("float32"), max_model_len=NUM_TOKENS)
    source = arranged(Held(tensors_of(case)), config, "tensors")
    params = load_params(source, decoder.weight_plan(), dtype=np.float32, file="tensors")
    got = dense_logits(decoder, params, token_ids(case), cuts)[np.array(SHOWN)]
    want = np.array(RECORDED[case]["logits"])
    assert np.abs(want).max() > 2  # neither flat nor degenerate
    np.testing.assert_allclose(got, want, rtol=0, atol=ERROR * np.abs(want).max())

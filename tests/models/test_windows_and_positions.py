"""Sliding windows to the token, and positions far out: at once, in chunks, or token by token."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.attention import DenseKV
from tests.models.tiny_decoder import (
    GEMMA2,
    GEMMA3,
    MISTRAL,
    TinyDecoder,
    load_tiny,
)

WINDOW, LAST = 4, 11
ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1, "sliding_window": WINDOW}
SLIDING: dict[str, dict[str, Any]] = {
    "mistral": MISTRAL,
    "gemma2": GEMMA2 | {"hidden_act": None, "query_pre_attn_scalar": 16},
    "gemma3": GEMMA3 | {"sliding_window_pattern": 2},
}
FAR, EACH = 20_000, (1, 2, 3)
YARN = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 512}
FAR_OUT: dict[str, dict[str, Any]] = {
    "yarn": {"rope_scaling": YARN},
    "two bases": GEMMA3 | {"num_hidden_layers": 2, "sliding_window_pattern": 2},
}


def logits(
    tiny: TinyDecoder, texts: list[list[int]], cuts: tuple[int, ...] = (), start: int = 0
) -> np.ndarray:
    """float32[N, T, V] of texts of one length that begin at position `start`, in chunks."""
    bounds = list(itertools.pairwise((0, *cuts, len(texts[0]))))

    def one(ids: jax.Array) -> jax.Array:
        caches = [DenseKV(tiny.decoder.config) for _ in tiny.params["layers"]]
        run = partial(tiny.decoder.run_dense, tiny.params)
        return jnp.concatenate([run(ids[a:b], caches, start + a) for a, b in bounds])

    return np.asarray(jax.jit(jax.vmap(one))(np.array(texts, np.int32)))


@pytest.mark.parametrize("name", SLIDING)
def test_a_query_sees_as_many_tokens_as_the_window_has(tmp_path: Path, name: str):
    tiny = load_tiny(tmp_path, **SLIDING[name] | ONE_LAYER)
    ids = tiny.random_ids(LAST + 1)
    texts = [list(ids) for _ in range(LAST)]
    for back in range(1, LAST):
        texts[back][LAST - back] = (ids[LAST - back] + 1) % tiny.vocab_size
    usual, *others = logits(tiny, texts, (3, 7))[:, LAST]
    changes = [np.abs(other - usual).max() for other in others]
    seen = [back for back, change in enumerate(changes, 1) if change > 1e-5]
    assert seen == list(range(1, WINDOW))


@pytest.mark.parametrize("case", FAR_OUT)
def test_far_out_tokens_one_by_one_are_as_at_once(tmp_path: Path, case: str):
    tiny = load_tiny(tmp_path, max_position_embeddings=32_768, **FAR_OUT[case])
    ids = tiny.random_ids(4)
    near, at_once, by_token = (
        logits(tiny, [ids], cuts, start) for cuts, start in (((), 0), ((), FAR), (EACH, FAR))
    )
    largest = np.abs(at_once).max()
    np.testing.assert_allclose(by_token, at_once, rtol=0, atol=1e-5 * largest)
    # Rotations are relative; an angle of 20,000 has an error of 1e-3 in float32, as transformers'.
    np.testing.assert_allclose(near, at_once, rtol=0, atol=2e-2 * largest)

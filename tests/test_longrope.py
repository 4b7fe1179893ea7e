"""An engine's longest text chooses longrope's factors: for each of its texts and versions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.checkpoint import open_checkpoint
from jaxinfer.config import EngineConfig, ModelSource
from jaxinfer.models.registry import decoder_for
from jaxinfer.offline import LLM
from jaxinfer.runtime.weights import load_weights
from jaxinfer.version_order import VersionOrder
from tests.models.tiny_decoder import PHI3, dense_logits
from tests.tiny import tiny_engine_config, write_checkpoint
from tests.tiny_llm import SMALL

TRAINED, PROMPT = 64, tuple(range(7, 37))
LONGROPE: dict[str, Any] = {
    "type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [9.0] * 8,
    "original_max_position_embeddings": TRAINED,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("longrope")
    model = write_checkpoint(folder / "model", **PHI3, rope_scaling=LONGROPE)
    return tiny_engine_config(model, folder / "cache", **SMALL, max_model_len=TRAINED)


def best_tokens(config: EngineConfig, ids: Sequence[int], max_model_len: int | None) -> list[int]:
    """The best after each of `ids`, by the plain form of the model."""
    checkpoint = open_checkpoint(Path(config.source.model))
    decoder = decoder_for(
        checkpoint.config, dtype=jnp.dtype("float32"), max_model_len=max_model_len
    )
    logits = dense_logits(decoder, load_weights(checkpoint, decoder), list(ids))
    checkpoint.close()
    return np.argmax(logits, axis=1).tolist()


def test_an_engine_of_short_texts_turns_by_the_short_factors(config: EngineConfig):
    llm = LLM(config=config)
    (answer,) = llm.generate([PROMPT], max_tokens=20, temperature=0, ignore_eos=True)
    text = (*PROMPT, *answer.token_ids)
    short, long = (best_tokens(config, text, limit) for limit in (TRAINED, None))
    assert short != long
    assert list(answer.token_ids) == short[len(PROMPT) - 1 : -1]
    order = VersionOrder(ModelSource(config.source.model), None, "beside")
    opened = llm._built.version_source.open(order)
    opened.close()
    assert opened.manner == "beside"  # the running programs compute it

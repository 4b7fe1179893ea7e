"""A model that no kernel takes is refused before anything is compiled."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.models.registry import decoder_for
from pallas_kernels.backend import REFERENCE, Backend
from tests.tiny import tiny_config

FLOAT32 = jnp.dtype("float32")
TOO_LARGE: list[tuple[dict[str, Any], str]] = [
    ({"head_dim": 258}, "head_dim up to 256; got 258"),
    (
        {"num_attention_heads": 33, "num_key_value_heads": 1},
        "query heads per KV head up to 32; got 33",
    ),
    ({"hidden_size": 16386}, "hidden_size up to 16384; got 16386"),
    (
        {"num_attention_heads": 130, "num_key_value_heads": 65, "head_dim": 256},
        "up to 16384; got 32768",
    ),
]


@pytest.mark.parametrize(("changes", "message"), TOO_LARGE)
@pytest.mark.parametrize("form", ["pallas", "interpret"])
def test_a_size_beyond_the_kernels_is_refused_by_name(
    form: Any, changes: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=f"{message}: take --kernel-backend reference"):
        decoder_for(tiny_config(**changes), dtype=FLOAT32, backend=Backend(form))


@pytest.mark.parametrize(("changes", "_message"), TOO_LARGE)
def test_the_reference_form_takes_it(changes: dict[str, Any], _message: str):
    decoder_for(tiny_config(**changes), dtype=FLOAT32, backend=REFERENCE)


def test_the_largest_sizes_are_taken():
    largest = {
        "head_dim": 256,
        "num_attention_heads": 64,
        "num_key_value_heads": 2,
        "hidden_size": 16384,
    }
    decoder_for(tiny_config(**largest), dtype=FLOAT32, backend=Backend("pallas"))

"""Every type of rotary scaling has transformers' frequencies, in every spelling of config.json.

Recorded by oracle/make_ropes_golden.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder_layer import PreNormLayer
from jaxinfer.models.family import Family
from jaxinfer.models.registry import decoder_for, model_config
from jaxinfer.models.rope import apply_rope, attention_factor, inverse_frequencies, rope_tables
from tests.models.tiny_decoder import PHI3
from tests.oracle.ropes import HEAD_DIM, LONGEST, MAX_POSITIONS, PARTS, SCALINGS, THETA, scaling
from tests.tiny import tiny_config

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "ropes.json").read_text("utf-8"))
RECORDED = {(entry["scaling"], entry["part"]): entry for entry in GOLDEN["ropes"]}
ANY = Family(PreNormLayer, lambda keys: {"partial_rotary_factor": keys.partial_rotary_factor()})
TRAINED = "original_max_position_embeddings"


def new_form(name: str, part: float) -> dict[str, Any]:
    return {
        "rope_theta": None,
        "rope_parameters": scaling(name, part)
        | {"rope_theta": THETA, "partial_rotary_factor": part},
    }


def old_form(name: str, part: float) -> dict[str, Any]:
    own = scaling(name, part)
    own["type"] = own.pop("rope_type")
    return {"rope_theta": THETA, "partial_rotary_factor": part, "rope_scaling": own}


def phi3s_old_form(name: str, part: float) -> dict[str, Any]:
    """Trained positions beside the scaling, which the oldest files call `su`."""
    keys = old_form(name, part)
    own = keys["rope_scaling"]
    if own["type"] == "longrope":
        keys |= {TRAINED: own.pop(TRAINED)}
        own["type"] = "su"
    return keys


@pytest.mark.parametrize("form", [new_form, old_form, phi3s_old_form])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_their_factor_are_transformers(name: str, part: float, form: Any):
    keys: dict[str, Any] = {"head_dim": HEAD_DIM, "max_position_embeddings": MAX_POSITIONS}
    config = ANY.config(tiny_config(**keys, **form(name, part))).serving(LONGEST)
    want = RECORDED[name, part]
    np.testing.assert_allclose(inverse_frequencies(config), want["frequencies"], rtol=2e-6)
    assert attention_factor(config) == pytest.approx(want["attention_factor"], rel=1e-6)


def phi(**changes: Any) -> ModelConfig:
    return model_config(tiny_config(**PHI3, **changes))


LONGROPE: dict[str, Any] = scaling("longrope, short", 1.0) | {TRAINED: 64}


@pytest.mark.parametrize(
    ("max_model_len", "is_long"), [(2, False), (64, False), (65, True), (None, True), (900, True)]
)
def test_longropes_factors_are_chosen_by_the_longest_text_that_is_served(
    max_model_len: int | None, is_long: bool
):
    got = inverse_frequencies(phi(rope_scaling=LONGROPE).serving(max_model_len))
    factors = LONGROPE["long_factor" if is_long else "short_factor"]
    np.testing.assert_allclose(got * factors, 1e4 ** -(np.arange(8) / 8), rtol=1e-6)


def test_a_model_that_has_no_more_than_the_trained_positions_is_never_long():
    config = phi(rope_scaling=LONGROPE, max_position_embeddings=64)
    assert config.serving(None) == config.serving(64) == config.serving(900)
    assert attention_factor(config) == 1


def test_programs_of_short_texts_do_not_compute_long_ones():
    def decoder(max_model_len: int) -> Any:
        config = tiny_config(**PHI3, rope_scaling=LONGROPE)
        return decoder_for(config, dtype=jnp.dtype("float32"), max_model_len=max_model_len)

    assert decoder(64).shares_programs_with(decoder(2))
    assert decoder(65).shares_programs_with(decoder(640))
    assert not decoder(64).shares_programs_with(decoder(65))
    assert repr(decoder(64).config) != repr(decoder(65).config)  # of which a program's key is made


def test_a_part_of_a_head_turns_and_the_rest_stays():
    x = np.random.default_rng(0).normal(size=(3, 2, 16)).astype(np.float32)
    config = phi(partial_rotary_factor=0.75)
    tables = rope_tables(jnp.array([0, 5, 300]), inverse_frequencies(config))
    got = np.asarray(apply_rope(jnp.asarray(x), *tables))
    np.testing.assert_array_equal(got[..., 12:], x[..., 12:])
    np.testing.assert_array_equal(got[..., :12], apply_rope(jnp.asarray(x[..., :12]), *tables))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"short_factor": [1.0] * 7}, "short_factor must have 8 numbers, one for each pair that"),
        ({"long_factor": [1.0] * 9}, "long_factor must have 8 numbers, one .* turns; got 9"),
        ({"long_factor": "12345678"}, "long_factor must be a list of positive numbers; got '1234"),
        ({"short_factor": [0, *range(1, 8)]}, "short_factor must be a list of positive numbers"),
        ({"short_factor": [float("inf")] * 8}, "short_factor must be a list of positive numbers"),
        ({"long_factor": [None] * 8}, "long_factor must be a list of positive numbers; got .None"),
        ({"long_factor": None}, "long_factor must be a list of positive numbers; got None"),
        ({"factor": -2.0}, "needs a positive factor"),
        ({"factor": "4x"}, "rope scaling of type 'longrope' needs numbers for its keys"),
        ({"attention_factor": 0}, "needs positive numbers of original positions"),
        ({TRAINED: 1}, "rope scaling of type 'longrope' needs numbers"),
        ({TRAINED: -4}, "needs a positive factor"),
        ({"rope_type": "yarn", "factor": 2.0}, "must be default or longrope; got 'yarn'"),
    ],
)
def test_longrope_with_keys_that_cannot_be_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        phi(rope_scaling=LONGROPE | changes)


def test_longrope_without_its_factors_is_refused():
    with pytest.raises(ConfigError, match="rope scaling of type 'longrope' needs numbers for its"):
        phi(rope_scaling={"type": "longrope"})


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (0.45, "must turn an even number of a head's 16 elements; got 0.45"),
        (0.05, "elements; got 0.05"),
        (1.5, "elements; got 1.5"),
        (1e308, "elements; got 1e.308"),
        (0, "partial_rotary_factor must be a positive number; got 0"),
        ("half", "partial_rotary_factor must be a positive number; got 'half'"),
    ],
)
@pytest.mark.parametrize("is_new", [False, True])
def test_a_part_that_cannot_turn_is_refused(part: Any, message: str, is_new: bool):
    keys = {"partial_rotary_factor": part}
    with pytest.raises(ConfigError, match=message):
        phi(**({"rope_parameters": keys} if is_new else keys))


@pytest.mark.parametrize("kind", ["mrope", "proportional", 3, ["yarn"]])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_a_type_that_is_not_known_is_refused(kind: Any, key: str):
    with pytest.raises(ConfigError) as caught:
        model_config(tiny_config(rope_scaling={key: kind, "factor": 2.0}))
    assert str(caught.value) == (
        "config.json: rope_type must be default, linear, dynamic, llama3, yarn or longrope; "
        f"got {kind!r}"
    )

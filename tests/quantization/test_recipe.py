"""What may be asked of quantizing."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoints.formats import WeightFormat
from jaxinfer.errors import ConfigError
from jaxinfer.quantization.recipe import Recipe

INT4 = WeightFormat(4, 64, has_zero=True)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"method": "awq"}, "auto, nearest, gptq, learned; got 'awq'"),
        ({"head": WeightFormat(8, 128)}, "a scale per token"),
        ({"weights": WeightFormat(8), "keep_at_8_bits": 0.1}, "needs 4-bit weights"),
        ({"keep_at_8_bits": 0.0}, "between 0 and 1, such as 0.1; got 0.0"),
        ({"keep_at_8_bits": float("nan")}, "got nan"),
    ],
)
def test_what_cannot_be_done_is_refused(fields: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match=named):
        Recipe(**({"weights": INT4} | fields))


def test_what_four_bits_would_hurt_keeps_its_groups_at_eight():
    assert Recipe(INT4).spared == WeightFormat(8, 64, has_zero=True)


def test_the_description_names_all_that_was_done():
    recipe = Recipe(INT4, method="gptq", keep_at_8_bits=0.125, migrate_keys=True)
    assert recipe.description == (
        "gptq, channel scaling, key scaling, 8 bits where the error is above 0.125"
    )
    assert Recipe(INT4, method="nearest", migrate=False).description == "nearest"

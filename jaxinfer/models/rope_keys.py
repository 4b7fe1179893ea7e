"""How config.json says that rotary frequencies are stretched.

No JAX here. Old files call the type `type`, new ones `rope_type`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from jaxinfer.errors import ConfigError
from jaxinfer.models.config import RopeScaling

LLAMA3_CONTEXT = 8192
MAX_REACH = 1 << 31  # positions


def read_scaling(rope: Mapping[str, Any], *, max_positions: Any) -> RopeScaling | None:
    """Of rope_parameters or rope_scaling; None: not stretched.

    Args:
        max_positions: that the model was trained with, where `rope` does not say.
    Raises: ConfigError naming what is not supported.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise ConfigError(
            f"config.json: rope_type must be default, linear, llama3 or yarn; got {kind!r:.100}"
        )
    try:
        scaling = _yarn(rope, max_positions) if kind == "yarn" else _other(rope, kind)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"config.json: rope scaling of type {kind!r} needs numbers for its keys; "
            f"got {dict(rope)!r:.300}"
        ) from error
    _check(scaling, rope)
    return scaling


def _other(rope: Mapping[str, Any], kind: Literal["linear", "llama3"]) -> RopeScaling:
    return RopeScaling(
        rope_type=kind,
        factor=float(rope["factor"]),
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
        original_max_position_embeddings=int(
            rope.get("original_max_position_embeddings", LLAMA3_CONTEXT)
        ),
    )


def _yarn(rope: Mapping[str, Any], max_positions: Any) -> RopeScaling:
    """arXiv:2309.00071, with DeepSeek's two multipliers of its temperature."""
    factor = float(rope["factor"])
    own, whole = rope.get("mscale"), rope.get("mscale_all_dim")
    given = rope.get("attention_factor")
    if given is None:
        given = _mscale(factor, 1.0)
        if own and whole:
            given = _mscale(factor, float(own)) / _mscale(factor, float(whole))
    return RopeScaling(
        rope_type="yarn",
        factor=factor,
        original_max_position_embeddings=int(
            rope.get("original_max_position_embeddings") or max_positions
        ),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        attention_factor=float(given),
        is_truncated=bool(rope.get("truncate", True)),
    )


def _mscale(factor: float, multiplier: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def _check(scaling: RopeScaling, rope: Mapping[str, Any]) -> None:
    band = scaling.high_freq_factor - scaling.low_freq_factor
    if not (0 < scaling.factor <= MAX_REACH and 0 < band < math.inf):
        raise ConfigError(
            f"config.json: rope scaling needs a positive factor and high_freq_factor above "
            f"low_freq_factor; got {dict(rope)!r:.300}"
        )
    betas = scaling.beta_slow, scaling.beta_fast, scaling.attention_factor
    trained = scaling.original_max_position_embeddings
    if not 1 <= trained <= MAX_REACH or not all(0 < x < math.inf for x in betas):
        raise ConfigError(
            f"config.json: rope scaling needs positive numbers of original positions, beta_fast, "
            f"beta_slow and attention_factor; got {dict(rope)!r:.300}"
        )

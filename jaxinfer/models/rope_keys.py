"""How config.json says that rotary frequencies are stretched.

No JAX here. Old files call the type `type`, new ones `rope_type`; the oldest of Phi-3 call longrope
`su`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from jaxinfer.errors import ConfigError
from jaxinfer.models.config import ModelConfig, RopeScaling

LLAMA3_CONTEXT = 8192
TRAINED_POSITIONS = "original_max_position_embeddings"
MAX_REACH = 1 << 31  # positions


def read_scaling(rope: Mapping[str, Any], *, trained: Any, most: Any) -> RopeScaling | None:
    """Of rope_parameters or rope_scaling; None: not stretched.

    Args:
        trained: positions that the model was trained with, as the file says beside `rope`.
        most: that it has, max_position_embeddings.
    Raises: ConfigError naming what is not supported.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    try:
        match kind:
            case "linear" | "dynamic" | "llama3":
                scaling = _other(rope, kind)
            case "yarn":
                scaling = _yarn(rope, rope.get(TRAINED_POSITIONS) or trained or most)
            case "longrope" | "su":
                # Phi-3's files say it beside `rope`; transformers lets that win.
                scaling = _longrope(rope, trained or rope.get(TRAINED_POSITIONS) or most, most)
            case _:
                raise ConfigError(
                    "config.json: rope_type must be default, linear, dynamic, llama3, yarn or "
                    f"longrope; got {kind!r:.100}"
                )
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(
            f"config.json: rope scaling of type {kind!r} needs numbers for its keys; "
            f"got {dict(rope)!r:.300}"
        ) from error
    _check(scaling, rope)
    return scaling


def _other(rope: Mapping[str, Any], kind: Literal["linear", "dynamic", "llama3"]) -> RopeScaling:
    return RopeScaling(
        rope_type=kind,
        factor=float(rope["factor"]),
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
        original_max_position_embeddings=int(rope.get(TRAINED_POSITIONS, LLAMA3_CONTEXT)),
    )


def _yarn(rope: Mapping[str, Any], trained: Any) -> RopeScaling:
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
        original_max_position_embeddings=int(trained),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        attention_factor=float(given),
        is_truncated=bool(rope.get("truncate", True)),
    )


def _mscale(factor: float, multiplier: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def _longrope(rope: Mapping[str, Any], trained: Any, most: Any) -> RopeScaling:
    """arXiv:2402.13753. Without `factor`, which only cosines and sines are multiplied by a root of,
    it is how far the positions reach beyond the trained ones.
    """
    original, factor, given = int(trained), rope.get("factor"), rope.get("attention_factor")
    factor = most / original if factor is None else float(factor)
    if given is None:
        given = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeScaling(
        rope_type="longrope",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=float(given),
        short_factors=_factors(rope, "short_factor"),
        long_factors=_factors(rope, "long_factor"),
    )


def _factors(rope: Mapping[str, Any], key: str) -> tuple[float, ...]:
    values = rope[key]
    if not isinstance(values, list | tuple) or not all(
        isinstance(x, int | float) and 0 < x < math.inf for x in values
    ):
        raise ConfigError(
            f"config.json: {key} must be a list of positive numbers; got {values!r:.200}"
        )
    return tuple(map(float, values))


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


def check_pairs(config: ModelConfig) -> None:
    """Raises: ConfigError if no whole number of pairs turns, or longrope has not one factor for
    each.
    """
    factor = config.partial_rotary_factor
    if factor > 1 or config.rotary_dim < 2 or config.rotary_dim % 2:
        raise ConfigError(
            f"config.json: partial_rotary_factor must turn an even number of a head's "
            f"{config.head_dim} elements; got {factor}"
        )
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type != "longrope":
        return
    num_pairs = config.rotary_dim // 2
    lists = {"short_factor": scaling.short_factors, "long_factor": scaling.long_factors}
    for key, factors in lists.items():
        if len(factors) != num_pairs:
            raise ConfigError(
                f"config.json: {key} must have {num_pairs} numbers, one for each pair that turns; "
                f"got {len(factors)}"
            )

"""How a GGUF file says that rotary frequencies are stretched, as config.json's rope_scaling.

Linear and YaRN are metadata; of llama3 and longrope the divisors are tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.gguf_fields import Fields, shortest

DIVISORS = "rope_freqs.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = (DIVISORS, SHORT, LONG)
"""Parts of the config, not weights."""
KINDS = ("linear", "yarn", "longrope", "none")


def rope_scaling(
    fields: Fields, tensors: Mapping[str, np.ndarray], rope_theta: float, head_dim: int
) -> dict[str, Any] | None:
    """None: not stretched.

    Args:
        tensors: f32[D/2], those of ROPE_TENSORS that the file has.
    """
    if SHORT in tensors or LONG in tensors:
        return _longrope(fields, tensors)
    divisors = tensors.get(DIVISORS)
    if divisors is not None and not np.all(divisors == 1.0):
        return _llama3(fields.path, divisors, rope_theta, head_dim)
    kind, key = fields.get("rope.scaling.type"), "rope.scaling.factor"
    if kind is None and fields.get("rope.scale_linear") is not None:  # the key before 2024
        kind, key = "linear", "rope.scale_linear"
    elif kind is None and fields.get(key) is not None:
        kind = "linear"
    if kind is not None and not (isinstance(kind, str) and kind in KINDS):
        raise fields.error("rope.scaling.type", f"one of {', '.join(KINDS)}", kind)
    if kind in (None, "none"):
        return None
    if kind == "longrope":
        raise CheckpointError(f"{fields.path}: expected tensors {SHORT!r} and {LONG!r}, found none")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": fields.number(key)}
    if fields.get("rope.scaling.original_context_length") is not None:
        scaling["original_max_position_embeddings"] = fields.integer(
            "rope.scaling.original_context_length"
        )
    return scaling | (_yarn_keys(fields) if kind == "yarn" else {})


def _yarn_keys(fields: Fields) -> dict[str, Any]:
    names = {
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
        "attention_factor": "rope.scaling.yarn_attn_factor",
    }
    found = {ours: fields.number(key) for ours, key in names.items() if fields.get(key) is not None}
    if all_dims := fields.optional("rope.scaling.yarn_log_multiplier"):
        found |= {"mscale": 1.0, "mscale_all_dim": all_dims}
    return found


def _longrope(fields: Fields, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """What cosines and sines are multiplied by is left out where it is the published formula's."""
    for name in (SHORT, LONG):
        if name not in tensors:
            raise CheckpointError(f"{fields.path}: expected a tensor {name!r}, found none")
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": [shortest(x) for x in tensors[SHORT].tolist()],
        "long_factor": [shortest(x) for x in tensors[LONG].tolist()],
    }
    most = fields.integer("context_length")
    trained = fields.integer("rope.scaling.original_context_length", most)
    reach = most / trained
    usual = math.sqrt(1 + math.log(reach) / math.log(trained)) if reach > 1 and trained > 1 else 1.0
    found = fields.number("rope.scaling.attn_factor", usual)
    if not math.isclose(found, usual, rel_tol=1e-6):
        scaling["attention_factor"] = found
    return scaling


def _llama3(path: Path, divisors: np.ndarray, rope_theta: float, head_dim: int) -> dict[str, Any]:
    """The llama3 parameters behind the stored divisors.

    The file keeps only the divisors, and every published llama3 model has the same three other
    parameters: those are assumed, and the divisors that follow from them compared with the file's.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = llama3_divisors(scaling, rope_theta, head_dim)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise CheckpointError(
            f"{path}: expected {DIVISORS!r} to be llama3 scaling of 8192 positions with "
            f"frequency factors 1 and 4, found other values"
        )
    return scaling


def llama3_divisors(scaling: Mapping[str, Any], rope_theta: float, head_dim: int) -> np.ndarray:
    """f64[D/2]: what llama3 scaling divides each rotary frequency by (Llama 3.1's formula)."""
    frequencies = rope_theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)

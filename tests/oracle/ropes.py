"""Rotary scalings of every type, whose frequencies tests/data/ropes.json records: plain data."""

from typing import Any

HEAD_DIM, THETA, MAX_POSITIONS = 16, 20_000.0, 512
LONGEST = 300
"""Tokens of the longest text."""
PARTS = (1.0, 0.75)
"""Of a head that turn."""


def _llama3(**changes: Any) -> dict[str, Any]:
    plain = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_type": "llama3", **plain, "original_max_position_embeddings": 128} | changes


def _yarn(**changes: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128} | changes


def _longrope(trained: int, **changes: Any) -> dict[str, Any]:
    """For 8 pairs; `scaling` cuts the lists."""
    return {
        "rope_type": "longrope",
        "short_factor": [1 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + i * i for i in range(8)],
        "original_max_position_embeddings": trained,
    } | changes


SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": _llama3(),
    "llama3, another band": _llama3(low_freq_factor=0.5, high_freq_factor=2.0),
    "yarn": _yarn(),
    "yarn, not truncated": _yarn(beta_fast=8.0, beta_slow=0.5, truncate=False),
    "yarn, mscale": _yarn(mscale=0.7, mscale_all_dim=1.2),
    "yarn, attention factor": _yarn(attention_factor=0.9),
    "longrope, short": _longrope(LONGEST),
    "longrope, long": _longrope(LONGEST - 1),
    "longrope, factor": _longrope(128, factor=32.0),
    "longrope, attention factor": _longrope(128, attention_factor=1.3),
    "longrope, trained for all": _longrope(MAX_POSITIONS),
}


def scaling(name: str, part: float) -> dict[str, Any]:
    """In transformers 5's words, without theta and the part that turns."""
    num_pairs = int(HEAD_DIM * part) // 2
    return {
        key: value[:num_pairs] if isinstance(value, list) else value
        for key, value in SCALINGS[name].items()
    }

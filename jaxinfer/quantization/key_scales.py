"""Per-channel scales of keys, so that int8 keys with one scale for a token lose less.

Dividing the key weights and multiplying the query weights by the same numbers changes no score, if
the two channels that a rotary angle turns into each other share a number. A token's scale follows
its largest channel: what makes that smaller makes every other channel finer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from pallas_kernels.kv_write import quantize

Floats = npt.NDArray[np.float32]

KEY_POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of a channel pair's largest key
QUERY_POWERS = (0.0, 0.25, 0.5)  # of one over the root mean square of its queries
MAX_QUERIES = 64  # that errors are measured with, spread over the window
LEAST = 1e-6  # of the largest channel: a silent one keeps a finite scale


@dataclass(frozen=True, slots=True)
class KeyScales:
    """What one layer's keys are divided by, and its queries multiplied."""

    scales: Floats  # float32[K, D/2]; channels d and d + D/2 share one; geometric mean 1
    error: float  # variance of the rounded scores about the exact, under the attention weights
    error_before: float  # the same with all scales 1


def find_key_scales(keys: Floats, queries: Floats) -> KeyScales:
    """The scales of a grid that round the scores best; each KV head chooses for itself.

    The error is twice the divergence of the attention weights, for small ones: an error that all
    keys of a query share costs nothing, one of a key that nobody looks at hardly anything.

    Args:
        keys: float32[T, K, D] of one window behind the rotary embedding, from position 0.
        queries: float32[T, H, D]; H a multiple of K.
    Raises: ValueError if the shapes do not fit, or for numbers that are not finite.
    """
    _check(keys, queries)
    shared = queries.shape[1] // keys.shape[1]
    chosen = [
        _best(keys[:, head], queries[:, head * shared : (head + 1) * shared])
        for head in range(keys.shape[1])
    ]
    return KeyScales(
        scales=np.stack([scales for scales, _, _ in chosen]),
        error=float(np.mean([error for _, error, _ in chosen])),
        error_before=float(np.mean([before for _, _, before in chosen])),
    )


def by_channel(scales: Floats) -> Floats:
    """float32[K, D/2] -> float32[K, D], for the channels of a rotary half each."""
    return np.concatenate([scales, scales], axis=-1)


def _best(keys: Floats, queries: Floats) -> tuple[Floats, float, float]:
    """Scales [D/2] of one head, their error, and the error without: keys [T, D], queries [T, s, D].

    The first candidate is all ones, and wins where nothing is better.
    """
    at = np.unique(np.linspace(0, len(keys) - 1, MAX_QUERIES).astype(int))
    asked = queries[at] * np.float32(keys.shape[-1] ** -0.5)
    weights = _attention(asked, keys, at)
    errors: list[tuple[float, Floats]] = []
    for scales in _candidates(keys, queries):
        wide = np.concatenate([scales, scales])
        difference = _rounded(keys / wide) * wide - keys
        errors.append((_variance((asked @ difference.T).astype(np.float32), weights), scales))
    error, scales = min(errors, key=lambda found: found[0])
    return scales, error, errors[0][0]


def _candidates(keys: Floats, queries: Floats) -> Iterator[Floats]:
    """float32[D/2], all ones first."""
    largest = _floored(_pairs(np.abs(keys)).max(axis=(0, 1)))
    squares = np.square(_pairs(queries)).mean(axis=(0, 1, 2), dtype=np.float32)
    asked = _floored(np.sqrt(squares).astype(np.float32))
    for of_keys, of_queries in product(KEY_POWERS, QUERY_POWERS):
        scales = largest**of_keys * asked**-of_queries
        yield (scales / np.exp(np.log(scales).mean())).astype(np.float32)


def _pairs(x: Floats) -> Floats:
    """[..., D] -> [..., 2, D/2]."""
    return x.reshape(*x.shape[:-1], 2, -1)


def _floored(x: Floats) -> Floats:
    most = x.max()
    if most <= 0:
        return np.ones_like(x)
    return np.maximum(x, most * LEAST).astype(np.float32)


def _attention(asked: Floats, keys: Floats, at: npt.NDArray[np.int_]) -> Floats:
    """Softmax float32[Q, s, T] of what each query sees."""
    scores = asked @ keys.T
    scores[np.broadcast_to(np.arange(len(keys)) > at[:, None, None], scores.shape)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)


def _variance(errors: Floats, weights: Floats) -> float:
    mean = np.sum(weights * errors, axis=-1, keepdims=True)
    return float(np.mean(np.sum(weights * np.square(errors - mean), axis=-1)))


def _rounded(x: Floats) -> Floats:
    numbers, scale = quantize(jnp.asarray(x))
    return np.asarray(numbers, np.float32) * np.asarray(scale)


def _check(keys: Floats, queries: Floats) -> None:
    fits = keys.ndim == 3 and queries.ndim == 3 and len(keys) == len(queries) > 0
    fits = fits and keys.shape[2] == queries.shape[2] and keys.shape[2] % 2 == 0
    if not fits or queries.shape[1] % keys.shape[1]:
        raise ValueError(
            f"expected keys [T, K, D] and queries [T, H, D] with an even D and H a multiple of K; "
            f"got {keys.shape} and {queries.shape}"
        )
    if not (np.isfinite(keys).all() and np.isfinite(queries).all()):
        raise ValueError("keys or queries hold NaN or infinity; find where they come from first")

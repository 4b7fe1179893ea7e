"""exp and sigmoid of a few numbers, with the same bits in every program.

A compiler's own exp has other bits in the vectors of a loop than in its remainder (seen on XLA's
CPU, both of jax 0.10.2 and 0.12, in arrays whose size is no multiple of 32), and which of the two
computes a number depends on how many others there are. This one is additions and rounded products,
each of which is exact to the bit anywhere. Slower: for gates and routers, not for whole MLPs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rounded import rounded

LOWEST, HIGHEST = -87.0, 88.0  # beyond them float32 has subnormals and infinity
LOG2_E = 1.4426950408889634
LN2_HIGH = 0.693359375  # of few bits, so that products with small integers are exact
LN2_LOW = -2.1219444005469057e-4
TERMS = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)  # of the series, last first


def steady_exp(x: jax.Array) -> jax.Array:
    """float32[...] -> float32[...], within 2e-7 of exp; below LOWEST and above HIGHEST as there."""
    x = jnp.clip(x, LOWEST, HIGHEST)
    power = jnp.round(rounded(x * LOG2_E))
    rest = x - rounded(power * LN2_HIGH) - rounded(power * LN2_LOW)
    total = jnp.full_like(x, TERMS[0])
    for term in TERMS[1:]:
        total = rounded(total * rest) + term
    exponent = power.astype(jnp.int32) + 127
    return total * lax.bitcast_convert_type(exponent << 23, jnp.float32)


def steady_sigmoid(x: jax.Array) -> jax.Array:
    """float32[...] -> float32[...]: 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + steady_exp(-x))

"""A product that is rounded before it meets a sum, in every program.

Whether XLA's CPU compiler makes one multiply-add of a product and the sum that takes it may depend
on the number of rows (row_sum.py), and it drops barriers. A choice alone is no barrier either: LLVM
draws the sum into it. It keeps a minimum.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rounded(product: jax.Array) -> jax.Array:
    """The product as it is; NaN where it is NaN or positive infinity, so that neither is lost."""
    largest = jnp.asarray(jnp.finfo(product.dtype).max, product.dtype)
    nothing = jnp.asarray(jnp.nan, product.dtype)
    return jnp.where(product <= largest, jnp.minimum(product, largest), nothing)

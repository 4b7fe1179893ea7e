"""Another version of the weights for the programs of a model: the same numbers in another order."""

from __future__ import annotations

import jax
import numpy as np

from jaxinfer.build import Built


def add_other_weights(built: Built, version: str) -> None:
    """Gives the runner, under this name, a tree of its own memory in which each tensor is reversed
    along its last axis: the shapes, dtypes and formats that the programs were made for.
    """
    params = jax.tree.map(_reversed, built.runner.params(built.version))
    built.runner.add_version(version, jax.block_until_ready(params))


def _reversed(array: jax.Array) -> jax.Array:
    host = np.asarray(array)
    return jax.device_put(np.array(host[..., ::-1] if host.ndim else host), array.sharding)

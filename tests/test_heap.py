"""Host memory that JAX no longer needs is freed, not just unused."""

from __future__ import annotations

import weakref

import jax
import numpy as np

from checkpoints.aligned import aligned_empty
from jaxinfer.heap import trim_heap


def test_the_host_array_behind_a_deleted_parameter_is_let_go():
    array = aligned_empty((4096,), np.dtype(np.float32))
    array[:] = 1.0
    reference = weakref.ref(array)
    placed = jax.block_until_ready(jax.device_put(array))
    del array
    placed.delete()
    trim_heap()
    assert reference() is None

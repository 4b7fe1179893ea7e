"""Learned rounding: signed gradient descent on how each weight is rounded and where each group is
clipped, against the error of the product (AutoRound, arXiv:2309.05516).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from checkpoints.formats import WeightFormat
from checkpoints.qtensor import QTensor
from checkpoints.rounding import LEAST_SCALE, finite, grouped, levels, scales_of

BATCH = 512  # rows of inputs per step
MAX_OFFSET = 0.5  # of a step between integers: each weight goes to one of its two neighbours
RATE = 0.3  # what a parameter can travel in all steps is half of this; at 1, as in the paper, the
# error of SmolLM2's layers rises again after a tenth of 100 steps
END_RATE = 0.1  # of a group's ends, per RATE: a whole group follows them
MAX_END = 5.0  # so ends move by at most half of where they began
NUM_LOOKS = 20  # times that the error of all inputs is taken


class _Product(NamedTuple):
    """What stays as it is."""

    weight: jax.Array  # float32[N, G, size]
    inputs: jax.Array  # float32[T, K]
    hessian: jax.Array  # float32[K, K]
    scale: jax.Array  # float32[N, G, 1]
    zero: jax.Array  # float32[N, G, 1]


class _State(NamedTuple):
    """What is learned."""

    offsets: jax.Array  # float32[N, G, size], of a step
    low: jax.Array  # float32[N, G, 1]: a group's lower end is 1 + END_RATE * low times what it was
    high: jax.Array  # the same of its upper end; of its scale without zero points


def learn_rounding(
    weight: np.ndarray,
    inputs: np.ndarray,
    kept: WeightFormat,
    *,
    num_steps: int = 200,
    seed: int = 0,
) -> QTensor:
    """A weight whose products with the inputs differ less than those of round-to-nearest.

    Args:
        weight: float[N, K].
        inputs: float[T, K] from calibration.
        seed: of the rows that each step sees.
    Raises: ValueError for numbers that are not finite, inputs of another width, or no step.
    """
    weight, inputs = finite(weight), finite(inputs)
    if inputs.ndim != 2 or inputs.shape[1] != weight.shape[1] or not len(inputs):
        raise ValueError(f"expected inputs of {weight.shape[1]} channels, got {inputs.shape}")
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1; got {num_steps}")
    scale, zero = scales_of(weight, kept, importance=np.square(inputs).mean(axis=0))
    begun_zero = np.zeros_like(scale) if zero is None else zero.astype(np.float32)
    product = _Product(
        jnp.asarray(grouped(weight, kept)),
        jnp.asarray(inputs),
        jnp.asarray(inputs.T @ (inputs / len(inputs))),
        jnp.asarray(scale.T[..., None]),
        jnp.asarray(begun_zero.T[..., None]),
    )
    found = _learned(product, jax.random.key(seed), kept=kept, num_steps=num_steps)
    q, scale, found_zero = map(np.asarray, found)
    return QTensor(
        q.reshape(len(weight), -1)[:, : weight.shape[1]].astype(np.int8),
        np.ascontiguousarray(scale[..., 0].T),
        None if zero is None else np.ascontiguousarray(found_zero[..., 0].T).astype(np.int8),
        kept,
    )


@partial(jax.jit, static_argnames=("kept", "num_steps"))
def _learned(
    product: _Product, key: jax.Array, *, kept: WeightFormat, num_steps: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The integers, scales and zero points of the best state."""
    optimizer = optax.sign_sgd(optax.linear_schedule(RATE / num_steps, 0.0, num_steps))
    num_rows = len(product.inputs)
    look_every = max(1, num_steps // NUM_LOOKS)

    def step(carry: Any, i: jax.Array) -> tuple[Any, None]:
        state, memory, best = carry
        seen = jax.random.randint(jax.random.fold_in(key, i), (min(BATCH, num_rows),), 0, num_rows)
        slope = jax.grad(_batch_loss)(state, product, product.inputs[seen], kept)
        updates, memory = optimizer.update(slope, memory)
        state = _moved(state, updates)
        is_look = (i + 1) % look_every == 0
        best = jax.lax.cond(is_look, better, lambda best, _: best, best, state)
        return (state, memory, best), None

    def look(state: _State) -> tuple[_State, jax.Array]:
        return state, _full_loss(state, product, kept)

    def better(best: tuple[_State, jax.Array], state: _State) -> tuple[_State, jax.Array]:
        seen = look(state)
        return jax.tree.map(lambda new, old: jnp.where(seen[1] < best[1], new, old), seen, best)

    begun = _State(*map(jnp.zeros_like, (product.weight, product.scale, product.scale)))
    carry = begun, optimizer.init(begun), look(begun)
    (_, _, (best, _)), _ = jax.lax.scan(step, carry, jnp.arange(num_steps))
    return _integers(product, best, kept)


def _batch_loss(
    state: _State, product: _Product, inputs: jax.Array, kept: WeightFormat
) -> jax.Array:
    return jnp.square(inputs @ _errors(state, product, kept).T).mean()


def _full_loss(state: _State, product: _Product, kept: WeightFormat) -> jax.Array:
    off = _errors(state, product, kept)
    return jnp.vdot(off @ product.hessian, off)


def _errors(state: _State, product: _Product, kept: WeightFormat) -> jax.Array:
    """float32[N, K]."""
    q, scale, zero = _integers(product, state, kept)
    off = (q - zero) * scale - product.weight
    return off.reshape(len(off), -1)[:, : product.inputs.shape[1]]


def _moved(state: _State, updates: optax.Updates) -> _State:
    moved = optax.apply_updates(state, updates)
    assert isinstance(moved, _State)
    return _State(
        jnp.clip(moved.offsets, -MAX_OFFSET, MAX_OFFSET),
        jnp.clip(moved.low, -MAX_END, MAX_END),
        jnp.clip(moved.high, -MAX_END, MAX_END),
    )


def _integers(
    product: _Product, state: _State, kept: WeightFormat
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Integers, scales and zero points as floats; rounding passes slopes through."""
    low, high = levels(kept)
    scale, zero = product.scale * (1 + END_RATE * state.high), product.zero
    if kept.has_zero:
        least = (low - zero) * product.scale * (1 + END_RATE * state.low)
        scale = ((high - zero) * scale - least) / (high - low)
        zero = jnp.clip(_round(low - _over(least, scale)), low, high)
    scale = jnp.where(scale < LEAST_SCALE, 0.0, scale)
    steps = _over(product.weight, scale)
    q = jnp.clip(_round(steps + state.offsets) + zero, low, high)
    return jnp.where(scale > 0, q, zero), scale, zero


def _over(x: jax.Array, scale: jax.Array) -> jax.Array:
    """x / scale; 0 where that is 0, in slopes too."""
    return jnp.where(scale > 0, x / jnp.where(scale > 0, scale, 1.0), 0.0)


def _round(x: jax.Array) -> jax.Array:
    return x + jax.lax.stop_gradient(jnp.round(x) - x)

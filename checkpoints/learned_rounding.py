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
FACTORS = (0.5, 1.5)  # of a group's ends against where they began
NUM_LOOKS = 10  # times that the error of all inputs is taken


class _State(NamedTuple):
    """What is learned, with the weights in groups."""

    offsets: jax.Array  # float32[N, G, size]
    low: jax.Array  # float32[N, G, 1]: factors of a group's lower and upper end
    high: jax.Array


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
    Raises: ValueError for numbers that are not finite, or inputs of another width.
    """
    weight, inputs = finite(weight), finite(inputs)
    if inputs.ndim != 2 or inputs.shape[1] != weight.shape[1] or not len(inputs):
        raise ValueError(f"expected inputs of {weight.shape[1]} channels, got {inputs.shape}")
    scale, zero = scales_of(weight, kept, importance=np.square(inputs).mean(axis=0))
    hessian = inputs.T @ (inputs / len(inputs))
    begun = jnp.asarray(scale.T[..., None]), _zeros(zero, scale)
    key = jax.random.key(seed)
    q, scale_, zero_ = _learned(
        grouped(weight, kept), inputs, hessian, *begun, key, kept=kept, num_steps=num_steps
    )
    q = np.asarray(q, np.int8).reshape(len(weight), -1)[:, : weight.shape[1]]
    learned_zero = np.asarray(zero_[..., 0].T, np.int8) if kept.has_zero else None
    return QTensor(q, np.array(scale_[..., 0].T), learned_zero, kept)


def _zeros(zero: np.ndarray | None, scale: np.ndarray) -> jax.Array:
    if zero is None:
        return jnp.zeros((*scale.T.shape, 1), jnp.float32)
    return jnp.asarray(zero.T[..., None], jnp.float32)


@partial(jax.jit, static_argnames=("kept", "num_steps"))
def _learned(
    weight: jax.Array,
    inputs: jax.Array,
    hessian: jax.Array,
    scale: jax.Array,
    zero: jax.Array,
    key: jax.Array,
    *,
    kept: WeightFormat,
    num_steps: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The integers, scales and zero points of the best state."""
    # Each parameter can cross its whole range: the rates' sum is about half of num_steps times this.
    optimizer = optax.sign_sgd(optax.linear_schedule(1.0 / num_steps, 0.0, num_steps))
    num_inputs, batch = inputs.shape[1], min(BATCH, len(inputs))
    look_every = max(1, num_steps // NUM_LOOKS)

    def errors(state: _State) -> jax.Array:
        q, own_scale, own_zero = _integers(weight, scale, zero, state, kept)
        off = (q - own_zero) * own_scale - weight
        return off.reshape(len(off), -1)[:, :num_inputs]

    def batch_loss(state: _State, rows: jax.Array) -> jax.Array:
        return jnp.square(rows @ errors(state).T).mean()

    def full_loss(state: _State) -> jax.Array:
        off = errors(state)
        return jnp.vdot(off @ hessian, off)

    def step(carry: Any, i: jax.Array) -> tuple[Any, None]:
        state, memory, best, least = carry
        rows = jax.random.randint(jax.random.fold_in(key, i), (batch,), 0, len(inputs))
        slope = jax.grad(batch_loss)(state, inputs[rows])
        updates, memory = optimizer.update(slope, memory)
        state = _bounded(optax.apply_updates(state, updates))
        loss = jax.lax.cond(
            (i + 1) % look_every == 0, full_loss, lambda _: jnp.float32(jnp.inf), state
        )
        best = jax.tree.map(lambda new, old: jnp.where(loss < least, new, old), state, best)
        return (state, memory, best, jnp.minimum(loss, least)), None

    begun = _State(jnp.zeros_like(weight), jnp.ones_like(scale), jnp.ones_like(scale))
    carry = begun, optimizer.init(begun), begun, full_loss(begun)
    (_, _, best, _), _ = jax.lax.scan(step, carry, jnp.arange(num_steps))
    return _integers(weight, scale, zero, best, kept)


def _bounded(state: _State) -> _State:
    return _State(
        jnp.clip(state.offsets, -MAX_OFFSET, MAX_OFFSET),
        jnp.clip(state.low, *FACTORS),
        jnp.clip(state.high, *FACTORS),
    )


def _integers(
    weight: jax.Array, scale: jax.Array, zero: jax.Array, state: _State, kept: WeightFormat
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As floats; rounding passes slopes through."""
    low, high = levels(kept)
    if kept.has_zero:
        least, most = (low - zero) * scale * state.low, (high - zero) * scale * state.high
        own = (most - least) / (high - low)
        ratio = jnp.where(own > 0, least / jnp.where(own > 0, own, 1), -(zero - low))
        own_zero = jnp.clip(_round(low - ratio), low, high)
    else:
        own, own_zero = scale * state.high, zero
    own = jnp.where(own < LEAST_SCALE, 0.0, own)
    steps = jnp.where(own > 0, weight / jnp.where(own > 0, own, 1), 0.0)
    q = jnp.clip(_round(steps + state.offsets) + own_zero, low, high)
    return jnp.where(own > 0, q, own_zero), own, own_zero


def _round(x: jax.Array) -> jax.Array:
    return x + jax.lax.stop_gradient(jnp.round(x) - x)

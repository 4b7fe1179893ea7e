"""Where the KV range of a row is cut into pieces that are computed apart and added up in order.

Segments lie at absolute positions, so that a query's bits do not depend on who computes them: the
decode kernel spreads a row's segments over programs, the ragged kernel visits them one by one.
They hold SEGMENT tokens up to position PER_OCTAVE * 2 * SEGMENT and double with every doubling of
the position from there on: a long row has few partial results, and still enough to share out.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

LOG_SEGMENT = 9
SEGMENT = 1 << LOG_SEGMENT  # tokens
PER_OCTAVE = 16  # segments between a position and its double
OCTAVES = 8  # from 4 Mi tokens on, segments grow no more

#  tokens  0      512    1024 ...  16384          17408 ...  32768          34816
#          | 0    | 1    | 2  ...  | 32           | 33  ...  | 48           | 49


def segment_of(position: jax.Array) -> jax.Array:
    """int32[] -> the segment that holds this position; -1 for -1."""
    found = position >> LOG_SEGMENT
    for octave in range(1, OCTAVES + 1):
        found = jnp.minimum(found, PER_OCTAVE * octave + (position >> (LOG_SEGMENT + octave)))
    return found


def segment_start(segment: jax.Array) -> jax.Array:
    """int32[] -> its first position."""
    found = segment << LOG_SEGMENT
    for octave in range(1, OCTAVES + 1):
        found = jnp.maximum(found, (segment - PER_OCTAVE * octave) << (LOG_SEGMENT + octave))
    return found


def most_segments(num_tokens: int, window: int | None) -> int:
    """Of one query of a row that may have num_tokens."""
    last = max(0, num_tokens - 1)
    most = min([(last >> (LOG_SEGMENT + o)) + PER_OCTAVE * o for o in range(OCTAVES + 1)]) + 1
    return most if window is None else min(most, (window - 2) // SEGMENT + 2)

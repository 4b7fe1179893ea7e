"""Penalties, logit biases and grammar masks of the rows that a step samples.

Host only: no JAX. Nothing is kept between steps: the tokens are taken from the sequences each time,
so that they can not be those of another sequence or of an earlier step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxinfer.config import MAX_LOGIT_BIAS
from jaxinfer.scheduling.batch import Int32, PenaltyBatch
from jaxinfer.scheduling.sequence import Sequence

LEAST_REPETITION, MOST_REPETITION = 1e-6, 1e6  # so that a logit stays a finite float32


def penalties_of(
    sequences: list[Sequence], positions: Int32, bucket: int, width: int
) -> PenaltyBatch:
    """Of `sequences`, which draw their tokens at `positions`.

    Args:
        bucket: rows of the arrays.
        width: tokens of the longest history.
    """
    tokens = _known_tokens(sequences, positions, bucket, width)
    penalties = PenaltyBatch(
        history=tokens.history,
        num_known=tokens.num_known,
        num_prompt=np.zeros(bucket, np.int32),
        from_seat=tokens.from_seat,
        repetition=np.ones(bucket, np.float32),
        presence=np.zeros(bucket, np.float32),
        frequency=np.zeros(bucket, np.float32),
        bias_ids=np.full((bucket, MAX_LOGIT_BIAS), -1, np.int32),
        bias=np.zeros((bucket, MAX_LOGIT_BIAS), np.float32),
        mask=_masks(sequences, bucket),
    )
    for row, sequence in _penalized(sequences):
        sampling = sequence.request.sampling
        repetition = min(max(sampling.repetition_penalty, LEAST_REPETITION), MOST_REPETITION)
        penalties.num_prompt[row] = sequence.num_prompt_tokens
        penalties.repetition[row] = repetition
        penalties.presence[row] = sampling.presence_penalty
        penalties.frequency[row] = sampling.frequency_penalty
    for row, sequence in enumerate(sequences):
        pairs = sequence.request.sampling.bias_pairs
        penalties.bias_ids[row, : len(pairs)] = [token_id for token_id, _ in pairs]
        penalties.bias[row, : len(pairs)] = [bias for _, bias in pairs]
    return penalties


def _masks(sequences: list[Sequence], bucket: int) -> Int32 | None:
    """None if no sequence has a grammar: then it costs nothing. Else rows without one admit all."""
    masks = [(row, _mask(sequence)) for row, sequence in enumerate(sequences)]
    masks = [(row, mask) for row, mask in masks if mask is not None]
    if not masks:
        return None
    rows = np.full((bucket, len(masks[0][1])), -1, np.int32)
    for row, mask in masks:
        rows[row] = mask
    return rows


def _mask(sequence: Sequence) -> Int32 | None:
    if sequence.constraint is None:
        return None
    sampling = sequence.request.sampling
    is_early = sequence.num_output_tokens < sampling.min_tokens
    return sequence.constraint.mask(may_end=not (sampling.ignore_eos or is_early))


class _KnownTokens(NamedTuple):
    history: Int32
    num_known: Int32
    from_seat: Int32


def _known_tokens(
    sequences: list[Sequence], positions: Int32, bucket: int, width: int
) -> _KnownTokens:
    """As in PenaltyBatch."""
    history = np.zeros((bucket, width), np.int32)  # touched only as far as there are tokens
    num_known, from_seat = np.zeros(bucket, np.int32), np.full(bucket, -1, np.int32)
    for row, sequence in _penalized(sequences):
        number = len(sequence.token_ids)
        history[row, :number] = np.frombuffer(sequence.token_ids, np.int32)
        num_known[row] = number
        if number < positions[row]:  # its newest token has not been read
            from_seat[row] = sequence.seat
    return _KnownTokens(history, num_known, from_seat)


def _penalized(sequences: list[Sequence]) -> Iterator[tuple[int, Sequence]]:
    for row, sequence in enumerate(sequences):
        if sequence.request.sampling.has_penalties:
            yield row, sequence

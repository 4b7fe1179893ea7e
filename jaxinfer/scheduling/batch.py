"""One step's arguments as padded numpy arrays of fixed dtype: what the runner is given.

Host only: no JAX. Every shape comes from `Buckets`, so that nothing compiles after start.

Two kinds of step. A *decode* step has one token per row, bucket = rows. A *prefill* step packs
chunks of several sequences on one token axis, bucket = tokens; a sequence with one token to
compute may ride along.

    token axis   [ a0 a1 a2 a3 | b0 b1 | c7 | -- ]      c is decoding and rides along
    positions    [  0  1  2  3 |  4  5 |  7 | -1 ]      -1 marks padding
    rows         [  0  0  0  0 |  1  1 |  2 |  0 ]      whose page table
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
UInt32 = npt.NDArray[np.uint32]
Float32 = npt.NDArray[np.float32]

SamplerVariant = Literal["greedy", "plain", "full", "penalized"]
"""greedy: every row takes the arg-max. plain: some rows draw, by temperature only.
full: top-k, top-p or min-p somewhere, or the likeliest tokens were asked for. penalized: a penalty,
a logit bias or a grammar somewhere. Each can do what those before it can."""


@dataclass(frozen=True, slots=True)
class PenaltyBatch:
    """What changes a sampled row's logits. Nothing does for padding and rows that ask for nothing.

    A step is built before the one before it was read, so the last token of a row may be on the
    device only.

        #  |<- num_prompt ->|              |<- from_seat >= 0: one more ->|
        #  0                5              9 = num_known                  10 = position of the draw
        #  history          [ prompt ][ output as far as it was read ]
    """

    history: Int32  # [N, H]; rows without penalties have none
    num_known: Int32  # [N]: tokens of it
    num_prompt: Int32  # [N]: of these, at its beginning
    from_seat: Int32  # [N]: one more is the newest token that was drawn in this seat; -1: none
    repetition: Float32  # [N]; 1: off
    presence: Float32  # [N]; 0: off
    frequency: Float32  # [N]; 0: off
    bias_ids: Int32  # [N, 300]; -1 pads
    bias: Float32  # [N, 300]
    mask: (
        Int32 | None
    )  # [N, ceil(V / 32)]: bit i % 32 of word i // 32 admits token i; None: all ones


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Per sampled row, padded to a row bucket [N]; padding rows are greedy."""

    variant: SamplerVariant
    temperature: Float32  # [N]; 0: greedy
    top_k: Int32  # [N]; 0: off
    top_p: Float32  # [N]; 1: off
    min_p: Float32  # [N]; 0: off
    seeds: UInt32  # [N, 2]: the 64 bits of a sequence's seed
    positions: Int32  # [N]: of the token that is drawn; the counter of its draw
    seats: Int32  # [N]: where the device keeps the drawn token; padding: max rows, which is no seat
    penalties: PenaltyBatch | None  # variant `penalized` only


@dataclass(frozen=True, slots=True)
class AttentionBlocks:
    """Query blocks of a prefill step: which tokens attend together.

    Sequences with one token are narrow (one query per block), all others are cut into wide blocks
    of consecutive tokens of one sequence. Real blocks come first, in order of rising context
    length within each kind.
    """

    narrow: Int32  # [max_rows]: index on the token axis; the bucket (one past the end) pads
    num_narrow: Int32  # []
    wide: Int32  # [W, block_q]: the same, in rising position; the bucket pads
    num_wide: Int32  # []


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. B is the bucket; R its rows (decode: B; prefill: the largest row bucket)."""

    kind: Literal["prefill", "decode"]
    bucket: int
    version: str  # of the weights, for every row
    token_ids: Int32  # [B]; 0 where from_seat has it
    from_seat: Int32  # [B]: the token is the newest that was drawn in this seat; -1: in token_ids
    positions: Int32  # [B]; -1 marks padding
    rows: Int32  # [B]: each token's row in page_table
    page_table: Int32  # [R, M]; unused entries are 0
    blocks: AttentionBlocks | None  # prefill only
    sample_at: Int32  # [max rows]: token-axis index of the rows to sample; padding 0
    sampling: SamplingBatch  # its first num_sampled rows go with sample_at
    num_seqs: int  # real rows
    num_tokens: int  # real tokens
    num_sampled: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came back for the `num_sampled` rows of a batch, in its order."""

    token_ids: Int32  # [num_sampled]
    logprobs: Float32  # [num_sampled]: of the chosen token; NaN when the logits were not numbers
    top_ids: Int32 | None  # [num_sampled, 20], likeliest first; `full` and `penalized` only
    top_logprobs: Float32 | None  # [num_sampled, 20]

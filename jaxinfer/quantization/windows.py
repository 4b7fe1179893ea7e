"""A calibration set as windows of a few lengths, so that little is compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jaxinfer.errors import ConfigError
from jaxinfer.quantization.calibration_set import CalibrationSet

LENGTHS = (64, 128, 256, 512)  # tokens; a longer sample is cut
MAX_ROWS = 2048  # of all tokens, those whose inputs are kept one by one


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens from position 0 on, filled up: attention looks back only, so no real one sees it."""

    token_ids: npt.NDArray[np.int32]  # of one of the lengths
    num_tokens: int  # real ones, the first
    is_held: bool  # of the part that ranges and methods are checked on
    rows: npt.NDArray[np.int64]  # which of the real ones are kept one by one


def windows_of(
    calibration: CalibrationSet, *, bos: int | None, max_length: int, seed: int
) -> list[Window]:
    """All samples of the set; the rest of a cut sample begins with `bos` again, if there is one.

    Raises: ConfigError if the set has no tokens.
    """
    lengths = sorted({min(length, max_length) for length in LENGTHS})
    learned, held = calibration.split()
    pieces = [
        (piece, part is held)
        for part in (learned, held)
        for sample in part.samples
        for piece in _pieces(sample.token_ids, lengths[-1], bos)
    ]
    if not pieces:
        raise ConfigError(f"calibration set {calibration.name} has no tokens; give texts")
    kept = _chosen_rows([len(piece) for piece, _ in pieces], seed)
    return [
        Window(_filled(piece, lengths), len(piece), is_held, rows)
        for (piece, is_held), rows in zip(pieces, kept, strict=True)
    ]


def _pieces(token_ids: Sequence[int], length: int, bos: int | None) -> Iterator[list[int]]:
    left = list(token_ids)
    while left:
        yield left[:length]
        left = left[length:]
        if left and bos is not None:
            left.insert(0, bos)


def _filled(piece: list[int], lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    length = next(length for length in lengths if len(piece) <= length)
    return np.pad(np.array(piece, np.int32), (0, length - len(piece)))


def _chosen_rows(lengths: Sequence[int], seed: int) -> list[npt.NDArray[np.int64]]:
    """Of MAX_ROWS of all tokens, drawn without repetition: their places in each window."""
    total = sum(lengths)
    drawn = np.random.default_rng(seed).permutation(total)[:MAX_ROWS]
    ends = np.cumsum(lengths)
    parts = np.split(np.sort(drawn), np.searchsorted(np.sort(drawn), ends[:-1]))
    return [part - (end - n) for part, end, n in zip(parts, ends, lengths, strict=True)]

"""The text that a comparison is measured on, as windows of one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.errors import ConfigError
from jaxinfer.quantization.calibration_set import CalibrationSet
from jaxinfer.quantization.evaluation import windows_of
from jaxinfer.quantization.held_out import held_out_set
from jaxinfer.quantization.measuring import Measuring
from jaxinfer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class HeldOutWindows:
    """Texts in a row, cut into windows, each with a BOS if the model wants one."""

    name: str
    hash: str  # of the token ids
    windows: Sequence[np.ndarray]  # of `windows_of`
    num_window: int  # tokens of each


def read_held_out(
    asked: Measuring,
    tokenizer: Tokenizer,
    *,
    context_length: int,
    calibration: CalibrationSet | None = None,
) -> HeldOutWindows:
    """A JSONL file as calibration sets are, or the built-in text.

    Args:
        context_length: of the models; a window is no longer.
        calibration: what the text must have nothing in common with.
    Raises: ConfigError for a file that can't be used, too little text, or a text that was
        calibrated on.
    """
    found = held_out_set(asked.held_out, tokenizer)
    if calibration is not None:
        _check_apart(found, calibration)
    bos = tokenizer.bos_token_id if tokenizer.adds_bos else None
    ids = [token for sample in found.samples for token in _without(bos, sample.token_ids)]
    windows = windows_of(ids, min(asked.window, context_length), bos=bos)
    size = len(windows[0]) - 1 if windows else 0
    if len(windows) * size < asked.least_tokens:
        raise ConfigError(
            f"held-out text {found.name}: at least {asked.least_tokens:,} tokens are needed, got "
            f"{len(ids):,}; give a longer text, or ask for less with --least-tokens"
        )
    return HeldOutWindows(found.name, found.hash, windows, size)


def _without(bos: int | None, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Less the BOS in front: each window has its own."""
    return token_ids[1:] if token_ids[0] == bos else token_ids


def _check_apart(found: CalibrationSet, calibration: CalibrationSet) -> None:
    known = {sample.token_ids for sample in calibration.samples}
    num_common = sum(sample.token_ids in known for sample in found.samples)
    if num_common:
        raise ConfigError(
            f"held-out text {found.name} has {num_common} samples that are also in calibration set "
            f"{calibration.name}: what was calibrated on says little of the cost; take other texts"
        )

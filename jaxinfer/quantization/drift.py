"""How far two models are apart after each layer: what passes through them, on the same text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxinfer.quantization.subject import Subject

NUM_WINDOWS = 4  # enough for two digits: thousands of tokens times a thousand numbers


def drift(original: Subject, quantized: Subject, windows: Sequence[np.ndarray]) -> list[float]:
    """rms(x' - x) / rms(x) after each layer, over the first windows of `windows_of`.

    Empty if the models have other layers or widths: then there is nothing to set side by side.
    """
    ours, theirs = (subject.decoder.config for subject in (original, quantized))
    if (ours.num_hidden_layers, ours.hidden_size) != (
        theirs.num_hidden_layers,
        theirs.hidden_size,
    ):
        return []
    errors = np.zeros((ours.num_hidden_layers, 2))
    for window in windows[:NUM_WINDOWS]:
        pairs = zip(
            original.after_layers(window[:-1]), quantized.after_layers(window[:-1]), strict=True
        )
        for layer, (x, other) in enumerate(pairs):
            plain = np.asarray(x, np.float64)
            errors[layer] += (
                np.square(np.asarray(other, np.float64) - plain).sum(),
                (plain**2).sum(),
            )
    return [float(np.sqrt(error / max(size, 1e-300))) for error, size in errors]

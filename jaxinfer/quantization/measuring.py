"""How two models are to be measured, as the user asks. Facts only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxinfer.quantization.answers import NUM_TOKENS
from jaxinfer.quantization.evaluation import LEAST_TOKENS, WINDOW


@dataclass(frozen=True, slots=True)
class Measuring:
    held_out: Path | None = None  # JSONL of texts that were not calibrated on; None: the built-in
    least_tokens: int = LEAST_TOKENS  # of held-out text; fewer are refused
    window: int = WINDOW  # tokens that a model sees at once, no more than it can
    seed: int = 0  # of the intervals
    num_answer_tokens: int = NUM_TOKENS  # at most
    show_progress: bool = True

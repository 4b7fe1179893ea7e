"""What is told of a version while it is tried: of a request, and of a comparison.

No imports of ours but plain data. Of steps, `StepStats` tell.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.scheduling.request import FinishReason


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """One choice, when it has ended."""

    version: str  # of the weights
    finish: FinishReason
    num_output_tokens: int
    repetition: float  # share of the output's 4-grams that stood in it before, 0..1
    ttft_s: float | None  # from arrival; None: no token came
    is_not_numbers: bool = False  # its logits were not numbers
    e2e_s: float | None = None  # from arrival; None: not known
    key: str = ""  # that chose the version, of a user or a conversation; "": it stands for itself


@dataclass(frozen=True, slots=True)
class ShadowFacts:
    """One prompt of a user, computed by both versions: means over its compared tokens, in nats."""

    num_tokens: int
    kl: float  # KL(stable || canary) of the next token, over the stable's likeliest and the rest
    nll_increase: float  # of the text that stands there: the canary's less the stable's

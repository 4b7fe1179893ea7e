"""Every measure of two models at once, and the certificate that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from checkpoints.certificate import Answer, Certificate
from jaxinfer.quantization.answers import answer_steps, answers_of
from jaxinfer.quantization.drift import drift
from jaxinfer.quantization.evaluation import Evaluation, evaluate
from jaxinfer.quantization.held_out_windows import HeldOutWindows
from jaxinfer.quantization.measuring import Measuring
from jaxinfer.quantization.progress import bar
from jaxinfer.quantization.standard_prompts import Prompt
from jaxinfer.quantization.subject import Subject
from jaxinfer.version import __version__


@dataclass(frozen=True, slots=True)
class Cost:
    """What was measured, and over which text."""

    evaluation: Evaluation
    drift: list[float]  # of `drift`
    answers: tuple[Answer, ...]
    held_out: HeldOutWindows


def measured(
    first: Subject,
    second: Subject,
    held_out: HeldOutWindows,
    prompts: Sequence[Prompt],
    asked: Measuring,
) -> Cost:
    """Both models over the text, and both asked the prompts.

    Args:
        first: plays the original.
    Raises: as `evaluate` and `answers_of`.
    """
    shown, num_tokens = asked.show_progress, asked.num_answer_tokens
    with bar("measuring", len(held_out.windows), is_shown=shown) as advance:
        found = evaluate(
            first.logit_rows,
            second.logit_rows,
            held_out.windows,
            least_tokens=asked.least_tokens,
            seed=asked.seed,
            on_window=advance,
        )
    steps = answer_steps(prompts, first, num_tokens=num_tokens)
    with bar("answering", steps, is_shown=shown) as advance:
        answers = answers_of(first, second, prompts, num_tokens=num_tokens, on_step=advance)
    return Cost(found, drift(first, second, held_out.windows), answers, held_out)


def certificate_of(first: Subject, second: Subject, cost: Cost, *, method: str) -> Certificate:
    """Of weights that were made without data."""
    found, held_out = cost.evaluation, cost.held_out
    return Certificate(
        original=first.version,
        quantized=second.version,
        format=second.format,
        method=method,
        seed=found.seed,
        calibration_hash="",
        num_calibration_tokens=0,
        held_out_hash=held_out.hash,
        num_held_out_tokens=found.num_tokens,
        kl=found.mean_kl,
        kl_p99=found.kl_p99,
        perplexity=found.perplexity,
        original_perplexity=found.original_perplexity,
        perplexity_change=found.perplexity_change,
        agreement=found.agreement,
        num_bytes=second.num_bytes,
        original_bytes=first.num_bytes,
        held_out=held_out.name,
        window=held_out.num_window,
        jaxinfer=__version__,
        jax=jax.__version__,
        answers=cost.answers,
    )

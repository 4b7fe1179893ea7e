"""A checkpoint to a quantized one with its certificate and report: the work behind the command."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from checkpoints.certificate import CERTIFICATE_FILE, Certificate
from checkpoints.checkpoint import Checkpoint
from checkpoints.formats import Quantization
from checkpoints.save import CheckpointWriter
from jaxinfer.quantization.calibration_set import CalibrationSet, Sample, read_calibration_set
from jaxinfer.quantization.cost import certificate_of, measured
from jaxinfer.quantization.document import markdown_files
from jaxinfer.quantization.held_out_windows import read_held_out
from jaxinfer.quantization.measuring import Measuring
from jaxinfer.quantization.outliers import Outliers
from jaxinfer.quantization.quantizer import Quantized, quantize
from jaxinfer.quantization.recipe import Recipe
from jaxinfer.quantization.report import certificate_blocks
from jaxinfer.quantization.standard_prompts import STANDARD_PROMPTS
from jaxinfer.quantization.subject import context_length, open_subject, tokenizer_of
from jaxinfer.tokenizer import Tokenizer

REPORT_FILE = "report.md"


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be made, and of what."""

    recipe: Recipe
    calibration: Path | None  # JSONL; None: the built-in set
    max_length: int | None  # tokens that a calibration sample is cut to
    measuring: Measuring  # its seed is also the quantizer's


def certify(checkpoint: Checkpoint, name: str, out: Path, order: Order) -> Certificate:
    """Writes `out`, which must not exist: weights, certificate and report.

    Raises: CheckpointError, ConfigError and other JaxInferErrors; nothing is left then.
    """
    with CheckpointWriter(out, checkpoint) as writer:
        tokenizer, asked = tokenizer_of(checkpoint), order.measuring
        calibration = _calibration(order, tokenizer)
        length = context_length(checkpoint)
        held_out = read_held_out(asked, tokenizer, context_length=length, calibration=calibration)
        made = _quantized(checkpoint, order, calibration, writer)
        draft = writer.draft(made.quantization)
        shown = asked.show_progress
        first = open_subject(checkpoint, name, tokenizer=tokenizer, show_progress=shown)
        second = open_subject(draft, str(out), tokenizer=tokenizer, show_progress=shown)
        cost = measured(first, second, held_out, STANDARD_PROMPTS, asked)
        plain = certificate_of(first, second, cost, method=made.method)
        certificate = _with_origin(plain, made, calibration)
        writer.add_json(CERTIFICATE_FILE, certificate.to_json())
        blocks = list(certificate_blocks(certificate, cost.evaluation, cost.drift))
        for file, content in markdown_files(REPORT_FILE, blocks).items():
            writer.add_text(file, content)
        writer.finish(made.quantization)
    return certificate


def _calibration(order: Order, tokenizer: Tokenizer) -> CalibrationSet:
    found = read_calibration_set(order.calibration, tokenizer)
    if order.max_length is None:
        return found
    cut = (Sample(one.kind, one.token_ids[: order.max_length]) for one in found.samples)
    return CalibrationSet.of(found.name, cut)


def _quantized(
    checkpoint: Checkpoint, order: Order, calibration: CalibrationSet, writer: CheckpointWriter
) -> Quantized:
    with tqdm(desc="quantizing", disable=None if order.measuring.show_progress else True) as shown:

        def advance(product: str, done: int, total: int) -> None:
            shown.total = total
            shown.set_postfix_str(product, refresh=False)
            shown.update(done - shown.n)

        return quantize(
            checkpoint,
            order.recipe,
            calibration,
            seed=order.measuring.seed,
            add_tensor=writer.add_tensor,
            on_progress=advance,
        )


def _with_origin(plain: Certificate, made: Quantized, calibration: CalibrationSet) -> Certificate:
    return replace(
        plain,
        calibration=calibration.name,
        calibration_hash=calibration.hash,
        num_calibration_tokens=calibration.num_tokens,
        exceptions=tuple(_exceptions(made.quantization)),
        outliers=tuple(_told(site) for site in made.outliers if site.channels),
        layer_errors=made.layer_errors,
    )


def _exceptions(quantization: Quantization) -> Iterator[str]:
    for name, kept in quantization.exceptions:
        yield f"{name}: {'float' if kept is None else kept.name}"


def _told(found: Outliers) -> str:
    pairs = zip(found.channels, found.ratios, strict=True)
    channels = ", ".join(f"{channel} ({ratio:.0f})" for channel, ratio in pairs)
    return f"{found.site}: channels {channels}"

"""What was measured, as a document for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from checkpoints.certificate import Answer, Certificate, LayerError, Perplexity
from jaxinfer.quantization.charts import Labels, Series, bars, histogram, points
from jaxinfer.quantization.document import (
    Block,
    Heading,
    Paragraph,
    Picture,
    SideBySide,
    Table,
)
from jaxinfer.quantization.evaluation import Evaluation

NUM_WORST = 10
LEAST_KL = 1e-7  # nats: below it, the rounding of float32 logits
BIN = 16  # positions that a point of the curve is the mean of


def cost_table(found: Evaluation, names: tuple[str, str]) -> Table:
    """The figures, with their intervals."""
    original, quantized = names
    return Table(
        ("measure", "value", "95 % interval"),
        (
            (f"KL({original} to {quantized}), mean, nats per token", f"{found.mean_kl:.5f}", ""),
            ("KL, 99th percentile", f"{found.kl_p99:.5f}", ""),
            (f"perplexity of {original}", *_with_interval(found.original_perplexity)),
            (f"perplexity of {quantized}", *_with_interval(found.perplexity)),
            ("change of perplexity, paired", *_percent(found.perplexity_change)),
            ("greedy tokens that agree", f"{100 * found.agreement:.2f} %", ""),
            ("held-out tokens", f"{found.num_tokens:,}", ""),
        ),
    )


def kl_pictures(found: Evaluation) -> Iterator[Block]:
    """How the divergence spreads over tokens, and over positions in a window."""
    yield Picture(
        "kl",
        "KL per token",
        histogram(
            Labels("KL per token", "KL, nats (log scale)", "tokens"), found.kl, least=LEAST_KL
        ),
    )
    size = found.kl.shape[1]
    by_position = found.kl.mean(axis=0)
    starts = list(range(0, size, BIN))
    means = np.add.reduceat(by_position, starts) / np.diff([*starts, size])
    places = [(first + last - 1) / 2 for first, last in pairwise([*starts, size])]
    labels = Labels("KL by position", f"tokens before (mean of {BIN} positions)", "mean KL, nats")
    curve = points(labels, [Series("KL", places, means.tolist())], is_joined=True)
    yield Picture("position", "KL by position", curve)


def worst(errors: Sequence[LayerError], num: int = NUM_WORST) -> list[LayerError]:
    """The products that suffer most, worst first."""
    return sorted(errors, key=lambda error: -error.error)[:num]


def layer_blocks(errors: Sequence[LayerError]) -> Iterator[Block]:
    """Errors of products: the worst as a table and bars, all of them as points by layer."""
    if not errors:
        return
    found = worst(errors)
    yield Heading("Layers")
    yield Paragraph(
        "Error of a product: root mean square of what its output is off by, divided by that of "
        "its output, over the calibration inputs."
    )
    yield Table(
        ("product", "format", "error", "by round-to-nearest"),
        [(e.product, e.format, f"{e.error:.4f}", f"{e.error_of_nearest:.4f}") for e in found],
    )
    names = [_short(error.product) for error in found]
    title = f"The {len(found)} products that suffer most"
    values = [error.error for error in found]
    yield Picture("worst", title, bars(Labels(title, "product", "error"), names, values))
    series = list(_by_kind(errors))
    if series:
        picture = points(Labels("Error of every product", "layer", "error"), series, is_log=True)
        yield Picture("layers", "Error of every product", picture)


def _by_kind(errors: Sequence[LayerError]) -> Iterator[Series]:
    """A series for each kind of product, such as down_proj, over the layers."""
    kinds = dict.fromkeys(error.product.rpartition(".")[2] for error in errors)
    for kind in kinds:
        places = [
            (layer, e.error) for e in errors if (layer := _layer(e.product, kind)) is not None
        ]
        if places:
            yield Series(kind, [layer for layer, _ in places], [error for _, error in places])


def _layer(product: str, kind: str) -> int | None:
    """3 of layers.3.mlp.down_proj, if it is of that kind."""
    parts = product.split(".")
    is_layer = len(parts) > 2 and parts[0] == "layers" and parts[1].isdigit()
    return int(parts[1]) if is_layer and parts[-1] == kind else None


def _short(product: str) -> str:
    """3 down of layers.3.mlp.down_proj."""
    layer, kind = product.removeprefix("layers.").partition(".")[0], product.rpartition(".")[2]
    return f"{layer} {kind.removesuffix('_proj')}"


def drift_blocks(drift: Sequence[float]) -> Iterator[Block]:
    """How far apart what passes through the models is after each layer."""
    if drift:
        title = "Difference after each layer"
        labels = Labels(title, "layer", "relative error")
        yield Picture("drift", title, bars(labels, [str(i) for i in range(len(drift))], drift))


def answer_blocks(answers: Sequence[Answer], names: tuple[str, str]) -> Iterator[Block]:
    """The A/B record."""
    if not answers:
        return
    num_same = sum(answer.original == answer.quantized for answer in answers)
    yield Heading("Answers, side by side")
    yield Paragraph(
        f"Greedy. {num_same} of {len(answers)} are the same to the last letter; one token that is "
        "a near tie can turn the rest of an answer, so other words are not worse words."
    )
    for answer in answers:
        yield SideBySide(answer.prompt, names, (answer.original, answer.quantized))


def certificate_blocks(
    certificate: Certificate, found: Evaluation, drift: Sequence[float]
) -> Iterator[Block]:
    """All of a certificate."""
    yield Heading("Certificate", level=1)
    yield Paragraph(certificate.line())
    yield Heading("What was done")
    yield Table(("", ""), list(_origin(certificate)))
    yield Heading("What it costs")
    yield cost_table(found, ("original", "quantized"))
    yield Paragraph(how_measured(found))
    yield from kl_pictures(found)
    yield from drift_blocks(drift)
    yield from layer_blocks(certificate.layer_errors)
    yield from answer_blocks(certificate.answers, ("original", "quantized"))


def _origin(certificate: Certificate) -> Iterator[tuple[str, str]]:
    yield "format", certificate.format
    yield "other formats", ", ".join(certificate.exceptions) or "none"
    yield "method", certificate.method
    yield "seed", str(certificate.seed)
    yield "content of the original", certificate.original
    yield "content of the quantized", certificate.quantized
    size, before = certificate.num_bytes, certificate.original_bytes
    yield "bytes of all tensors", f"{size:,} of {before:,} ({size / before:.3f})"
    num_tokens = certificate.num_calibration_tokens
    yield (
        "calibration set",
        _text(certificate.calibration, num_tokens, certificate.calibration_hash),
    )
    held_out = certificate.held_out, certificate.num_held_out_tokens, certificate.held_out_hash
    yield "held-out text", _text(*held_out)
    yield "outliers among activations (times the median)", "; ".join(certificate.outliers) or "none"
    yield "measured by", f"jaxinfer {certificate.jaxinfer}, JAX {certificate.jax}"


def _text(name: str, num_tokens: int, digest: str) -> str:
    return f"{name}: {num_tokens:,} tokens, SHA-256 {digest[:16]}" if digest else "none"


def how_measured(found: Evaluation) -> str:
    """What the figures mean, in a few sentences."""
    return (
        f"Both models read the same {found.num_tokens:,} held-out tokens in windows of "
        f"{found.kl.shape[1]}; each figure is about the token that follows each of them. Intervals "
        f"are a bootstrap over blocks of text (seed {found.seed}). The change of perplexity is "
        "paired token by token, which is why it is surer than the two perplexities."
    )


def _with_interval(found: Perplexity) -> tuple[str, str]:
    return f"{found.value:.3f}", f"{found.low:.3f} to {found.high:.3f}"


def _percent(found: Perplexity) -> tuple[str, str]:
    value, low, high = (100 * x for x in (found.value, found.low, found.high))
    return f"{value:+.3f} %", f"{low:+.3f} to {high:+.3f} %"

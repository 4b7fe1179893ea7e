"""Any two checkpoints of one vocabulary set side by side, as a report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tokenizers import Tokenizer

from checkpoints.certificate import LayerError
from checkpoints.checkpoint import Checkpoint
from jaxinfer.errors import ConfigError
from jaxinfer.quantization.cost import Cost
from jaxinfer.quantization.document import Block, Heading, Paragraph, Table
from jaxinfer.quantization.report import (
    answer_blocks,
    cost_table,
    drift_blocks,
    how_measured,
    kl_pictures,
    layer_blocks,
)
from jaxinfer.quantization.subject import Subject

PROBE = 'The cat, 12345 times: naïve — "quoted" {"a": [1]}\n\tdef f(x): 中文测试，日本語。 🌶👩‍👧'
"""Two tokenizers that split this alike, and have the same tokens, are taken for one."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models: `first` plays the original, `second` is measured against it."""

    first: Subject
    second: Subject
    cost: Cost
    layer_errors: tuple[LayerError, ...] = ()  # of the second's certificate, if it is of the first

    def line(self) -> str:
        """For people, in one line."""
        found = self.cost.evaluation
        return (
            f"{self.second.format} against {self.first.format}: KL {found.mean_kl:.4f}, perplexity "
            f"{found.perplexity.value:.2f} ({100 * found.perplexity_change.value:+.2f} %), "
            f"{100 * found.agreement:.1f} % of greedy tokens agree, "
            f"{self.second.num_bytes / self.first.num_bytes:.2f} of the bytes"
        )

    def blocks(self) -> Iterator[Block]:
        """The report."""
        yield Heading(f"{self.first.name} and {self.second.name}", level=1)
        yield Paragraph(self.line())
        yield self._models()
        yield Heading("What B costs against A")
        yield cost_table(self.cost.evaluation, ("A", "B"))
        yield Paragraph(how_measured(self.cost.evaluation))
        yield from kl_pictures(self.cost.evaluation)
        yield from drift_blocks(self.cost.drift)
        yield from layer_blocks(self.layer_errors)
        yield from answer_blocks(self.cost.answers, ("A", "B"))

    def _models(self) -> Table:
        both, text = (self.first, self.second), self.cost.held_out
        told = f"{text.name}, SHA-256 {text.hash[:16]}"
        return Table(
            ("", "A", "B"),
            (
                ("model", *(one.name for one in both)),
                ("content", *(one.version for one in both)),
                ("format", *(one.format for one in both)),
                ("KV cache", *(one.kv_cache for one in both)),
                ("bits per weight", *(f"{one.bits_per_weight:.2f}" for one in both)),
                ("bytes of all tensors", *(f"{one.num_bytes:,}" for one in both)),
                ("held-out text", told, told),
            ),
        )


def check_vocabularies(first: Checkpoint, second: Checkpoint) -> None:
    """Raises: ConfigError if the same ids are not the same tokens."""
    sizes = [checkpoint.config.get("vocab_size") for checkpoint in (first, second)]
    if sizes[0] != sizes[1]:
        told = f"{sizes[0]} and {sizes[1]} tokens"
    elif not _same_tokens(first.tokenizer, second.tokenizer):
        told = "two tokenizers that differ"
    else:
        return
    raise ConfigError(
        f"{first.path} and {second.path} must have one vocabulary, to be compared token by token; "
        f"got {told}"
    )


def _same_tokens(first: Tokenizer, second: Tokenizer) -> bool:
    one, other = (
        (tokenizer.get_vocab(), tokenizer.encode(PROBE, add_special_tokens=False).ids)
        for tokenizer in (first, second)
    )
    return one == other

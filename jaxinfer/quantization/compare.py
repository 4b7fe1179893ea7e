"""Any two checkpoints of one vocabulary set side by side: every measure, and the user's prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.certificate import Answer, LayerError
from jaxinfer.errors import ConfigError
from jaxinfer.quantization.answers import answers_of
from jaxinfer.quantization.document import Block, Heading, Paragraph, Table
from jaxinfer.quantization.drift import drift
from jaxinfer.quantization.evaluation import Evaluation, evaluate
from jaxinfer.quantization.greedy import RoundKV
from jaxinfer.quantization.report import (
    answer_blocks,
    cost_table,
    drift_blocks,
    how_measured,
    kl_pictures,
    layer_blocks,
)
from jaxinfer.quantization.standard_prompts import Prompt
from jaxinfer.quantization.subject import Subject
from jaxinfer.tokenizer import Tokenizer

PROBE = 'The cat, 12345 times: naïve — "quoted" {"a": [1]}\n\tdef f(x): 中文测试，日本語。 🌶👩‍👧'
"""Two tokenizers that split this alike and have the same ids for it are taken for one."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models: `first` plays the original, `second` is measured against it."""

    first: Subject
    second: Subject
    evaluation: Evaluation
    drift: list[float]
    answers: tuple[Answer, ...]
    held_out: str  # name and hash of the text
    layer_errors: tuple[LayerError, ...] = ()  # of the second's certificate, if it is of the first
    kv_cache: str = "float"  # of the second

    def line(self) -> str:
        """For people, in one line."""
        found = self.evaluation
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
        yield Table(
            ("", "A", "B"),
            (
                ("model", self.first.name, self.second.name),
                ("content", self.first.version, self.second.version),
                ("format", self.first.format, self.second.format),
                ("KV cache", "float", self.kv_cache),
                ("bits per weight", *(f"{x.bits_per_weight:.2f}" for x in self._both)),
                ("bytes of all tensors", *(f"{x.num_bytes:,}" for x in self._both)),
                ("held-out text", self.held_out, "the same"),
            ),
        )
        yield Heading("What B costs against A")
        yield cost_table(self.evaluation, ("A", "B"))
        yield Paragraph(how_measured(self.evaluation))
        yield from kl_pictures(self.evaluation)
        yield from drift_blocks(self.drift)
        yield from layer_blocks(self.layer_errors)
        yield from answer_blocks(self.answers, ("A", "B"))

    @property
    def _both(self) -> tuple[Subject, Subject]:
        return self.first, self.second


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Text that neither model was calibrated on."""

    name: str
    hash: str
    windows: Sequence[np.ndarray]
    least_tokens: int


def compare(
    first: Subject,
    second: Subject,
    held_out: HeldOut,
    prompts: Sequence[Prompt],
    *,
    seed: int = 0,
    num_tokens: int,
    layer_errors: tuple[LayerError, ...] = (),
    kv_cache: str = "float",
    round_kv: RoundKV = lambda x: x,
    on_window: Callable[[], None] = lambda: None,
    on_step: Callable[[], None] = lambda: None,
) -> Comparison:
    """Takes every measure.

    Args:
        num_tokens: of an answer, at most.
        kv_cache, round_kv: of the second model's answers; `second.make_cache` is its own
            otherwise.
    Raises: ConfigError for two vocabularies; as `evaluate` and `greedy`.
    """
    check_vocabularies(first, second)
    found = evaluate(
        first.logit_rows,
        second.logit_rows,
        held_out.windows,
        least_tokens=held_out.least_tokens,
        seed=seed,
        on_window=on_window,
    )
    answers = answers_of(
        first, second, prompts, num_tokens=num_tokens, round_kv=round_kv, on_step=on_step
    )
    return Comparison(
        first,
        second,
        found,
        drift(first, second, held_out.windows),
        answers,
        f"{held_out.name} ({held_out.hash[:16]})",
        layer_errors,
        kv_cache,
    )


def check_vocabularies(first: Subject, second: Subject) -> None:
    """Raises: ConfigError if the same ids are not the same tokens."""
    sizes = [subject.decoder.config.vocab_size for subject in (first, second)]
    if sizes[0] != sizes[1] or not _same_tokens(first.tokenizer, second.tokenizer):
        raise ConfigError(
            f"{first.name} and {second.name} must have one vocabulary to be compared token by "
            f"token; got {sizes[0]:,} and {sizes[1]:,} tokens"
            + (" that are not the same" if sizes[0] == sizes[1] else "")
        )


def _same_tokens(first: Tokenizer, second: Tokenizer) -> bool:
    ids = [tokenizer.encode(PROBE, allow_special=False) for tokenizer in (first, second)]
    if first.vocab_size != second.vocab_size or ids[0] != ids[1]:
        return False
    return all(
        first.token_bytes(token) == second.token_bytes(token) for token in range(first.vocab_size)
    )


def read_prompts(path: Path) -> list[Prompt]:
    """One a line: a text, or JSON with "prompt" or "messages"; blank lines are passed over.

    Raises: ConfigError naming file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a UTF-8 text: {error}") from error
    numbered = enumerate(lines, start=1)
    prompts = [_prompt(line.strip(), f"{path}, line {n}") for n, line in numbered if line.strip()]
    if not prompts:
        raise ConfigError(f"{path} holds no prompts; write one a line")
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    if not line.startswith("{"):
        return Prompt(({"role": "user", "content": line},))
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        return Prompt(({"role": "user", "content": line},))  # a text that begins with a brace
    match found:
        case {"prompt": str(text)} if text.strip():
            return Prompt(text=text)
        case {"messages": [_, *_] as messages} if all(map(_is_message, messages)):
            return Prompt(tuple(messages))
        case _:
            raise ConfigError(
                f'{where}: expected {{"prompt": "…"}} or {{"messages": [{{"role": …, "content": '
                f"…}}]}} with texts, got {line:.60}"
            )


def _is_message(message: Any) -> bool:
    match message:
        case {"role": str(), "content": str()}:
            return True
        case _:
            return False

"""Texts that no calibration sees: what a comparison of two checkpoints is measured on.

Part is of our own writing; English prose from the reference manual that comes with every Python
brings it over 10,000 tokens. The manual differs a little between Python versions, so results are
compared only where the hash of the tokens is the same.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

from jaxinfer.quantization.calibration_set import (
    CalibrationSet,
    built_in_lines,
    read_calibration_set,
    samples_of,
    text_sample,
)
from jaxinfer.tokenizer import Tokenizer

_CHAPTERS = (  # of the manual: more prose than tables and code, in every supported Python
    "import",
    "debugger",
    "formatstrings",
    "calls",
    "comparisons",
    "assignment",
    "execmodel",
    "typesseq",
    "types",
)
MANUAL_CHARS = 46_000  # about 10,000 tokens of English
_NO_PROSE = (" ", "*", "=", "+", "|")  # how their lines start


def held_out_set(path: Path | None, tokenizer: Tokenizer) -> CalibrationSet:
    """The samples of a JSONL file, or (None) of the built-in held-out texts.

    Raises: ConfigError as `read_calibration_set`.
    """
    if path is not None:
        return read_calibration_set(path, tokenizer)
    name = f"built-in held-out texts and the manual of Python {platform.python_version()}"
    own = samples_of(built_in_lines("held_out.jsonl"), tokenizer, file=name)
    manual = (text_sample(text, tokenizer) for text in manual_texts())
    return CalibrationSet.of(name, (*own, *manual))


def manual_texts() -> Iterator[str]:
    """A text a chapter, paragraphs of prose only, MANUAL_CHARS characters in all."""
    num_left = MANUAL_CHARS
    for chapter in _CHAPTERS:
        text = "\n\n".join(_prose(topics.topics[chapter]))[:num_left]
        num_left -= len(text)
        if text:
            yield text


def _prose(chapter: str) -> Iterator[str]:
    """Paragraphs of three lines or more that are no code, table, list or heading; unwrapped."""
    for paragraph in chapter.split("\n\n"):
        lines = paragraph.split("\n")
        if len(lines) >= 3 and not any(line.startswith(_NO_PROSE) for line in lines):
            yield " ".join(lines)

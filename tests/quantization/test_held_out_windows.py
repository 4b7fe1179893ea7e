"""Held-out text as windows: each begins as the model's texts do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.quantization.held_out_windows import read_held_out
from jaxinfer.quantization.measuring import Measuring
from tests.tiny_tokenizers import byte_level, wrapped

TEXTS = ("the cat sat", "on the mat")
BOS = "<|im_start|>"


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    path = tmp_path / "held_out.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS), encoding="utf-8")
    return path


def asked(held_out: Path, least: int = 2) -> Measuring:
    return Measuring(held_out, least_tokens=least, window=3)


def test_a_bos_stands_in_front_of_each_window_and_nowhere_else(held_out: Path):
    tokenizer = wrapped(byte_level(), bos_token=BOS, add_bos=True)
    bos, plain = tokenizer.bos_token_id, wrapped(byte_level())
    found = read_held_out(asked(held_out), tokenizer, context_length=64)
    assert [window[0] for window in found.windows] == [bos] * len(found.windows)
    rest = np.concatenate([window[1:] for window in found.windows]).tolist()
    text = [token for one in TEXTS for token in plain.encode(one)]
    assert rest == text[: len(rest)]
    assert len(text) - len(rest) < len(found.windows)


def test_a_model_without_reads_the_text_as_it_is(held_out: Path):
    tokenizer = wrapped(byte_level())
    found = read_held_out(asked(held_out), tokenizer, context_length=64)
    text = [token for one in TEXTS for token in tokenizer.encode(one)]
    assert found.windows[0].tolist() == text[: found.num_window + 1]


def test_too_little_text_is_refused(held_out: Path):
    with pytest.raises(ConfigError, match="at least 500 tokens are needed"):
        read_held_out(asked(held_out, 500), wrapped(byte_level()), context_length=64)

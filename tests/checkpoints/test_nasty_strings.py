"""Tokenizers of GGUF files give llama.cpp's ids for 2,200 nasty strings, by each name of rules."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from checkpoints.gguf_header import read_header
from checkpoints.gguf_tokenizer import build_tokenizer
from checkpoints.pre_tokenizers import PRE_TOKENIZERS
from tests.gguf_vocabularies import CHUNK, FORMS, GOLDEN, comparable, hashes, write_vocabulary
from tests.nasty_strings import COUNT, nasty_strings

RECORDED = json.loads(GOLDEN.read_text("utf-8"))


@cache
def texts() -> list[str]:
    return nasty_strings()


def tokenizer_of(folder: Path, form: str) -> Tokenizer:
    path = folder / "vocabulary.gguf"
    write_vocabulary(path, RECORDED, form)
    header = read_header(path, np.fromfile(path, np.uint8))
    return build_tokenizer(path, header.metadata)


def test_there_are_so_many_and_each_name_is_recorded():
    assert len(set(texts())) == COUNT >= 2000
    assert list(RECORDED["hashes"]) == [*PRE_TOKENIZERS, *FORMS]
    counts = {len(found.split()) for found in RECORDED["hashes"].values()}
    assert counts == {-(-COUNT // CHUNK)}


@pytest.mark.parametrize("form", [*PRE_TOKENIZERS, *FORMS])
def test_ids_are_llama_cpps(tmp_path: Path, form: str):
    tokenizer = tokenizer_of(tmp_path, form)
    encodings = tokenizer.encode_batch([comparable(form, text) for text in texts()])
    assert hashes([encoding.ids for encoding in encodings]) == RECORDED["hashes"][form]


@pytest.mark.parametrize("form", ["gpt-2", "tekken", "deepseek-v3", "bloom", FORMS[1]])
def test_ids_are_the_text_again(tmp_path: Path, form: str):
    tokenizer = tokenizer_of(tmp_path, form)
    for text in texts():
        found = tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)
        assert found == (text.replace("▁", " ") if form in FORMS else text)

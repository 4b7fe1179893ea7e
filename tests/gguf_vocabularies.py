"""Small vocabularies as GGUF files, to compare tokenizers of every form by."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf

from checkpoints.pre_tokenizers import PRE_TOKENIZERS

GOLDEN = Path(__file__).parent / "data" / "gguf_tokenizers.json"
BYTE_LEVEL, SPM = "byte level", "sentencepiece"
FORMS = ("sentencepiece with a space in front", "sentencepiece as it is")
"""Beside the names of pre-tokenizers."""
CONTROL_TOKENS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>")
USER_DEFINED = ("<think>", "[INST]")
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
_BY_CASE = (PRE_TOKENIZERS["gpt-4o"], PRE_TOKENIZERS["tekken"])
CASED = ("Lu", "Ll", "Lt", "Mn", "Mc", "Me")
CHUNK = 100  # texts of one hash


def write_vocabulary(path: Path, golden: dict[str, Any], form: str) -> None:
    """A GGUF file without tensors."""
    is_spm = form in FORMS
    own = golden[SPM if is_spm else BYTE_LEVEL]
    raw = [f"<0x{byte:02X}>" for byte in range(256)] if is_spm else []
    tokens = [*CONTROL_TOKENS, *USER_DEFINED, *raw, *own["tokens"]]
    types = [UNKNOWN, *[CONTROL] * (len(CONTROL_TOKENS) - 1), *[USER] * len(USER_DEFINED)]
    types += [BYTE] * len(raw) + [NORMAL] * len(own["tokens"])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama" if is_spm else "gpt2")
    writer.add_tokenizer_pre("default" if is_spm else form)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if is_spm:
        first = len(tokens) - len(own["tokens"])
        writer.add_token_scores([0.0] * first + [-float(i) for i in range(len(own["tokens"]))])
        writer.add_add_space_prefix(form == FORMS[0])
    else:
        writer.add_token_merges(own["merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def comparable(form: str, text: str) -> str:
    """The text, less what llama.cpp is known to take otherwise than the models' own tokenizers do,
    which are followed here.
    """
    rules = PRE_TOKENIZERS.get(form)
    if rules is None:  # it takes a text that spells a byte's token for that token
        return text.replace("<0x0A>", "<0x0A ")
    if rules.is_nfc:  # it does not normalize
        text = unicodedata.normalize("NFC", text)
    if form.startswith("deepseek-"):  # it takes all blanks for one and the same
        text = "".join(" " if c.isspace() and not c.isascii() else c for c in text)
    if rules in _BY_CASE:  # it knows case of ASCII letters alone, and no marks
        text = "".join(c for c in text if c.isascii() or unicodedata.category(c) not in CASED)
    return text


def hashes(ids: Sequence[Sequence[int]]) -> str:
    """Eight digits for each CHUNK texts."""
    chunks = (ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK))
    texts = (repr([list(each) for each in chunk]) for chunk in chunks)
    return " ".join(hashlib.sha256(text.encode()).hexdigest()[:8] for text in texts)

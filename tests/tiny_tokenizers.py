"""Tokenizers of a few hundred tokens, of the kinds that real checkpoints have."""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from bench.tiny_tokenizer import CONTROL, TEXTS, byte_level, special
from jaxinfer.tokenizer import Tokenizer

__all__ = ["byte_fallback", "byte_level", "metaspace", "special", "unigram", "wrapped"]


def byte_fallback(*, strips: bool = True) -> tokenizers.Tokenizer:
    """Llama 2's and Gemma's kind: SentencePiece BPE; an unknown character becomes its bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdehiklmnorstuyz.,!?\n<>|_/", "▁▁"]
    merges = [
        ("▁", "▁"),
        ("t", "h"),
        ("th", "e"),
        ("▁", "the"),
        ("a", "t"),
        ("▁", "a"),
        ("s", "at"),
    ]
    pieces += [left + right for left, right in merges[1:]]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    chain: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), backend.normalizer])
        chain.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(chain)
    backend.add_special_tokens([special("<unk>"), special("<s>"), special("</s>")])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    """A BPE with Metaspace before and after; only the very start of a prompt gets a blank."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[special(text) for text in ("<unk>", *CONTROL)],
        show_progress=False,
    )
    backend.train_from_iterator(
        [*TEXTS, "▁leading is the x", ' <|im_end|> </s> [INST] {"a": 1}\n'], trainer
    )
    return backend


def unigram() -> tokenizers.Tokenizer:
    """Holds its control tokens as ordinary pieces too, so text that spells one is read as one."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(letter, -2.0) for letter in "▁abcdehiklmnorstuyz<>/"]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, 0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([special("<s>"), special("</s>")])
    return backend


def wrapped(backend: tokenizers.Tokenizer, **changes: Any) -> Tokenizer:
    """A Tokenizer around `backend` with no template and no BOS, unless `changes` say so."""
    settings: dict[str, Any] = {
        "chat_template": None,
        "bos_token": None,
        "eos_token": None,
        "add_bos": False,
        "eos_token_ids": (),
    }
    return Tokenizer(backend, **{**settings, **changes})

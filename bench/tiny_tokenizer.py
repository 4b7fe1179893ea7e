"""A byte-level tokenizer of a few hundred tokens, trained on the spot."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

TEXTS = [
    "the cat sat on the mat, and the dog sat on the log. 12345 times!\n\n",
    "ďábelské ódy úpěl příliš žluťoučký kůň",
    "日本語の文章です。 中文 한국어 عربى",
    "🌶 hot 👩‍👩‍👧 family  \t blanks   three",
    "abc bca abcabc system user assistant obey",
]
CONTROL = (
    "<|endoftext|>",
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|eot|>",
    "[INST]",
    "[/INST]",
)


def special(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, special=True, normalized=False, **flags)


def byte_level(*more: AddedToken | str) -> tokenizers.Tokenizer:
    """GPT-2's kind: a BPE over bytes; "<think>" is an added token but an ordinary one."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[special(text) for text in CONTROL],
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False), *more])
    return backend

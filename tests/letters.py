"""A vocabulary for FakeRunner's 101 ids in which JSON can be said, but no blank: printable ASCII
characters, four tokens of several characters, one of two bytes, a hole, and an end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxinfer.config import SamplingParams
from jaxinfer.guidance import Guidance
from jaxinfer.scheduling.request import Request
from tests.fakes import EOS, VOCAB_SIZE

TEXTS = ["é", *map(chr, range(33, 127)), '{"', '":', "true", "ab"]  # id 99 is a hole


class Letters:
    """What Detokenizer and Guidance read of a Tokenizer."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = frozenset({EOS})
    special_token_ids = frozenset({EOS})

    def __init__(self) -> None:
        self.whole_texts = {i: TEXTS[i] if i < len(TEXTS) else None for i in range(VOCAB_SIZE)}
        self._spelled = [*(text.encode() for text in TEXTS), None, b"<eos>"]

    def spelled(self, token_id: int, *, is_first: bool = False) -> bytes | None:
        return self._spelled[token_id]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [TEXTS.index(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(TEXTS[i] for i in ids if i != EOS)


LETTERS = Letters()
GUIDANCE = Guidance(LETTERS, VOCAB_SIZE)


def guided_request(
    name: str, prompt: Sequence[int], guided: Any = None, **sampling: Any
) -> Request:
    """Greedy, with its constraint; `guided` None: a free one."""
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": 60} | sampling
    params = SamplingParams(guided=guided, **fields)
    constraint = None if params.grammar is None else GUIDANCE.compile(params.grammar)
    return Request(name, tuple(prompt), params, constraint=constraint)

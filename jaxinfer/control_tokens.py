"""The texts of control tokens, and encoding that takes none of them from plain text.

Host only: no JAX here. A tokenizer turns "<|im_end|>" into the control token wherever it reads it,
so text of a client could end its own turn. `PlainTextEncoder` is a second tokenizer that is told by
the caller where the control tokens are, and reads everything else as text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby, pairwise, product

import tokenizers


class ControlTexts:
    """A set of texts, found in time linear in the text even when there are thousands.

    Texts of one character are left out: nothing can be put inside them.
    """

    def __init__(self, texts: Iterable[str]):
        self._texts = frozenset(text for text in texts if len(text) > 1)
        pattern = _alternatives(sorted(self._texts)) if self._texts else r"(?!)"
        self._whole = re.compile(pattern)
        self._start = re.compile(f"(?={pattern}).", re.DOTALL)

    def without(self, texts: Collection[str]) -> ControlTexts:
        return ControlTexts(self._texts.difference(texts))

    def found(self, text: str) -> list[str]:
        """Those in `text`, in order: the leftmost, the longest there, then what follows it."""
        return self._whole.findall(text)

    def split(self, text: str) -> list[str]:
        """Plain text and control texts by turns: even indices are plain (maybe empty)."""
        parts, place = [], 0
        for match in self._whole.finditer(text):
            parts += [text[place : match.start()], match.group()]
            place = match.end()
        return [*parts, text[place:]]

    def broken(self, text: str, mark: str) -> str:
        """`text` with `mark` after the first character of each, overlapping ones too."""
        return self._start.sub(lambda match: match.group() + mark, text)

    def pieces(self, text: str) -> list[str]:
        """`text` cut after the first character of each."""
        cuts = [0, *(match.end() for match in self._start.finditer(text)), len(text)]
        return [text[a:b] for a, b in pairwise(cuts)]


def _alternatives(words: Sequence[str]) -> str:
    """A pattern for sorted `words`, the longest that fits; a trie, so that no text backtracks."""
    length = common_length(words[0], words[-1])
    rest = [word[length:] for word in words]
    branches = [_alternatives(list(group)) for _, group in groupby(filter(None, rest), _first)]
    if "" in rest:
        branches.append("")
    inner = f"(?:{'|'.join(branches)})" if len(branches) > 1 else "".join(branches)
    return re.escape(words[0][:length]) + inner


def common_length(a: str, b: str) -> int:
    """How many characters `a` and `b` begin with alike."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _first(word: str) -> str:
    return word[0]


def encode_ids(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    """Without what the post-processor adds.

    The batch call, because it lets other threads run; `encode` keeps the interpreter lock.
    """
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


class PlainTextEncoder:
    """Text with control tokens only where the caller puts them.

    The copy's control tokens are switched off. One stand-in per way of eating blanks is added to
    it, with a random name that no text can spell; it takes a control token's place in the one call
    that encodes the whole prompt, so the text between is encoded as the original would.

    Args:
        backend: the tokenizer to copy.
        special: its control tokens by id.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special: dict[int, tokenizers.AddedToken]):
        self._special = special
        self._texts = ControlTexts(token.content for token in special.values())
        self._backend = tokenizers.Tokenizer.from_str(backend.to_str())
        self._backend.encode_special_tokens = True
        name = secrets.token_hex(8)
        self._stand_ins = {
            sides: f"\ufdd0{name}{sides[0]:d}{sides[1]:d}\ufdd1"
            for sides in product((False, True), repeat=2)
        }
        self._nothing = f"\ufdd0{name}\ufdd1"
        self._backend.add_tokens(
            [_stand_in(text, *sides) for sides, text in self._stand_ins.items()]
            + [_stand_in(self._nothing, False, False)]
        )
        self._stand_in_ids = {self._backend.token_to_id(t) for t in self._stand_ins.values()}
        self._nothing_id = self._backend.token_to_id(self._nothing)

    def encode(self, parts: Sequence[str | int]) -> list[int]:
        """The ids of `parts`: a str is plain text, an int is the id of a control token.

        A model that holds control tokens as ordinary pieces (Unigram) may still choose one for
        text that spells it; the spelled text is then cut after its first character.
        """
        given = [part for part in parts if isinstance(part, int)]
        ids = self._encode("".join(map(self._text, parts)), given)
        if sum(i in self._special for i in ids) == len(given):
            return ids
        cut = (
            self._nothing.join(self._texts.pieces(p)) if isinstance(p, str) else p for p in parts
        )
        return self._encode("".join(map(self._text, cut)), given)

    def _text(self, part: str | int) -> str:
        if isinstance(part, str):
            return part
        token = self._special[part]
        return self._stand_ins[token.lstrip, token.rstrip]

    def _encode(self, text: str, given: Sequence[int]) -> list[int]:
        ids = encode_ids(self._backend, text)
        control = iter(given)
        return [
            next(control) if i in self._stand_in_ids else i for i in ids if i != self._nothing_id
        ]


def _stand_in(text: str, lstrip: bool, rstrip: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        text, special=False, normalized=False, lstrip=lstrip, rstrip=rstrip
    )

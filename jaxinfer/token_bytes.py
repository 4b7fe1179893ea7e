"""What each token id adds to the text, in bytes.

Host only: no JAX here. For the tokenizers of language models the text of a list of ids is the
concatenation of one byte string per id, with one exception: SentencePiece drops a blank at the very
start. Known byte by byte, text can be streamed exactly: no window of ids is ever decoded again.

Ids that spell no valid UTF-8 read as U+FFFD, one per maximal cut-off part (as Unicode recommends
and the `tokenizers` ByteLevel decoder does). Its ByteFallback decoder instead voids a whole run of
byte tokens when one of them is wrong, with the good characters before it, so all their text would
have to be held back until the run ends; here they stay.
"""

from __future__ import annotations

import json
import re

import tokenizers

from jaxinfer.errors import ConfigError

_HIGH_BYTE = re.compile(r"<0x[89A-F][0-9A-F]>")  # below 0x80 a byte token decodes by itself
_ANCHOR = "x"  # stands before a token that is not the first
_SAMPLE_SIZE = 64  # ids that the check at construction tries


class TokenBytes:
    """The bytes of each id of one tokenizer, looked up once per id.

    Args:
        vocab_size: all ids are below it.
    Raises: ConfigError if the tokenizer's decoder does not work token by token.
    """

    def __init__(self, backend: tokenizers.Tokenizer, vocab_size: int):
        self._backend = backend
        self._vocab_size = vocab_size
        self._decoder = backend.decoder
        kinds = _decoder_kinds(backend)
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_fallback = "ByteFallback" in kinds
        self._inside: dict[int, bytes | None] = {}
        self._check()

    def __call__(self, token_id: int, *, is_first: bool = False) -> bytes | None:
        """What `token_id` adds behind other tokens, or as the first; None: no such token."""
        if is_first:
            return self._find(token_id, is_first=True)
        try:
            return self._inside[token_id]
        except KeyError:
            spelled = self._inside[token_id] = self._find(token_id, is_first=False)
            return spelled

    def _find(self, token_id: int, *, is_first: bool) -> bytes | None:
        piece = self._backend.id_to_token(token_id) if token_id < self._vocab_size else None
        if piece is None:
            return None
        if self._is_byte_level:
            return _byte_level_bytes(piece)
        if self._is_high_byte(token_id):
            return bytes.fromhex(piece[3:5])
        return self._probed(piece, is_first=is_first).encode()

    def _is_high_byte(self, token_id: int) -> bool:
        if not self._has_byte_fallback:
            return False
        return _HIGH_BYTE.fullmatch(self._backend.id_to_token(token_id) or "") is not None

    def _probed(self, piece: str, *, is_first: bool) -> str:
        if self._decoder is None:  # `tokenizers` then joins with blanks
            return piece if is_first else " " + piece
        if is_first:
            return self._decoder.decode([piece])
        return self._decoder.decode([_ANCHOR, piece]).removeprefix(_ANCHOR)

    def _check(self) -> None:
        step = max(1, self._vocab_size // _SAMPLE_SIZE)
        sample = [i for i in range(0, self._vocab_size, step) if not self._is_high_byte(i)]
        ids = [i for i in sample if self(i) is not None for _ in range(2)]
        ours = b"".join(self(i, is_first=n == 0) or b"" for n, i in enumerate(ids))
        theirs = self._backend.decode(ids, skip_special_tokens=False)
        if ours.decode("utf-8", "replace") != theirs:
            kinds = sorted(_decoder_kinds(self._backend))
            raise ConfigError(
                "the tokenizer's decoder must turn tokens into text one by one, as ByteLevel, "
                f"ByteFallback and Metaspace do; this one ({', '.join(kinds) or 'none'}) does not"
            )


class WholeTexts(dict[int, str | None]):
    """The text of each id that is whole characters by itself, wherever it comes but at the start.

    None for all others: parts of characters, special tokens, ids that are no token. Each is looked
    up once.
    """

    def __init__(self, spelled: TokenBytes, special_token_ids: frozenset[int]):
        super().__init__()
        self._spelled, self._special_token_ids = spelled, special_token_ids

    def __missing__(self, token_id: int) -> str | None:
        spelled = None
        if token_id >= 0 and token_id not in self._special_token_ids:
            spelled = self._spelled(token_id)
        try:
            text = None if spelled is None else spelled.decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


def _decoder_kinds(backend: tokenizers.Tokenizer) -> set[str]:
    if backend.decoder is None:
        return set()
    outer = json.loads(backend.decoder.__getstate__())
    return {outer["type"], *(inner["type"] for inner in outer.get("decoders", ()))}


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's: a printable Latin-1 character is its own byte, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    """An added token may hold characters outside the alphabet; it is then plain text."""
    try:
        return bytes([_BYTE_OF[character] for character in piece])
    except KeyError:
        return piece.encode()

"""A `tokenizers.Tokenizer` from the metadata of a GGUF file.

Two models: "gpt2", a byte-level BPE with merges and a named pre-tokenizer, and "llama", a
SentencePiece BPE of which the file holds scores, not merges. Neither has a post-processor: whether
a BOS belongs in front is told apart (`adds_bos`), so that it cannot come twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from checkpoints.errors import CheckpointError, first_line
from checkpoints.gguf_config import token_id
from checkpoints.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

MAX_SQUARES = 1 << 28  # of the lengths of all tokens; a vocabulary of 262,144 has 2**24
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
# What ends a turn in the chat formats of these families, when the file names only one end token.
END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|endofturn|>",
)


def build_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """The file's tokenizer, without a post-processor.

    Control and unknown tokens are special (decoding can skip them); user-defined ones are whole
    tokens but ordinary text.
    Raises: CheckpointError naming `path` and the key at fault.
    """
    model = metadata.get("tokenizer.ggml.model")
    tokens = _tokens(path, metadata)
    types = _token_types(path, metadata, len(tokens))
    if model == "gpt2":
        tokenizer = _byte_level(path, metadata, tokens)
    elif model == "llama":
        if not _has_space_prefix(metadata):
            tokens = _with_marks(tokens, types)
        tokenizer = _sentencepiece(path, metadata, tokens, types)
    else:
        raise _error(path, "model", "'gpt2' or 'llama'", repr(model))
    _mark_added(tokenizer, tokens, types)
    return tokenizer


def adds_bos(path: Path, metadata: Mapping[str, Any]) -> bool:
    """Whether a BOS belongs in front of a prompt: what the file says, or its family's habit."""
    flag = metadata.get("tokenizer.ggml.add_bos_token")
    if isinstance(flag, bool):
        return flag
    if metadata.get("tokenizer.ggml.model") == "llama":
        return True
    return _pre_tokenizer(path, metadata).adds_bos


def end_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer: eos, eot and eom as named, and known end-of-turn control tokens."""
    ids = {token_id(metadata, f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")}
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    for index, (text, kind) in enumerate(zip(tokens, types, strict=False)):
        if kind in (CONTROL, USER_DEFINED) and text in END_OF_TURN:
            ids.add(index)
    return tuple(sorted(i for i in ids if i is not None and i < len(tokens)))


def _error(path: Path, key: str, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: expected metadata 'tokenizer.ggml.{key}' to be {expected}, found {found:.100}"
    )


def _tokens(path: Path, metadata: Mapping[str, Any]) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise _error(path, "tokens", "a list of texts", "none")
    if len(set(tokens)) != len(tokens):
        twice = next(text for text, count in Counter(tokens).items() if count > 1)
        raise _error(path, "tokens", "all different", f"{twice!r:.100} more than once")
    if sum(len(text) ** 2 for text in tokens) > MAX_SQUARES:  # ways to halve them
        raise _error(path, "tokens", "short texts", f"one of {max(map(len, tokens))} characters")
    return tokens


def _token_types(path: Path, metadata: Mapping[str, Any], count: int) -> Sequence[int]:
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return [NORMAL] * count
    _check_numbers(path, "token_type", types, count, "iu")
    return [int(kind) for kind in types]


def _check_numbers(path: Path, key: str, found: Any, count: int, kinds: str) -> None:
    """kinds: of numpy's dtypes."""
    array = np.asarray(found)
    is_good = array.ndim == 1 and array.dtype.kind in kinds
    if not is_good or len(array) != count:
        raise _error(path, key, f"{count} numbers", str(len(array)) if is_good else "others")


def _pre_tokenizer(path: Path, metadata: Mapping[str, Any]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    known = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if known is None:
        raise _error(path, "pre", f"one of {', '.join(PRE_TOKENIZERS)}", repr(name))
    return known


def _byte_level(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    rules = _pre_tokenizer(path, metadata)
    lines = metadata.get("tokenizer.ggml.merges")
    if not isinstance(lines, list):
        raise _error(path, "merges", "a list of pairs", "none")
    merges: list[tuple[str, str]] = []
    for line in lines:
        left, space, right = line.partition(" ")
        if not space:
            raise _error(path, "merges", "pairs with a space between", f"{line!r:.100}")
        merges.append((left, right))
    model = _bpe(path, tokens, merges, ignore_merges=rules.ignores_merges)
    tokenizer = Tokenizer(model)
    splits = [pre_tokenizers.Split(Regex(text), "isolated") for text in rules.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if rules.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    path: Path, metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int]
) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise _error(path, "scores", f"{len(tokens)} numbers", "none")
    _check_numbers(path, "scores", scores, len(tokens), "iuf")
    unknown = token_id(metadata, "tokenizer.ggml.unknown_token_id") or 0
    if unknown >= len(tokens):
        raise _error(path, "unknown_token_id", f"below {len(tokens)}", str(unknown))
    merges = _merges_from_scores(tokens, [float(score) for score in scores], types)
    model = _bpe(path, tokens, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    has_prefix = _has_space_prefix(metadata)
    space = normalizers.Replace(" ", "▁")
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), space]) if has_prefix else space
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _has_space_prefix(metadata: Mapping[str, Any]) -> bool:
    return bool(metadata.get("tokenizer.ggml.add_space_prefix", True))


def _with_marks(tokens: list[str], types: Sequence[int]) -> list[str]:
    """User-defined tokens as SentencePiece has them: it looks for them where a space is a mark
    already, converters write a space, and a text may have a mark of its own beside one.
    """
    marked = [
        text.replace(" ", "▁") if kind == USER_DEFINED else text
        for text, kind in zip(tokens, types, strict=True)
    ]
    return marked if len(set(marked)) == len(marked) else tokens


def _merges_from_scores(
    tokens: list[str], scores: list[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """The merges that give each normal token, best score first, ties by id.

    SentencePiece always joins the neighbours whose union has the best score, so every way to halve
    a token into two tokens is a merge with that token's score.
    """
    ids = {text: i for i, text in enumerate(tokens) if types[i] in (NORMAL, USER_DEFINED)}
    order = sorted((i for i in ids.values() if types[i] == NORMAL), key=lambda i: (-scores[i], i))
    merges: list[tuple[str, str]] = []
    for i in order:
        text = tokens[i]
        halves = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        found = [pair for pair in halves if pair[0] in ids and pair[1] in ids]
        merges += sorted(found, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def _bpe(
    path: Path, tokens: list[str], merges: list[tuple[str, str]], **options: Any
) -> models.BPE:
    vocabulary = {text: i for i, text in enumerate(tokens)}
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # tokenizers raises nothing narrower
        raise _error(path, "merges", "pairs of known tokens", first_line(error)) from None


def _mark_added(tokenizer: Tokenizer, tokens: list[str], types: Sequence[int]) -> None:
    """Tokens that are matched in the text before anything else."""
    special, ordinary = [], []
    for text, kind in zip(tokens, types, strict=True):
        if kind in (CONTROL, UNKNOWN):
            special.append(AddedToken(text, special=True, normalized=False))
        elif kind == USER_DEFINED:
            ordinary.append(AddedToken(text, special=False, normalized="▁" in text))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(ordinary)

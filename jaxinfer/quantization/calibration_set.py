"""The texts that calibration looks at, as token ids of one tokenizer.

A JSONL file holds one sample a line, in one of three forms:

    {"text": "A document, or a question."}
    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"token_ids": [1, 2, 3], "tokenizer": "<Tokenizer.hash>", "kind": "multi_turn"}

Knows tokenizers; no model, no statistics.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, cast, get_args

from jaxinfer.errors import ConfigError, InvalidRequest
from jaxinfer.tokenizer import Tokenizer

Kind = Literal["short", "long", "multi_turn"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SHORT_TOKENS = 128  # a sample of one turn is "short" up to this many tokens, else "long"
BUILT_IN = "built-in (a small set for trying out)"
_CONTENTS = ("text", "messages", "token_ids")


@dataclass(frozen=True, slots=True)
class Sample:
    """`kind`: "multi_turn" if a user speaks twice or more; else by length, see SHORT_TOKENS."""

    kind: Kind
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CalibrationSet:
    name: str  # the file's name, or BUILT_IN
    samples: tuple[Sample, ...]  # in the order of the file
    hash: str  # SHA-256 over the token ids of all samples, hex

    @classmethod
    def of(cls, name: str, samples: Iterable[Sample]) -> CalibrationSet:
        kept = tuple(samples)
        return cls(name, kept, _hash(kept))

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    def split(self, one_in: int = 8) -> tuple[CalibrationSet, CalibrationSet]:
        """To learn from, and to check that with: of each kind every `one_in`-th sample.

        Raises: ValueError if one_in is below 2.
        """
        if one_in < 2:
            raise ValueError(f"one_in must be at least 2, to leave samples; got {one_in}")
        by_kind = [[s for s in self.samples if s.kind == kind] for kind in KINDS]
        learned = [s for group in by_kind for i, s in enumerate(group) if (i + 1) % one_in]
        kept = [s for group in by_kind for s in group[one_in - 1 :: one_in]]
        return (
            CalibrationSet.of(self.name, learned),
            CalibrationSet.of(f"{self.name}, every {one_in}th sample", kept),
        )


def read_calibration_set(path: Path | None, tokenizer: Tokenizer) -> CalibrationSet:
    """The samples of a JSONL file; None: the small built-in set.

    Chats go through the model's chat template; a model without one reads "role: text" paragraphs.

    Raises: ConfigError naming the file and the line: unreadable, empty, no JSON object, a sample
        without content, ids outside the vocabulary or of another tokenizer.
    """
    if path is None:
        lines = built_in_lines("calibration.jsonl")
        return CalibrationSet.of(BUILT_IN, samples_of(lines, tokenizer, file=BUILT_IN))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a UTF-8 text: {error}") from error
    samples = list(samples_of(text.split("\n"), tokenizer, file=str(path)))
    if not samples:
        raise ConfigError(
            f'{path} holds no samples; write one a line, as {{"text": "…"}} or {{"messages": […]}}'
        )
    return CalibrationSet.of(path.name, samples)


def built_in_lines(name: str) -> list[str]:
    """The lines of a file of this package's data."""
    data = resources.files("jaxinfer.quantization") / "data" / name
    return data.read_text(encoding="utf-8").split("\n")


def samples_of(lines: Iterable[str], tokenizer: Tokenizer, *, file: str) -> Iterator[Sample]:
    """The samples of JSONL lines; blank lines are passed over.

    Args:
        file: names the lines' origin in errors.
    Raises: ConfigError naming file and line.
    """
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _sample(_object(line), tokenizer)
        except (ConfigError, InvalidRequest) as error:
            raise ConfigError(f"{file}, line {number}: {error.message}") from error


def _object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"expected a JSON object on one line: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"expected a JSON object; got {line.strip():.60}")
    return cast("dict[str, Any]", value)


def _sample(line: Mapping[str, Any], tokenizer: Tokenizer) -> Sample:
    contents = [name for name in _CONTENTS if name in line]
    if len(contents) != 1:
        raise ConfigError(
            f"a sample has one of {', '.join(_CONTENTS)}; this one has "
            f"{' and '.join(contents) or 'none of them'}"
        )
    kind = None
    match contents[0]:
        case "text":
            ids = _text_ids(line["text"], tokenizer)
        case "messages":
            ids = _chat_ids(line["messages"], tokenizer)
            kind = _kind_of_chat(line["messages"])
        case _:
            ids = _given_ids(line, tokenizer)
            kind = _given_kind(line)
    if not ids:
        raise ConfigError("the sample has no tokens; remove the line")
    return Sample(kind or _kind_by_length(ids), tuple(ids))


def text_sample(text: str, tokenizer: Tokenizer) -> Sample:
    """A text, in which nothing is a control token."""
    ids = _text_ids(text, tokenizer)
    return Sample(_kind_by_length(ids), tuple(ids))


def _text_ids(text: Any, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(_text(text), allow_special=False)


def _text(text: Any) -> str:
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"text must be a string that is not blank; got {text!r:.60}")
    return text


def _chat_ids(messages: Any, tokenizer: Tokenizer) -> list[int]:
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"messages must be a list of at least one; got {messages!r:.60}")
    turns = cast("list[Any]", messages)
    if not all(isinstance(turn, dict) for turn in turns):
        raise ConfigError('each of messages must be an object: {"role": "user", "content": "…"}')
    if not tokenizer.has_chat_template:
        return _text_ids(_paragraphs(turns), tokenizer)
    answered = turns[-1].get("role") == "assistant"
    return tokenizer.encode_chat(turns, add_generation_prompt=not answered)


def _paragraphs(turns: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(f"{turn.get('role')}: {_text(turn.get('content'))}" for turn in turns)


def _kind_of_chat(messages: Sequence[Mapping[str, Any]]) -> Kind | None:
    num_asked = sum(message.get("role") == "user" for message in messages)
    return "multi_turn" if num_asked >= 2 else None


def _kind_by_length(ids: Sequence[int]) -> Kind:
    return "short" if len(ids) <= SHORT_TOKENS else "long"


def _given_ids(line: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    made_with = line.get("tokenizer")
    if made_with != tokenizer.hash:
        raise ConfigError(
            f"its token_ids were made with tokenizer {made_with!r:.80}, the model's is "
            f'"{tokenizer.hash}"; give texts, or tokenize them with the model\'s own tokenizer'
        )
    ids = line["token_ids"]
    if not isinstance(ids, list) or not all(type(i) is int for i in cast("list[Any]", ids)):
        raise ConfigError(f"token_ids must be a list of integers; got {ids!r:.60}")
    outside = [i for i in cast("list[int]", ids) if not 0 <= i < tokenizer.vocab_size]
    if outside:
        raise ConfigError(
            f"token id {outside[0]} is outside the vocabulary of {tokenizer.vocab_size} tokens"
        )
    return cast("list[int]", ids)


def _given_kind(line: Mapping[str, Any]) -> Kind | None:
    kind = line.get("kind")
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"kind must be one of {', '.join(KINDS)}; got {kind!r:.60}")
    return kind


def _hash(samples: Iterable[Sample]) -> str:
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(f"{','.join(map(str, sample.token_ids))}\n".encode())
    return digest.hexdigest()

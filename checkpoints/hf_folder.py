"""The small files of a Hugging Face folder: JSON configs, tokenizer.json, the chat template.

Tensors are safetensors.py's. No JAX, no transformers.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from checkpoints.errors import CheckpointError, first_line
from checkpoints.file_bytes import check_small

TOKENIZER_FILE = "tokenizer.json"


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """A JSON object; an empty one for a missing file that is optional."""
    if optional and not path.is_file():
        return {}
    try:
        check_small(path)
        raw = path.read_bytes()
        value = json.loads(raw)
        if rb"\ud" in raw.lower():  # half of a pair alone is no text: a UnicodeEncodeError
            json.dumps(value, ensure_ascii=False).encode()
    except OSError as error:
        raise CheckpointError(f"{path}: expected a readable file, found {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON, found {first_line(error)}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_tokenizer(folder: Path) -> Tokenizer:
    """tokenizer.json, without the truncation and padding that training may have left in it."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        others = [name for name in ("tokenizer.model", "vocab.json") if (folder / name).is_file()]
        raise CheckpointError(
            f"{folder}: expected {TOKENIZER_FILE}, found "
            + (f"only {', '.join(others)}; save it as a fast tokenizer" if others else "none")
        )
    check_small(path)
    with _tokenizer_faults(path):
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


@contextmanager
def _tokenizer_faults(path: Path) -> Generator[None]:
    """What the tokenizers library makes of a damaged file: any exception, or a panic of Rust."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(
            f"{path}: expected a tokenizer of the tokenizers library, found {first_line(error)}"
        ) from None


def read_chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's (its default of several), else None."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        check_small(path)
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: expected UTF-8, found {first_line(error)}") from None
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {str(entry.get("name")): entry for entry in template if isinstance(entry, dict)}
        template = named.get("default", {}).get("template")
    if template is None or isinstance(template, str):
        return template
    raise CheckpointError(
        f"{folder / 'tokenizer_config.json'}: expected chat_template to be text, "
        f"found {type(template).__name__}"
    )


def token_text(
    folder: Path,
    tokenizer_config: Mapping[str, Any],
    config: Mapping[str, Any],
    tokenizer: Tokenizer,
    key: str,
) -> str | None:
    """The text of bos_token or eos_token: tokenizer_config.json's, else that of config.json's id.

    A key that tokenizer_config.json sets to null means that there is none.
    """
    if key in tokenizer_config:
        value = tokenizer_config[key]
        text = value.get("content") if isinstance(value, dict) else value
        if text is not None and not isinstance(text, str):
            raise CheckpointError(
                f"{folder / 'tokenizer_config.json'}: expected {key} to be text, found {text!r:.60}"
            )
        return text
    ids = as_ids(folder / "config.json", config.get(f"{key}_id"))
    return tokenizer.id_to_token(ids[0]) if ids else None


def as_ids(path: Path, value: Any) -> tuple[int, ...]:
    """A config's `…_token_id`, which may be absent, one id or a list."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for index in ids:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < 2**31:
            raise CheckpointError(f"{path}: expected token ids, found {index!r:.60}")
    return tuple(ids)


def strip_post_processor(folder: Path, tokenizer: Tokenizer, bos_token: str | None) -> bool:
    """Make `encode` add nothing, and tell whether it would have put a BOS in front.

    Raises: CheckpointError if it would have put anything else in front: a prompt without it would
    not be what the model was trained on.
    """
    probe = "a"
    with _tokenizer_faults(folder / TOKENIZER_FILE):
        bare = tokenizer.encode(probe, add_special_tokens=False).ids
        full = tokenizer.encode(probe, add_special_tokens=True).ids
    tokenizer.post_processor = processors.Sequence([])
    extra = len(full) - len(bare)
    at = next((i for i in range(extra + 1) if full[i : i + len(bare)] == bare), 0)
    prefix = full[:at]
    bos_id = None if bos_token is None else tokenizer.token_to_id(bos_token)
    if prefix and prefix != [bos_id]:
        texts = [tokenizer.id_to_token(index) for index in prefix]
        raise CheckpointError(
            f"{folder / TOKENIZER_FILE}: expected the post-processor to put nothing or bos_token "
            f"({bos_token!r}) in front of a text, found {texts}"
        )
    return bool(prefix)

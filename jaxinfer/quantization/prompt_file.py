"""A user's prompts: one a line, as a text or as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxinfer.errors import ConfigError
from jaxinfer.quantization.standard_prompts import Prompt


def read_prompts(path: Path) -> list[Prompt]:
    """One a line: a text, or JSON with "prompt" or "messages"; blank lines are passed over.

    Raises: ConfigError naming file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a UTF-8 text: {error}") from error
    numbered = enumerate(lines, start=1)
    prompts = [_prompt(line.strip(), f"{path}, line {n}") for n, line in numbered if line.strip()]
    if not prompts:
        raise ConfigError(f"{path} holds no prompts; write one a line")
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    if not line.startswith("{"):
        return Prompt(({"role": "user", "content": line},))
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError):
        return Prompt(({"role": "user", "content": line},))  # a text that begins with a brace
    match found:
        case {"prompt": str(text)} if text.strip():
            return Prompt(text=text)
        case {"messages": [_, *_] as messages} if all(map(_is_message, messages)):
            return Prompt(tuple(messages))
        case _:
            raise ConfigError(
                f'{where}: expected {{"prompt": "…"}} or {{"messages": [{{"role": …, "content": '
                f"…}}]}} with texts, got {line:.60}"
            )


def _is_message(message: Any) -> bool:
    match message:
        case {"role": str(), "content": str()}:
            return True
        case _:
            return False

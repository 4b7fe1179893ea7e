"""What lies beside the weights of a folder that we write: tokenizer, template, end tokens.

`open_checkpoint` reads from it what the original gave, whatever form that has.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints.checkpoint import Checkpoint
from checkpoints.hf_folder import TOKENIZER_FILE, as_ids, read_json


def as_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=1, ensure_ascii=False).encode()


def write_small_files(folder: Path, original: Checkpoint) -> None:
    """All but config.json. Raises: OSError."""
    kept = original.path / TOKENIZER_FILE
    if kept.is_file():
        shutil.copyfile(kept, folder / TOKENIZER_FILE)
    else:
        (folder / TOKENIZER_FILE).write_bytes(original.tokenizer.to_str(pretty=True).encode())
    (folder / "tokenizer_config.json").write_bytes(as_json(_tokenizer_config(original)))
    generation = _generation_config(original)
    if generation:
        (folder / "generation_config.json").write_bytes(as_json(generation))


def _tokenizer_config(original: Checkpoint) -> dict[str, Any]:
    config = read_json(original.path / "tokenizer_config.json", optional=True)
    config.pop("chat_template", None)
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    config |= {"bos_token": original.bos_token, "eos_token": original.eos_token}
    config["add_bos_token"] = original.add_bos
    if original.chat_template is not None:
        config["chat_template"] = original.chat_template
    return config


def _generation_config(original: Checkpoint) -> dict[str, Any]:
    """With all end tokens, if config.json alone would lose one."""
    found = dict(original.generation_config)
    in_config = as_ids(original.path, original.config.get("eos_token_id"))
    in_found = as_ids(original.path, found.get("eos_token_id"))
    if not {*in_config, *in_found}.issuperset(original.eos_token_ids):
        found["eos_token_id"] = list(original.eos_token_ids)
    return found

"""Files made to harm: each is one line within a second, without a large allocation."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints.checkpoint import open_checkpoint
from checkpoints.errors import CheckpointError
from jaxinfer.errors import ConfigError
from jaxinfer.models.registry import model_config
from jaxinfer.tokenizer import Tokenizer

MOST_BYTES = 16 << 20
HUGE = (1 << 31) - 1


def understand(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    model_config(checkpoint.config)
    Tokenizer.of(checkpoint)


def refusal(path: Path) -> str:
    """Why it does not open or is not understood."""
    tracemalloc.start()
    try:
        with pytest.raises((CheckpointError, ConfigError)) as caught:
            understand(path)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1_000
    return message


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 1 << 30}, "num_hidden_layers must be at most 1024"),
    "width": ({"hidden_size": 1 << 62}, "hidden_size must be at most"),
    "no float": ({"rope_theta": 10**400}, "rope_theta must be a positive number"),
    "no list": ({"architectures": 5}, "architectures must name one of"),
    "a list in it": ({"architectures": [["LlamaForCausalLM"]]}, "architectures must name one of"),
    "stretched": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 1e308}},
        "rope scaling needs a positive factor",
    ),
    "trained": (
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": float("inf"),
            }
        },
        "rope scaling of type 'yarn' needs numbers",
    ),
    "long": ({"hidden_act": "x" * 100_000}, "hidden_act must be one of"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_hostile_config_is_refused(tmp_path: Path, tiny, case: str):
    changes, reason = CONFIGS[case]
    folder = tiny.folder(tmp_path / "m", tiny.model())
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert reason in refusal(folder)


SMALL_FILES: dict[str, tuple[str, str, str]] = {
    "deep list": ("config.json", "[" * 100_000, "expected JSON"),
    "deep objects": ("generation_config.json", '{"a":' * 100_000, "expected JSON"),
    "many digits": ("config.json", '{"hidden_size":' + "9" * 5_000 + "}", "expected JSON"),
    "half a pair": ("tokenizer_config.json", '{"bos_token": "\\ud800"}', "expected JSON"),
    "a deep template": (
        "tokenizer_config.json",
        json.dumps({"chat_template": "{{" + "(" * 5_000 + ")" * 5_000 + "}}"}),
        "nested too deeply",
    ),
    "a template of lists": (
        "tokenizer_config.json",
        json.dumps({"chat_template": [{"name": ["default"], "template": 3}, {"name": "default"}]}),
        "",
    ),
    "an end token of another type": ("generation_config.json", '{"eos_token_id": {}}', "token ids"),
    "a long file name": (
        "model.safetensors.index.json",
        json.dumps({"weight_map": {"a": "x" * 10_000}}),
        "expected file names without a folder",
    ),
}


@pytest.mark.parametrize("case", SMALL_FILES)
def test_a_hostile_small_file_is_refused(tmp_path: Path, tiny, case: str):
    name, content, reason = SMALL_FILES[case]
    folder = tiny.folder(tmp_path / "m", tiny.model())
    (folder / name).write_text(content)
    if "index" in name:
        (folder / "model.safetensors").unlink()
    if reason:
        assert reason in refusal(folder)
    else:
        assert open_checkpoint(folder).chat_template is None


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_small_file_that_is_none_is_not_read(tmp_path: Path, tiny, name: str):
    folder = tiny.folder(tmp_path / "m", tiny.model())
    with (folder / name).open("wb") as file:
        file.truncate(1 << 40)  # a hole, on no disk
    assert f"{name}: expected at most" in refusal(folder)


def test_a_cache_of_links_opens_and_a_circle_or_a_pipe_does_not(tmp_path: Path, tiny):
    folder = tiny.folder(tmp_path / "snapshots" / "a", tiny.model())
    weights = folder / "model.safetensors"
    (tmp_path / "blobs").mkdir()
    weights.rename(tmp_path / "blobs" / "b")
    weights.symlink_to("../../blobs/b")
    open_checkpoint(folder).close()
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
        (folder / name).symlink_to(name)
        assert name in refusal(folder)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert name in refusal(folder)


def dims(*sizes: int) -> Callable[[bytearray, int], None]:
    return lambda raw, at: struct.pack_into(f"<{len(sizes)}Q", raw, at + 4, *sizes)


def offset(value: int) -> Callable[[bytearray, int], None]:
    """Of a matrix: behind the number of its axes, both, and its type."""
    return lambda raw, at: struct.pack_into("<Q", raw, at + 4 + 16 + 4, value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dims(0, 1 << 62), "with elements"),
        (dims(0, 1 << 40), "with elements"),
        (dims(1 << 40, 1 << 40), "a file of"),
        (offset(0), "apart"),
        (offset(1 << 63), "a file of"),
    ],
)
def test_a_hostile_line_of_ggufs_table_is_refused(tmp_path: Path, tiny, change, reason: str):
    path = tiny.gguf(tmp_path / "m.gguf", tiny.model())
    raw, name = bytearray(path.read_bytes()), b"blk.0.attn_q.weight"
    change(raw, raw.index(name) + len(name))
    path.write_bytes(raw)
    assert reason in refusal(path)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("token_type", 7, "token_type' to be 267 numbers"),
        ("token_type", np.full(267, np.nan, np.float32), "267 numbers, found others"),
        ("token_type", ["a"] * 267, "267 numbers, found others"),
        ("scores", ["a"] * 267, "267 numbers, found others"),
        ("scores", 7, "267 numbers, found others"),
        ("tokens", ["a" * 1_000_000], "short texts, found one of 1000000 characters"),
        ("tokens", [f"{i}" + "a" * 10_000 for i in range(267)], "short texts"),
        ("model", "x" * 100_000, "'gpt2' or 'llama'"),
    ],
)
def test_hostile_words_of_gguf_are_refused(tmp_path: Path, tiny, key: str, value, reason: str):
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abcdefg"]
    types, scores = [2, 3, 3] + [6] * 256 + [1] * 8, [0.0] * len(words)
    vocabulary = tiny.Vocabulary("llama", words, types, scores=scores)
    vocabulary.extra[key] = value
    path = tiny.gguf(tmp_path / "m.gguf", tiny.model(), vocabulary)
    assert reason in refusal(path)

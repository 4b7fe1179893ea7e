"""A real model from its GGUF file, and the same weights as a folder of safetensors: one answer."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from checkpoints.checkpoint import open_checkpoint
from checkpoints.save_safetensors import save_safetensors
from jaxinfer.config import EngineConfig, replace
from jaxinfer.offline import LLM, Generation

pytestmark = pytest.mark.slow

MODELS = Path(".cache") / "jaxinfer" / "models"  # below the home folder
NAMES = ("smollm2-135m-instruct", "gemma-3-270m")
TEXTS = ("The capital of France is", "Once upon a time", "def fib(n):\n", "1, 1, 2, 3, 5, 8,")


def answers(model: Path, cache: Path) -> list[Generation]:
    config = replace(
        EngineConfig(),
        model=str(model),
        quantization="none",
        cache_dir=str(cache),
        max_num_seqs=4,
        max_model_len=512,
        kv_cache_bytes=2**27,
        show_progress=False,
    )
    llm = LLM(config=config)
    return llm.generate(list(TEXTS), max_tokens=32, temperature=0, ignore_eos=True, logprobs=2)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_answers_are_the_same_bit_for_bit(name: str, users_home: Path, tmp_path: Path):
    found = sorted((users_home / MODELS / name).glob("*.gguf"))
    if not found:
        pytest.skip(f"needs {name} in ~/{MODELS}; python serve.py --model {name} fetches it")
    with closing(open_checkpoint(found[0])) as original:
        save_safetensors(tmp_path / "folder", original)
    want, got = (answers(path, tmp_path / "cache") for path in (found[0], tmp_path / "folder"))
    for left, right in zip(want, got, strict=True):
        assert right.text == left.text
        assert right.choices[0].logprobs == left.choices[0].logprobs

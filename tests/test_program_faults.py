"""A start over a damaged cache: it says what it did, compiles what is damaged, answers the same."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.config import EngineConfig, replace
from jaxinfer.offline import LLM
from tests.program_files import START, remade
from tests.tiny import tiny_engine_config, write_checkpoint
from tests.tiny_llm import SMALL

PROMPTS = [[5, 6, 7], [9] * 20, list(range(40))]
Change = Callable[[bytes, bytes], bytes | None]  # (this file, another program's) -> what is there


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


FAULTS: dict[str, tuple[Change, str]] = {  # None: no file; and what is said about it
    "deleted": (lambda own, other: None, "is missing"),
    "empty": (lambda own, other: b"", "is not a program of this version"),
    "one byte": (lambda own, other: own[:1], "is not a program of this version"),
    "cut in its head": (lambda own, other: own[: START + 20], "is damaged"),
    "half": (lambda own, other: own[: len(own) // 2], "is damaged"),
    "one byte less": (lambda own, other: own[:-1], "is damaged"),
    "first bit": (lambda own, other: flipped(own, 0), "is not a program of this version"),
    "bit of the head": (lambda own, other: flipped(own, START + 9), "is damaged"),
    "bit of the body": (lambda own, other: flipped(own, len(own) // 2), "is damaged"),
    "last bit": (lambda own, other: flipped(own, len(own) - 1), "is damaged"),
    "another program": (lambda own, other: other, "is another program, "),
    "another key": (lambda own, other: remade(own, key="0" * 24), "is of another key, 000"),
    "a folder": (lambda own, other: None, "cannot be read (Is a directory)"),
}
REASONS = {reason for _, reason in FAULTS.values()}


class World:
    """A cache of compiled programs that is damaged again and again; the original is kept."""

    def __init__(self, config: EngineConfig, folder: Path):
        self._original = folder / "original"
        self._config = replace(config, cache_dir=str(folder / "cache"))
        llm = LLM(config=config)
        assert config.cache_dir is not None
        for key in (Path(config.cache_dir) / "programs").iterdir():
            if {f.name for f in key.iterdir()} == set(self._names(llm)):
                shutil.copytree(key, self._original / key.name, dirs_exist_ok=True)
        self._answers = answers(llm)

    @staticmethod
    def _names(llm: LLM) -> list[str]:
        names = [*llm._built.runner._programs.by_name, "kv_pages"]
        return [name.replace(" ", "_").replace("=", "") + ".bin" for name in names]

    def check(self, rotation: int, num_whole: int, caplog: pytest.LogCaptureFixture) -> None:
        """Each file but the last `num_whole` gets a fault, another one at each rotation."""
        programs = Path(str(self._config.cache_dir)) / "programs"
        shutil.rmtree(programs, ignore_errors=True)
        shutil.copytree(self._original, programs)
        keys = list(programs.iterdir())
        expected: dict[str, str] = {}
        for key in keys:
            files = sorted(key.iterdir())
            contents = [file.read_bytes() for file in files]
            damaged = files[: len(files) - num_whole]
            for i, file in enumerate(damaged):
                name = list(FAULTS)[(i + rotation) % len(FAULTS)]
                expected[str(file)] = damage(file, name, contents[i], contents[i - 1])
        caplog.clear()
        llm = LLM(config=self._config)
        told = told_of(caplog, keys)
        num_damaged = len(expected) // len(keys)
        assert llm._built.summary["programs"].endswith(f" loaded, {num_damaged} compiled")
        assert len(told) == num_damaged
        for path, message in told.items():
            assert message.startswith(f"{path}: {expected[path]}")
            assert "; compiling " in message
        assert answers(llm) == self._answers
        assert llm.compile_events()["serving"] == 0


def damage(file: Path, fault: str, own: bytes, other: bytes) -> str:
    """Returns: the reason that should be given."""
    change, reason = FAULTS[fault]
    content = change(own, other)
    if content is not None:
        file.write_bytes(content)
        return reason
    file.unlink()
    if fault == "a folder":
        file.mkdir()
    return reason


def told_of(caplog: pytest.LogCaptureFixture, keys: list[Path]) -> dict[str, str]:
    """What was said about each file, but that a folder cannot be replaced."""
    messages = [r.getMessage() for r in caplog.records if r.name.endswith("program_cache")]
    about = [m for m in messages if any(m.startswith(str(key)) for key in keys)]
    return {message.partition(": ")[0]: message for message in about}


def answers(llm: LLM) -> list[Any]:
    """Tokens and the bits of their log-probabilities, drawn in every way."""
    found: list[Any] = []
    for sampling in ({"temperature": 0.0}, {"seed": 1}, {"seed": 2, "top_k": 30, "logprobs": 5}):
        fields: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "logprobs": 0} | sampling
        for generation in llm.generate(PROMPTS, **fields):
            logprobs = [entry.logprob for entry in generation.choices[0].logprobs]
            found.append((generation.token_ids, np.asarray(logprobs, np.float32).tobytes()))
    return found


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "jaxinfer")
    return caplog


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> World:
    model = write_checkpoint(tmp_path_factory.mktemp("model"))
    config = tiny_engine_config(model, tmp_path_factory.mktemp("warm"), **SMALL)
    return World(config, tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("rotation", [0, pytest.param(5, marks=pytest.mark.slow)])
def test_a_damaged_cache_is_told_compiled_again_and_answers_the_same(
    tiny: World, log: pytest.LogCaptureFixture, rotation: int
):
    """Two of the eleven files are whole, and loaded."""
    tiny.check(rotation, 2, log)


@pytest.fixture(scope="module")
def smollm2(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    fields: dict[str, Any] = {"max_model_len": 2048, "kv_cache_bytes": 1 << 28}
    config = replace(EngineConfig(show_progress=False), model=str(default_model), **fields)
    folder = tmp_path_factory.mktemp("smollm2")
    return World(replace(config, cache_dir=str(folder / "warm")), folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rotation", range(len(FAULTS)))
def test_every_file_of_the_default_model_under_every_fault(
    smollm2: World, log: pytest.LogCaptureFixture, rotation: int
):
    smollm2.check(rotation, 0, log)

"""Damaged heads of every format: a checkpoint that can be planned, or one line that says why not.

Never another exception, a hang or a large allocation. More rounds of the same with `-m slow`.
"""

from __future__ import annotations

import functools
import json
import resource
import shutil
import signal
import struct
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import jax.numpy as jnp
import pytest
from gguf.constants import GGMLQuantizationType
from orbax.checkpoint import Checkpointer, PyTreeCheckpointHandler

from checkpoints.checkpoint import open_checkpoint
from checkpoints.errors import CheckpointError
from checkpoints.formats import quantization_of
from checkpoints.orbax import ORBAX_FOLDER
from checkpoints.save_orbax import save_orbax
from jaxinfer.errors import ConfigError
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.registry import decoder_for
from jaxinfer.runtime.weights import weight_faults
from jaxinfer.tokenizer import Tokenizer
from tests.checkpoints.mutations import damaged_bytes, damaged_json
from tests.oracle.architectures import CASES as ARCHITECTURES
from tests.oracle.architectures import config_of

ROUNDS, MANY_ROUNDS = 100, 5_000
SECONDS = 10  # that one round may take on a busy machine
MEMORY_BYTES = 1 << 30  # and how much more address space than before it

Damage = Callable[[Random, bytes], bytes]


def bytes_of_head(random: Random, raw: bytes) -> bytes:
    return damaged_bytes(random, raw, head=min(len(raw), 16_384))


def json_of(random: Random, raw: bytes) -> bytes:
    return json.dumps(damaged_json(random, json.loads(raw))).encode()


def header_of(random: Random, raw: bytes) -> bytes:
    """The JSON in front of a safetensors file's data."""
    (length,) = struct.unpack_from("<Q", raw)
    text = json_of(random, raw[8 : 8 + length])
    return struct.pack("<Q", len(text)) + text + raw[8 + length :]


CASES: dict[str, tuple[str, str, Damage]] = {
    f"{form}: {name or form} {damage.__name__}": (form, name, damage)
    for form, name, damages in (
        ("gguf", "", [bytes_of_head]),
        ("gguf-scores", "", [bytes_of_head]),
        ("folder", "config.json", [json_of, bytes_of_head]),
        ("folder", "generation_config.json", [json_of]),
        ("folder", "tokenizer_config.json", [json_of]),
        ("folder", "tokenizer.json", [json_of, bytes_of_head]),
        ("folder", "model.safetensors", [header_of, bytes_of_head]),
        ("sharded", "model.safetensors.index.json", [json_of, bytes_of_head]),
        ("orbax", f"{ORBAX_FOLDER}/_METADATA", [json_of, bytes_of_head]),
        ("orbax", f"{ORBAX_FOLDER}/model.norm.weight/.zarray", [json_of, bytes_of_head]),
        ("database", f"{ORBAX_FOLDER}/_METADATA", [json_of]),
        ("database", f"{ORBAX_FOLDER}/manifest.ocdbt", [bytes_of_head]),
    )
    for damage in damages
}


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory, tiny) -> dict[str, Path]:
    """One checkpoint of each form."""
    top, model = tmp_path_factory.mktemp("worlds"), tiny.model()
    files = {
        "tokenizer_config": {
            "bos_token": "<|im_start|>",
            "eos_token": {"content": "<|im_end|>"},
            "add_bos_token": True,
            "chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}],
        },
        "generation_config": {"eos_token_id": [2, 0], "temperature": 0.5},
    }
    names = sorted(model.tensors)
    found = {
        "folder": tiny.folder(top / "folder", model, **files),
        "sharded": tiny.folder(top / "sharded", model, shards=(names[:5], names[5:])),
    }
    found["orbax"] = top / "orbax"
    save_orbax(found["orbax"], open_checkpoint(found["folder"]))
    found["database"] = shutil.copytree(found["orbax"], top / "database")
    shutil.rmtree(found["database"] / ORBAX_FOLDER)
    with Checkpointer(PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(found["database"] / ORBAX_FOLDER, model.tensors)
    found["gguf"] = tiny.gguf(
        top / "merges.gguf", model, tiny.vocabulary(tiny.byte_level(), "gpt-2")
    )
    found["gguf-scores"] = tiny.gguf(
        top / "scores.gguf", model, with_scores(tiny), quantization=GGMLQuantizationType.Q8_0
    )
    return found


def with_scores(tiny: Any) -> Any:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abcde", "▁a", "bc"]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(words) - 259)
    scores = [-float(i) for i in range(len(words))]
    return tiny.Vocabulary("llama", words, types, scores=scores, extra={"eos_token_id": 2})


@contextmanager
def bounded() -> Generator[None]:
    """Less memory and time than a hostile length would take, whatever the process has already."""

    def too_long(signum: int, frame: FrameType | None) -> None:
        raise AssertionError(f"still busy after {SECONDS} s")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    old = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, too_long)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, old[1]))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, old)
        signal.signal(signal.SIGALRM, handler)


@functools.lru_cache(maxsize=512)
def decoder_of(config: str) -> Decoder:
    """By the config's JSON: most damage leaves it as it is."""
    found: Any = json.loads(config)
    quantization = quantization_of(found, "config.json")
    return decoder_for(found, dtype=jnp.dtype(jnp.float32), quantization=quantization)


def fault_of(path: Path) -> str | None:
    """Why it would not load; None if it would."""
    try:
        checkpoint = open_checkpoint(path)
        with closing(checkpoint):
            faults = weight_faults(checkpoint, decoder_of(json.dumps(checkpoint.config)))
            Tokenizer.of(checkpoint)
            return faults[0] if faults else None
    except (CheckpointError, ConfigError) as error:
        return str(error)


def run_rounds(world: Path, name: str, damage: Damage, seeds: range) -> int:
    """Returns: in how many the checkpoint was refused."""
    file = world / name if name else world
    whole, num_refused = file.read_bytes(), 0
    assert fault_of(world) is None
    try:
        for seed in seeds:
            file.write_bytes(damage(Random(seed), whole))
            try:
                with bounded():
                    fault = fault_of(world)
            except BaseException as error:
                raise AssertionError(f"seed {seed}: {error!r}") from error
            if fault is not None:
                num_refused += 1
                assert "\n" not in fault, f"seed {seed}: {fault}"
                assert len(fault) < 2_000, f"seed {seed}: {fault:.200}"
    finally:
        file.write_bytes(whole)
    return num_refused


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_head_is_one_line_or_a_checkpoint(worlds: dict[str, Path], case: str):
    form, name, damage = CASES[case]
    assert run_rounds(worlds[form], name, damage, range(ROUNDS)) > ROUNDS // 10


def config_fault(config: Any) -> str | None:
    try:
        decoder_of(json.dumps(config if isinstance(config, dict) else {}))
    except (CheckpointError, ConfigError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_a_damaged_config_of_a_family_is_one_line_or_a_model(case: str):
    config, faults = config_of(case), []
    for seed in range(ROUNDS // 2):
        damaged = damaged_json(Random(seed), config)
        try:
            with bounded():
                faults.append(config_fault(damaged))
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}: {damaged!r:.500}") from error
    told = [fault for fault in faults if fault is not None]
    assert len(told) > len(faults) // 10
    assert not any("\n" in fault or len(fault) > 2_000 for fault in told)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_much_damage_is_one_line_or_a_checkpoint(worlds: dict[str, Path], case: str):
    form, name, damage = CASES[case]
    run_rounds(worlds[form], name, damage, range(ROUNDS, ROUNDS + MANY_ROUNDS))

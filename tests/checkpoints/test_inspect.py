"""`python -m checkpoints inspect`: what is told of sound, unsupported and broken checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints.__main__ import main
from checkpoints.checkpoint import open_checkpoint
from checkpoints.save_orbax import save_orbax
from tests.checkpoints.other_tools import METHODS, write_quantized
from tests.models.tiny_decoder import QWEN3_MOE
from tests.tiny import write_checkpoint


@pytest.fixture
def folder(tmp_path: Path, tiny) -> Path:
    words = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": "{{ a }}"}
    return tiny.folder(tmp_path / "model", tiny.model(), tokenizer_config=words)


def inspect(path: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, Any]:
    code = main(["inspect", str(path), "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_is_told_whole(folder: Path, capsys: pytest.CaptureFixture[str]):
    code, found = inspect(folder, capsys)
    assert (code, found["would_load"], found["faults"]) == (0, True, [])
    assert found["format"] == "safetensors folder"
    assert found["version"] == open_checkpoint(folder).version
    assert set(found["files"]) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert found["architecture"] == "LlamaForCausalLM"
    assert found["sizes"]["layers"] == 2
    assert found["sizes"]["context"] == 256
    assert (found["tokenizer"], found["has_chat_template"]) == ("BPE", True)
    assert (found["bos_token"], found["eos_token_ids"]) == ("<|im_start|>", [2])
    of_layer = 2 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64
    parameters = 320 * 64 + 64 + 2 * of_layer
    assert found["tensors_by_kind"] == {"float32": {"tensors": 20, "bytes": 4 * parameters}}
    loading = found["loading"]
    assert loading["parameters"] == parameters
    assert loading["weights_bytes_by_form"]["bfloat16"] == 2 * parameters
    assert loading["kv_bytes_per_token"] == {"float32": 2 * 2 * 2 * 16 * 4, "int8": 2 * 2 * 2 * 20}


def test_every_form_of_one_model_would_load(
    tmp_path: Path, folder: Path, tiny, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "gguf").mkdir()
    vocabulary = tiny.vocabulary(tiny.byte_level(), "gpt-2")
    tiny.gguf(tmp_path / "gguf" / "m.gguf", tiny.model(), vocabulary)
    save_orbax(tmp_path / "orbax", open_checkpoint(folder))
    for name, form in (("gguf", "GGUF"), ("orbax", "orbax folder")):
        code, found = inspect(tmp_path / name, capsys)
        assert (code, found["format"], len(found["tensors"])) == (0, form, 20)
        assert len(found["files"]) == len(open_checkpoint(tmp_path / name).files)


@pytest.mark.parametrize("method", METHODS)
def test_folders_of_other_tools_would_load(
    tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
):
    write_quantized(tmp_path, method)
    code, found = inspect(tmp_path, capsys)
    assert (code, found["quantization"]) == (0, method)


def test_a_mixture_has_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, found = inspect(write_checkpoint(tmp_path, **QWEN3_MOE), capsys)
    assert code == 0
    experts = {word: size for word, size in found["sizes"].items() if "expert" in word}
    assert experts == {"experts": 9, "experts per token": 4, "expert width": 24}


@pytest.mark.parametrize(
    ("memory", "tokens"),
    [(300_000, 0), (370_000, 64), (1 << 30, 256)],
)
def test_memory_is_for_weights_and_context(
    folder: Path, capsys: pytest.CaptureFixture[str], memory: int, tokens: int
):
    """Weights of 328,960 bytes, and pages of 64 tokens of 512."""
    code, found = inspect(folder, capsys, "--memory", str(memory), "--quantization", "none")
    assert found["loading"]["context_tokens_that_fit"] == tokens
    assert code == (0 if tokens else 1)
    assert any("bytes are needed" in fault for fault in found["faults"]) is (not tokens)


BROKEN: dict[str, tuple[dict[str, Any], list[str]]] = {
    "architecture": ({"architectures": ["NoModel"]}, ["architectures must name one of"]),
    "key": ({"hidden_act": "relu"}, ["hidden_act must be one of"]),
    "missing and left": (
        {"tie_word_embeddings": False, "num_hidden_layers": 1},
        ["expected 1 tensor 'lm_head.weight'", "expected only tensors that the model uses"],
    ),
    "all shapes": (
        {"intermediate_size": 95},
        ["has shape (96, 64), the model needs (95, 64)"] * 4 + ["the model needs (64, 95)"] * 2,
    ),
    "another's quantization": (
        {"quantization_config": {"quant_method": "other"}},
        ["expected quantization_config of quant_method 'jaxinfer', found 'other'"],
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_does_not_fit_is_told_in_lines(
    folder: Path, capsys: pytest.CaptureFixture[str], case: str
):
    changes, reasons = BROKEN[case]
    rewrite(folder / "config.json", **changes)
    code, found = inspect(folder, capsys)
    assert code == 1
    for reason in reasons:
        told = sum(reason in fault for fault in found["faults"])
        assert told == reasons.count(reason), found["faults"]
    assert len(found["tensors"]) == 20
    assert found["tokenizer"] == "BPE"
    assert not any("\n" in fault for fault in found["faults"])


def test_a_broken_part_leaves_the_others(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "tokenizer.json").write_text("{}")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1])
    code, found = inspect(folder, capsys)
    assert code == 1
    assert len(found["faults"]) == 2
    assert found["sizes"]["width"] == 64
    assert found["loading"]["parameters"] > 0


def test_a_gguf_file_of_an_unknown_architecture_has_sizes_and_tensors(
    tmp_path: Path, tiny, capsys: pytest.CaptureFixture[str]
):
    path = tiny.gguf(tmp_path / "m.gguf", tiny.model())
    path.write_bytes(path.read_bytes().replace(b"llama", b"lambda"[:5]))
    code, found = inspect(path, capsys)
    assert (code, found["architecture"], len(found["tensors"])) == (1, "lambd", 20)
    assert found["sizes"]["layers"] == 2
    assert any("expected general.architecture" in fault for fault in found["faults"])


def test_people_get_lines(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(folder)
    assert lines[-1] == "Would load."
    rewrite(folder / "config.json", architectures=["NoModel"])
    assert main(["inspect", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "Would not load:" in lines
    assert "architectures must name one of" in lines[-1]


def test_nothing_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(tmp_path / "none")]) == 1
    assert "found none of these" in capsys.readouterr().err

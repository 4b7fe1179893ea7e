"""A written folder opens as the original does, and is there as a whole or not at all."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tokenizers import processors

from checkpoints import save, unfinished
from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.errors import CheckpointError
from checkpoints.formats import Quantization, WeightFormat, quantization_of
from checkpoints.rounding import round_to_nearest
from checkpoints.save import CheckpointWriter

INT4 = Quantization(WeightFormat(4, 32, has_zero=True))


@pytest.fixture(params=["folder", "gguf"])
def original(tmp_path: Path, tiny, request: pytest.FixtureRequest) -> Checkpoint:
    if request.param == "folder":
        tokenizer = tiny.byte_level()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
        tokenizer.enable_truncation(7)
        files = {
            "tokenizer_config": {"chat_template": "{{ a }}\r\n", "model_max_length": 9},
            "generation_config": {"temperature": 0.5, "eos_token_id": [0, 2]},
        }
        return open_checkpoint(tiny.folder(tmp_path / "model", tiny.model(), tokenizer, **files))
    vocabulary = tiny.vocabulary(tiny.byte_level(), "smollm")
    vocabulary.extra |= {"add_bos_token": True, "eot_token_id": 0}

    def add_template(writer: Any) -> None:
        writer.add_chat_template("{{ messages }}\r\n")

    path = tmp_path / "model.gguf"
    return open_checkpoint(tiny.gguf(path, tiny.model(), vocabulary, extra=add_template))


def copy(original: Checkpoint, writer: CheckpointWriter) -> None:
    for name in original.source.names():
        writer.add_tensor(name, original.source.read(name))


def test_a_copy_has_the_words_and_the_end_tokens_of_the_original(
    tmp_path: Path, tiny, original: Checkpoint
):
    with CheckpointWriter(tmp_path / "out", original, num_bytes=1) as writer:
        copy(original, writer)
        writer.add_json("certificate.json", {"kl": 0.5})
        writer.add_text("report.md", "# 报告")
        writer.finish(None)
    found = open_checkpoint(tmp_path / "out")
    for name in ("chat_template", "bos_token", "eos_token", "add_bos", "eos_token_ids"):
        assert getattr(found, name) == getattr(original, name), name
    assert found.add_bos
    assert found.eos_token_ids == (0, 2)
    for text in tiny.texts:
        assert found.tokenizer.encode(text).ids == original.tokenizer.encode(text).ids
    assert found.config.pop("torch_dtype") == "float32"
    assert found.config == original.config
    assert found.generation_config == {"eos_token_id": [0, 2]} | original.generation_config
    assert sorted(found.source.names()) == sorted(original.source.names())
    for name in found.source.names():
        np.testing.assert_array_equal(found.source.read(name), original.source.read(name))
    assert (tmp_path / "out" / "certificate.json").read_text() == '{\n "kl": 0.5\n}'
    assert (tmp_path / "out" / "report.md").read_text("utf-8") == "# 报告"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({original.path.name, "out"})
    assert not list((tmp_path / "out").glob(".*"))


def test_who_may_read_the_folder_may_read_its_files(tmp_path: Path, original: Checkpoint):
    with CheckpointWriter(tmp_path / "out", original, num_bytes=1) as writer:
        copy(original, writer)
        writer.finish(None)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "out").stat().st_mode & 0o666}


def test_a_quantized_folder_says_so_and_its_draft_is_the_same_model(
    tmp_path: Path, original: Checkpoint
):
    with CheckpointWriter(tmp_path / "out", original) as writer:
        for name in original.source.names():
            tensor = original.source.read(name)
            if tensor.ndim == 1 or "embed" in name:
                writer.add_tensor(name, tensor.astype(ml_dtypes.bfloat16))
                continue
            for part, array in round_to_nearest(tensor, INT4.weights).parts().items():  # pyright: ignore[reportArgumentType]
                writer.add_tensor(f"{name.removesuffix('weight')}{part}", array)
        draft = writer.draft(INT4)
        seen = {name: draft.source.read(name).copy() for name in draft.source.names()}
        with pytest.raises(CheckpointError, match=r"expected config\.json"):
            open_checkpoint(draft.path)
        draft.close()
        writer.finish(INT4)
    found = open_checkpoint(tmp_path / "out")
    assert found.version == draft.version != original.version
    assert found.config == draft.config
    assert found.config["torch_dtype"] == "bfloat16"
    assert quantization_of(found.config, "f") == INT4
    assert seen.keys() == set(found.source.names())
    for name, array in seen.items():
        assert found.source.read(name).tobytes() == array.tobytes()
        assert found.source.info(name).dtype == array.dtype


def test_more_than_a_shard_is_written_in_several(
    tmp_path: Path, original: Checkpoint, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(save, "SHARD_BYTES", 100_000)
    with CheckpointWriter(tmp_path / "out", original) as writer:
        copy(original, writer)
        writer.finish(None)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    found = open_checkpoint(tmp_path / "out")
    for name in original.source.names():
        np.testing.assert_array_equal(found.source.read(name), original.source.read(name))


def test_a_name_is_added_once(tmp_path: Path, original: Checkpoint):
    with CheckpointWriter(tmp_path / "out", original) as writer:
        writer.add_tensor("a", np.zeros(2, np.float32))
        with pytest.raises(ValueError, match="'a' is added twice"):
            writer.add_tensor("a", np.zeros(2, np.float32))


def test_a_place_that_is_taken_is_refused_before_anything_is_written(
    tmp_path: Path, original: Checkpoint
):
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="expected a folder that is not there yet"):
        CheckpointWriter(tmp_path / "out", original)
    assert not list(tmp_path.glob(".*"))


def test_a_disk_without_room_is_refused_with_both_numbers(tmp_path: Path, original: Checkpoint):
    with pytest.raises(CheckpointError, match=r"expected 1,[0,]+ bytes free .*, found [\d,]+; "):
        CheckpointWriter(tmp_path / "out", original, num_bytes=10**18)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("failing", ["tensors", "json", "sync", "rename"])
def test_what_fails_leaves_nothing(
    tmp_path: Path, original: Checkpoint, monkeypatch: pytest.MonkeyPatch, failing: str
):
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill_the_disk() -> None:
        if failing == "tensors":
            monkeypatch.setattr(save, "save_file", full)
        elif failing == "json":
            monkeypatch.setattr(Path, "write_bytes", full)
        elif failing == "sync":
            monkeypatch.setattr(unfinished.os, "fsync", full)
        else:
            monkeypatch.setattr(unfinished.os, "rename", full)

    def write() -> None:
        with CheckpointWriter(tmp_path / "out", original) as writer:
            copy(original, writer)
            fill_the_disk()
            writer.finish(None)

    with pytest.raises(CheckpointError, match=r"No space left on device \([\d,]+ bytes are free\)"):
        write()
    assert [path.name for path in tmp_path.iterdir()] == [original.path.name]


def test_leaving_without_finish_leaves_nothing(tmp_path: Path, original: Checkpoint):
    def write() -> None:
        with CheckpointWriter(tmp_path / "out", original) as writer:
            copy(original, writer)
            writer.draft(None)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert [path.name for path in tmp_path.iterdir()] == [original.path.name]


def test_weights_are_on_disk_before_there_is_a_config(
    tmp_path: Path, original: Checkpoint, monkeypatch: pytest.MonkeyPatch
):
    synced, sync = dict[str, bool](), unfinished._sync

    def watched(path: Path) -> None:
        sync(path)
        synced.setdefault(path.name, (path.parent / "config.json").exists())

    monkeypatch.setattr(unfinished, "_sync", watched)
    with CheckpointWriter(tmp_path / "out", original) as writer:
        copy(original, writer)
        writer.finish(None)
    assert synced["model.safetensors"] is False
    assert synced["config.json"] is True


KILLED = """
import os, signal, sys
from pathlib import Path
from checkpoints.checkpoint import open_checkpoint
from checkpoints.save import CheckpointWriter
original = open_checkpoint(sys.argv[1])
with CheckpointWriter(Path(sys.argv[2]), original) as writer:
    for name in original.source.names():
        writer.add_tensor(name, original.source.read(name))
    writer.draft(None)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_run_leaves_does_not_open_and_the_next_run_removes_it(
    tmp_path: Path, tiny, caplog: pytest.LogCaptureFixture
):
    original = open_checkpoint(tiny.folder(tmp_path / "model", tiny.model()))
    out = tmp_path / "out"
    command = [sys.executable, "-c", KILLED, str(original.path), str(out)]
    done = subprocess.run(command, check=False, cwd=Path(save.__file__).parents[1])
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    left = tmp_path / ".out.unfinished"
    assert (left / "model.safetensors").is_file()
    with pytest.raises(CheckpointError, match=r"expected config\.json"):
        open_checkpoint(left)
    with CheckpointWriter(out, original) as writer:
        assert f"{left}: removed what a run that did not finish had left" in caplog.text
        assert not (left / "model.safetensors").exists()
        copy(original, writer)
        writer.finish(None)
    assert open_checkpoint(out).eos_token_ids == original.eos_token_ids
    assert not left.exists()


def test_two_do_not_write_one_folder(tmp_path: Path, original: Checkpoint):
    with CheckpointWriter(tmp_path / "out", original) as writer:
        copy(original, writer)
        with pytest.raises(CheckpointError, match="in use by another process"):
            CheckpointWriter(tmp_path / "out", original)
        writer.finish(None)
    assert open_checkpoint(tmp_path / "out").eos_token_ids == (0, 2)

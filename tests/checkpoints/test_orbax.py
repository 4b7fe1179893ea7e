"""A folder in orbax's form opens and loads as the one that it was written from."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from checkpoints import save_orbax as module
from checkpoints.certificate import read_certificate
from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.errors import CheckpointError
from checkpoints.formats import Quantization, WeightFormat
from checkpoints.orbax import ORBAX_FOLDER, OrbaxSource, write_arrays
from checkpoints.rounding import round_to_nearest
from checkpoints.save import CheckpointWriter
from checkpoints.save_orbax import save_orbax
from tests.certificates import certified

INT4 = Quantization(WeightFormat(4, 32, has_zero=True), head=None)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("absl").setLevel(logging.ERROR)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, tiny) -> Checkpoint:
    folder = tmp_path_factory.mktemp("original") / "model"
    files = {"tokenizer_config": {"chat_template": "{{ a }}", "bos_token": "<|im_start|>"}}
    return open_checkpoint(tiny.folder(folder, tiny.model(), **files))


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory, original: Checkpoint) -> Checkpoint:
    out = tmp_path_factory.mktemp("quantized") / "model"
    assert INT4.weights is not None
    with CheckpointWriter(out, original) as writer:
        for name in original.source.names():
            tensor = original.source.read(name)
            if tensor.ndim == 1 or "embed" in name:
                writer.add_tensor(name, tensor.astype(ml_dtypes.bfloat16))
                continue
            for part, array in round_to_nearest(tensor, INT4.weights).parts().items():
                writer.add_tensor(f"{name.removesuffix('weight')}{part}", array)
        certificate = certified(writer.draft(INT4).version)
        writer.add_json("certificate.json", certificate.to_json())
        writer.finish(INT4)
    return open_checkpoint(out)


@pytest.mark.parametrize("form", ["original", "quantized"])
def test_tensors_config_and_words_come_back(
    tmp_path: Path, form: str, request: pytest.FixtureRequest
):
    checkpoint: Checkpoint = request.getfixturevalue(form)
    save_orbax(tmp_path / "out", checkpoint)
    found = open_checkpoint(tmp_path / "out")
    assert isinstance(found.source, OrbaxSource)
    for name in ("config", "chat_template", "bos_token", "eos_token", "add_bos", "eos_token_ids"):
        assert getattr(found, name) == getattr(checkpoint, name), name
    assert set(found.source.names()) == set(checkpoint.source.names())
    for name in found.source.names():
        want = checkpoint.source.read(name)
        info = found.source.info(name)
        assert (info.shape, info.dtype, info.nbytes) == (want.shape, want.dtype, want.nbytes)
        assert found.source.read(name).tobytes() == want.tobytes()
        rows = (slice(0, 1),)
        assert found.source.read(name, rows).tobytes() == want[rows].tobytes()
    found.close()
    assert (read_certificate(tmp_path / "out") is None) is (form == "original")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_version_is_of_the_content_and_the_certificate_names_it(
    tmp_path: Path, quantized: Checkpoint
):
    for name in "ab":
        save_orbax(tmp_path / name, quantized)
    shutil.copytree(tmp_path / "a", tmp_path / "moved")
    versions = [open_checkpoint(tmp_path / name).version for name in ("a", "b", "moved")]
    assert versions[0] == versions[1] == versions[2] != quantized.version
    assert read_certificate(tmp_path / "a") == certified(versions[0])


def test_a_nested_tree_of_arrays_has_names_with_dots(tmp_path: Path):
    tree = {"model": {"norm": {"weight": np.arange(3, dtype=np.float32)}}, "head": np.ones((2, 2))}
    write_arrays(tmp_path, tree)  # pyright: ignore[reportArgumentType]
    source = OrbaxSource(tmp_path)
    assert sorted(source.names()) == ["head", "model.norm.weight"]
    assert source.read("model.norm.weight").tolist() == [0, 1, 2]
    with pytest.raises(CheckpointError, match="expected a tensor 'tail', found none"):
        source.info("tail")
    with pytest.raises(ValueError, match="read-only"):
        source.read("head")[0] = 1
    source.close()


def test_what_a_jax_array_holds_is_read_as_well(tmp_path: Path):
    write_arrays(tmp_path, {"a": jnp.arange(4, dtype=jnp.bfloat16)})  # pyright: ignore[reportArgumentType]
    source = OrbaxSource(tmp_path)
    assert source.read("a").dtype == ml_dtypes.bfloat16
    source.close()


def test_damage_is_named(tmp_path: Path, original: Checkpoint):
    save_orbax(tmp_path / "out", original)
    inside = tmp_path / "out" / ORBAX_FOLDER
    name = "model.layers.0.mlp.up_proj.weight"
    (inside / name / "0.0").write_bytes(b"no")
    source = open_checkpoint(tmp_path / "out").source
    with pytest.raises(CheckpointError, match=rf"tensor '{name}': expected float32 \(96, 64\)"):
        source.read(name)
    (inside / "_METADATA").write_text(json.dumps({"tree_metadata": 7}))
    with pytest.raises(CheckpointError, match="expected an orbax checkpoint of arrays"):
        open_checkpoint(tmp_path / "out")


def test_what_fails_leaves_nothing(
    tmp_path: Path, original: Checkpoint, monkeypatch: pytest.MonkeyPatch
):
    def full(*args: object) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: no space left")

    monkeypatch.setattr(module, "write_small_files", full)
    with pytest.raises(CheckpointError, match="RESOURCE_EXHAUSTED"):
        save_orbax(tmp_path / "out", original)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="expected a folder that is not there yet"):
        save_orbax(tmp_path / "out", original)


def test_other_folders_open_without_orbax(original: Checkpoint):
    code = (
        "import sys; from checkpoints.checkpoint import open_checkpoint; "
        f"open_checkpoint({str(original.path)!r}); "
        "import checkpoints.save_orbax; "
        "assert not [name for name in sys.modules if name.startswith(('orbax', 'jax'))]"
    )
    root = Path(module.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def test_arrays_of_jax_are_not_made_while_reading(tmp_path: Path, original: Checkpoint):
    save_orbax(tmp_path / "out", original)
    before = len(jax.live_arrays())
    source = open_checkpoint(tmp_path / "out").source
    assert isinstance(source.read(source.names()[0]), np.ndarray)
    assert len(jax.live_arrays()) == before

"""A folder in orbax's form opens and loads as the one that it was written from."""

from __future__ import annotations

import json
import logging
import os
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


SHARDED = """
import sys
import jax, numpy as np, orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
def put(array, *axes):
    return jax.device_put(array, NamedSharding(mesh, P(*axes)))
matrix = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)
tree = {
    "model": {"a": {"weight": put(matrix, "x", "y"), "q": put(matrix.astype(np.int8), ("x", "y"))}},
    "model.b.weight": put(matrix[0].astype(jax.numpy.bfloat16)),
}
for name in ("files", "database", "zarr3"):
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=name != "files", use_zarr3=name == "zarr3")
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(f"{sys.argv[1]}/{name}/orbax", tree)
with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(f"{sys.argv[1]}/standard/orbax", tree)
"""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by orbax itself from arrays on four devices, in each of its forms."""
    top = tmp_path_factory.mktemp("sharded")
    flags = "--xla_force_host_platform_device_count=4"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", SHARDED, str(top)], check=True, env=environment)
    return top


@pytest.mark.parametrize("form", ["files", "database", "zarr3", "standard"])
def test_what_orbax_wrote_from_several_devices_is_read(sharded: Path, form: str):
    source = OrbaxSource(sharded / form)
    matrix = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)
    whole = {
        "model.a.weight": matrix,
        "model.a.q": matrix.astype(np.int8),
        "model.b.weight": matrix[0].astype(ml_dtypes.bfloat16),
    }
    assert set(source.names()) == set(whole)
    parts = [None, (slice(3, 5),), (slice(5, 7), slice(2, 9)), (slice(6, 2, -2),), (slice(4, 4),)]
    for name, want in whole.items():
        assert source.info(name).dtype == want.dtype
        for part in parts:
            part = part and part[: want.ndim]
            got = source.read(name, part)
            np.testing.assert_array_equal(got, want if part is None else want[part])
    source.close()


def test_rows_are_read_without_the_chunks_of_others(sharded: Path, tmp_path: Path):
    shutil.copytree(sharded / "files", tmp_path / "copy")
    lost = tmp_path / "copy" / ORBAX_FOLDER / "model.a.q" / "3.0"
    lost.unlink()
    source = OrbaxSource(tmp_path / "copy")
    assert source.read("model.a.q", (slice(2, 6),)).shape == (4, 12)
    for part in (None, (slice(5, 7),)):
        with pytest.raises(CheckpointError, match=r"tensor 'model.a.q': expected int8 \(8, 12\)"):
            source.read("model.a.q", part)


@pytest.mark.parametrize("name", ["../outside", "/etc", "..", ""])
def test_a_name_outside_the_folder_is_refused(sharded: Path, tmp_path: Path, name: str):
    shutil.copytree(sharded / "files", tmp_path / "copy")
    file = tmp_path / "copy" / ORBAX_FOLDER / "_METADATA"
    head = json.loads(file.read_text())
    for entry in head["tree_metadata"].values():
        entry["key_metadata"] = [{"key": name, "key_type": 2}]
    file.write_text(json.dumps(head))
    with pytest.raises(CheckpointError, match="expected an orbax checkpoint of arrays"):
        OrbaxSource(tmp_path / "copy")


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

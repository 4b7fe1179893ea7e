"""The safetensors reader: views of the file, and what it refuses."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints.errors import CheckpointError
from checkpoints.safetensors import SafetensorsSource


def write_raw(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    """A file with any header, sound or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


@pytest.fixture
def single(tmp_path: Path, tiny) -> Path:
    return tiny.folder(tmp_path / "single", tiny.model())


def test_every_tensor_reads_back_as_it_was_written(single: Path, tiny):
    source = SafetensorsSource(single)
    tensors = tiny.model().tensors
    assert sorted(source.names()) == sorted(tensors)
    for name, tensor in tensors.items():
        info = source.info(name)
        assert (info.shape, info.dtype, info.nbytes) == (tensor.shape, tensor.dtype, tensor.nbytes)
        np.testing.assert_array_equal(source.read(name), tensor)


def test_a_slice_reads_that_part(single: Path, tiny):
    source = SafetensorsSource(single)
    name = "model.layers.1.mlp.gate_proj.weight"
    part = source.read(name, (slice(3, 7), slice(None, 10)))
    np.testing.assert_array_equal(part, tiny.model().tensors[name][3:7, :10])


def test_a_read_is_a_read_only_view_of_the_mapped_file(single: Path):
    tensor = SafetensorsSource(single).read("model.norm.weight")
    assert not tensor.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        tensor[0] = 1.0


@pytest.mark.parametrize(
    "part",
    [
        None,
        (slice(3, 7),),
        (slice(3, 7), slice(None, 10)),
        (slice(None, None, 2),),
        (slice(5, 5),),
        (slice(-2, None),),
    ],
)
def test_a_file_that_is_not_mapped_reads_the_same(single: Path, part: tuple[slice, ...] | None):
    name = "model.layers.1.mlp.gate_proj.weight"
    mapped, source = SafetensorsSource(single), SafetensorsSource(single, is_mapped=False)
    got = source.read(name, part)
    np.testing.assert_array_equal(got, mapped.read(name, part))
    os.truncate(single / "model.safetensors", 8)
    with pytest.raises(CheckpointError, match="cut short while it was read"):
        source.read(name)
    source.close()


def test_a_view_outlives_the_source(single: Path, tiny):
    source = SafetensorsSource(single)
    tensor = source.read("model.norm.weight")
    source.close()
    source.close()
    np.testing.assert_array_equal(tensor, tiny.model().tensors["model.norm.weight"])
    with pytest.raises(CheckpointError, match=r"expected a tensor 'model\.norm\.weight'"):
        source.read("model.norm.weight")


def test_bfloat16_and_float8_have_their_own_dtypes(tmp_path: Path):
    values = np.array([1.0, -2.5, 0.0, 448.0], np.float32)
    header, data, at = {}, b"", 0
    for name, dtype in (("BF16", ml_dtypes.bfloat16), ("F8_E4M3", ml_dtypes.float8_e4m3fn)):
        raw = values.astype(dtype).tobytes()
        header[name] = {"dtype": name, "shape": [2, 2], "data_offsets": [at, at + len(raw)]}
        data, at = data + raw, at + len(raw)
    write_raw(tmp_path / "model.safetensors", header, data)
    source = SafetensorsSource(tmp_path)
    assert source.read("BF16").dtype == ml_dtypes.bfloat16
    assert source.read("F8_E4M3").dtype == ml_dtypes.float8_e4m3fn
    for name in header:
        np.testing.assert_array_equal(source.read(name).astype(np.float32).ravel(), values)


def test_a_scalar_and_an_empty_tensor_keep_their_shapes(tmp_path: Path):
    save_file(
        {"one": np.array(3.0, np.float32), "none": np.zeros((0, 4), np.float32)},
        tmp_path / "model.safetensors",
    )
    source = SafetensorsSource(tmp_path)
    assert source.read("one").shape == ()
    assert float(source.read("one")) == 3.0
    assert source.read("none").shape == (0, 4)


# Shards


@pytest.fixture
def sharded(tmp_path: Path, tiny) -> Path:
    names = list(tiny.model().tensors)
    return tiny.folder(
        tmp_path / "sharded", tiny.model(), shards=[names[:5], names[5:12], names[12:]]
    )


def rewrite_index(folder: Path, change) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def test_shards_read_as_one_source(sharded: Path, tiny):
    source = SafetensorsSource(sharded)
    tensors = tiny.model().tensors
    assert sorted(source.names()) == sorted(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(source.read(name), tensor)


def test_a_single_file_wins_over_an_index(sharded: Path):
    save_file({"only": np.ones(2, np.float32)}, sharded / "model.safetensors")
    assert list(SafetensorsSource(sharded).names()) == ["only"]


def test_a_missing_shard_is_named(sharded: Path):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"expected 3 shards, found 2; missing: model-00002"):
        SafetensorsSource(sharded)


def test_a_tensor_that_only_the_index_has_is_named(sharded: Path):
    shard = "model-00001-of-00003.safetensors"
    rewrite_index(sharded, lambda index: index["weight_map"].update({"ghost": shard}))
    with pytest.raises(
        CheckpointError, match=r"expected tensor 'ghost' in .*, but no shard has it"
    ):
        SafetensorsSource(sharded)


def test_a_tensor_in_another_shard_than_the_index_says_is_named(sharded: Path):
    def swap(index):
        index["weight_map"]["model.norm.weight"] = "model-00003-of-00003.safetensors"

    rewrite_index(sharded, swap)
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' in model-00003.*model-00001"):
        SafetensorsSource(sharded)


def test_a_tensor_in_two_shards_is_named(sharded: Path, tiny):
    tensors = tiny.model().tensors
    last = {name: tensors[name] for name in [*list(tensors)[12:], "model.norm.weight"]}
    save_file(last, sharded / "model-00003-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' is also in model-00001"):
        SafetensorsSource(sharded)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", ""])
def test_an_index_that_leaves_its_folder_is_refused(sharded: Path, file: str):
    rewrite_index(sharded, lambda index: index["weight_map"].update({"x": file}))
    with pytest.raises(CheckpointError, match="without a folder"):
        SafetensorsSource(sharded)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', "[" * 100_000]
)
def test_an_index_that_is_none_is_refused(sharded: Path, text: str):
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json: expected .*weight_map"):
        SafetensorsSource(sharded)


# Damage


@pytest.mark.parametrize("percent", [0, 10, 50, 99])
def test_a_truncated_file_is_refused(single: Path, percent: int):
    path = single / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) * percent // 100])
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: expected a whole safetensors file"
    ):
        SafetensorsSource(single)


def one(dtype: str = "F32", shape=(2,), offsets=(0, 8)) -> dict:
    return {"x": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


@pytest.mark.parametrize(
    ("header", "length"),
    [
        (one(), 1 << 63),
        (one(), (1 << 64) - 1),
        (one(), 1 << 30),
        (one(offsets=(1 << 40, (1 << 40) + 8)), None),
        (one(offsets=(0, 1 << 40)), None),
        (one(offsets=(8, 0)), None),
        (one(offsets=(-8, 0)), None),
        (one(dtype="F64"), None),
        (one(shape=(1 << 62, 1 << 62)), None),
        (one(shape=(-2,)), None),
        (one(dtype="no such"), None),
        ({"x": 3}, None),
        ([], None),
        (b"\xff\xfe", None),
        (b"[" * 50_000, None),
    ],
)
def test_a_hostile_header_is_an_error_without_a_large_allocation(tmp_path: Path, header, length):
    write_raw(tmp_path / "model.safetensors", header, bytes(8), length)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"^[^\n]*model\.safetensors: expected[^\n]*$"):
            SafetensorsSource(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_dtype_that_numpy_lacks_is_named(tmp_path: Path):
    write_raw(tmp_path / "model.safetensors", one("F4", (4,), (0, 2)), bytes(2))
    with pytest.raises(CheckpointError, match="tensor 'x' has dtype F4, expected one of"):
        SafetensorsSource(tmp_path)


def test_no_weights_says_what_is_there_instead(tmp_path: Path):
    with pytest.raises(
        CheckpointError, match=r"expected model\.safetensors or .*, found no weights"
    ):
        SafetensorsSource(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"found only pytorch_model\.bin"):
        SafetensorsSource(tmp_path)

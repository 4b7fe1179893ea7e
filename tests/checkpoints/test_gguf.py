"""The GGUF source: names, q/k row order, dequantization, damaged and hostile files."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type

from checkpoints.errors import CheckpointError
from checkpoints.gguf import GGUFSource
from checkpoints.layout import arranged
from checkpoints.safetensors import SafetensorsSource

U32, STRING, ARRAY, U64 = 4, 8, 9, 10


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_both_formats_give_the_same_tensors(tmp_path: Path, tiny, family: str, tied: bool):
    model = tiny.model(family, tied=tied)
    ours = GGUFSource(tiny.gguf(tmp_path / "m.gguf", model))
    theirs = SafetensorsSource(tiny.folder(tmp_path / "hf", model))
    assert sorted(ours.names()) == sorted(theirs.names())
    for name in theirs.names():
        assert ours.info(name) == theirs.info(name)
        np.testing.assert_array_equal(ours.read(name), theirs.read(name), err_msg=name)


def test_only_the_llama_family_has_its_q_and_k_rows_moved(tmp_path: Path, tiny):
    model = tiny.model("llama")
    reader = gguf.GGUFReader(tiny.gguf(tmp_path / "m.gguf", model))
    stored = {tensor.name: tensor.data for tensor in reader.tensors}
    q = model.tensors["model.layers.0.self_attn.q_proj.weight"]
    # Head 1 has rows 16..31: its first half pairs with its second, row 16 with row 24.
    np.testing.assert_array_equal(stored["blk.0.attn_q.weight"][16:20], q[[16, 24, 17, 25]])
    k = model.tensors["model.layers.0.self_attn.k_proj.weight"]
    np.testing.assert_array_equal(stored["blk.0.attn_k.weight"][16:20], k[[16, 24, 17, 25]])
    np.testing.assert_array_equal(
        stored["blk.0.attn_v.weight"], model.tensors["model.layers.0.self_attn.v_proj.weight"]
    )


@pytest.mark.parametrize("quantization", [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1])
def test_block_types_read_as_the_package_dequantizes_them(tmp_path: Path, tiny, quantization):
    model = tiny.model("llama")
    source = GGUFSource(tiny.gguf(tmp_path / "m.gguf", model, quantization=quantization))
    for name, tensor in model.tensors.items():
        got = source.read(name).astype(np.float32)
        assert got.dtype == np.float32
        assert source.info(name).nbytes == source.read(name).nbytes
        if tensor.ndim == 1:
            np.testing.assert_array_equal(got, tensor)
            continue
        rows = gguf.quants.dequantize(gguf.quants.quantize(tensor, quantization), quantization)
        np.testing.assert_array_equal(got, rows, err_msg=name)  # blocks lie within rows


def known_types() -> list[Type]:
    """That the package dequantizes."""
    known = []
    for kind in Type:
        try:
            gguf.quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            continue
        known.append(kind)
    return known


def random_rows(kind: Type, num_rows: int) -> np.ndarray:
    """uint8: any bytes are a block, though its scale may be infinite."""
    size, nbytes = GGML_QUANT_SIZES[kind]
    return np.random.default_rng(7).integers(0, 256, (num_rows, 512 // size * nbytes), np.uint8)


@pytest.mark.filterwarnings("ignore:overflow|invalid value:RuntimeWarning")
@pytest.mark.parametrize("kind", known_types(), ids=lambda kind: kind.name)
def test_each_block_type_that_the_package_dequantizes_is_read(tmp_path: Path, tiny, kind: Type):
    """Experts too, whose rows lie under one another."""
    raw = random_rows(kind, 6)
    extra = {"blk.0.ffn_up_exps.weight": raw.reshape(3, 2, -1), "blk.1.ffn_up_exps.weight": raw}
    path = tiny.gguf(
        tmp_path / "m.gguf",
        tiny.model("llama"),
        extra=lambda w: [w.add_tensor(name, x, raw_dtype=kind) for name, x in extra.items()],
    )
    source, expected = GGUFSource(path), gguf.quants.dequantize(raw, kind).astype(np.float32)
    for layer in (0, 1):
        name = f"model.layers.{layer}.mlp.experts.up_proj.weight"
        assert source.info(name).shape == (6, 512)
        for part in (slice(None), slice(1, 4), slice(5, 6)):
            got = source.read(name, (part,)).astype(np.float32)
            np.testing.assert_array_equal(got, expected[part], err_msg=name)
        assert source.read(name).nbytes == source.info(name).nbytes


def test_all_known_block_types_are_tried():
    """So that the list above is not empty by mistake."""
    names = {kind.name for kind in known_types()}
    assert {"Q2_K", "Q6_K", "IQ1_M", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "BF16"} <= names
    assert "Q8_1" not in names


def test_experts_of_the_first_mixtrals_stand_one_by_one_in_the_file(tmp_path: Path, tiny):
    rows = np.arange(96 * 64, dtype=np.float32).reshape(96, 64)
    path = tiny.gguf(
        tmp_path / "m.gguf",
        tiny.model("llama"),
        extra=lambda w: [w.add_tensor(f"blk.1.ffn_up.{i}.weight", i - rows) for i in range(2)],
    )
    found = GGUFSource(path)
    source = arranged(found, found.config, "m.gguf")
    assert not [name for name in source.names() if "experts.0" in name]
    joined = source.read("model.layers.1.mlp.experts.up_proj.weight")
    np.testing.assert_array_equal(joined, np.concatenate([-rows, 1 - rows]))


@pytest.mark.parametrize("quantization", [Type.F32, Type.BF16, Type.Q8_0])
@pytest.mark.parametrize("part", [slice(0, 3), slice(5, 23), slice(30, 32), slice(7, 7)])
def test_a_slice_of_rows_equals_that_part_of_the_whole(tmp_path, tiny, quantization, part):
    source = GGUFSource(
        tiny.gguf(tmp_path / "m.gguf", tiny.model("llama"), quantization=quantization)
    )
    for proj in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        name = f"model.layers.1.{proj}.weight"
        np.testing.assert_array_equal(source.read(name, (part,)), source.read(name)[part])
        both = (part, slice(3, 9))
        np.testing.assert_array_equal(source.read(name, both), source.read(name)[both])


def test_a_zero_group_dequantizes_to_exact_zeros(tmp_path: Path, tiny):
    model = tiny.model("llama")
    name = "model.layers.0.mlp.up_proj.weight"
    model.tensors[name][3] = 0.0
    model.tensors[name][4, :32] = 1e-8
    model.tensors[name][5, 0] = 1e4
    source = GGUFSource(tiny.gguf(tmp_path / "m.gguf", model, quantization=Type.Q8_0))
    got = source.read(name)
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got[3], 0.0)
    assert np.abs(got[4, :32]).max() <= 1e-7
    assert abs(got[5, 0] - 1e4) < 1e4 / 127


def test_plain_types_are_views_of_the_file(tmp_path: Path, tiny):
    source = GGUFSource(tiny.gguf(tmp_path / "m.gguf", tiny.model("llama")))
    assert not source.read("model.embed_tokens.weight").flags.owndata


def test_a_file_that_is_not_mapped_reads_the_same(tmp_path: Path, tiny):
    """Rows of q and k are moved."""
    path = tiny.gguf(tmp_path / "m.gguf", tiny.model("llama"), quantization=Type.Q8_0)
    mapped, source = GGUFSource(path), GGUFSource(path, is_mapped=False)
    for name in mapped.names():
        for part in (None, (slice(3, 7),), (slice(None, None, 3),)):
            got = source.read(name, part)
            np.testing.assert_array_equal(got, mapped.read(name, part), err_msg=name)
    os.truncate(path, source._entry("model.norm.weight").tensor.start)
    with pytest.raises(CheckpointError, match="cut short while it was read"):
        source.read("model.norm.weight")
    source.close()


def test_a_view_outlives_the_source(tmp_path: Path, tiny):
    model = tiny.model("llama")
    source = GGUFSource(tiny.gguf(tmp_path / "m.gguf", model))
    tensor = source.read("model.embed_tokens.weight")
    source.close()
    source.close()
    np.testing.assert_array_equal(tensor, model.tensors["model.embed_tokens.weight"])
    with pytest.raises(CheckpointError, match="found none"):
        source.read("model.embed_tokens.weight")


def test_a_tensor_that_no_table_knows_keeps_its_name(tmp_path: Path, tiny):
    path = tiny.gguf(
        tmp_path / "m.gguf",
        tiny.model("llama"),
        extra=lambda w: w.add_tensor("blk.0.attn_q_norm.weight", np.ones(16, np.float32)),
    )
    assert "blk.0.attn_q_norm.weight" in GGUFSource(path).names()


def test_another_architecture_is_refused_by_name(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        CheckpointError, match=r"general\.architecture to be llama, qwen2, .*olmoe, found 'mamba'"
    ):
        GGUFSource(tmp_path / "m.gguf")


# Damage. A file is built field by field, so that each can lie.


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


ARCHITECTURE = text("general.architecture") + struct.pack("<I", STRING) + text("llama")


def gguf_bytes(
    fields: bytes = ARCHITECTURE,
    num_fields: int = 1,
    table: bytes = b"",
    num_tensors: int = 0,
    version: int = 3,
) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields) + fields + table
    return head + bytes(-len(head) % 32) + bytes(64)


def tensor_line(name: str = "t", dims=(32,), kind: int = 0, offset: int = 0) -> bytes:
    return (
        text(name)
        + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        + struct.pack("<IQ", kind, offset)
    )


def array_field(kind: int, count: int) -> bytes:
    return ARCHITECTURE + text("a") + struct.pack("<IIQ", ARRAY, kind, count)


HOSTILE = {
    "empty": (b"", "an empty one"),
    "three bytes": (b"GGU", "magic number"),
    "another magic": (b"PK\3\4" + bytes(64), "expected a GGUF file"),
    "version 1": (gguf_bytes(version=1), "version 1"),
    "big-endian": (gguf_bytes(version=3 << 24), "big-endian"),
    "2**63 fields": (gguf_bytes(num_fields=1 << 63), "expected"),
    "2**63 tensors": (gguf_bytes(num_tensors=1 << 63), "expected"),
    "key of 2**63 bytes": (gguf_bytes(struct.pack("<Q", 1 << 63)), "a metadata key"),
    "key that is not UTF-8": (gguf_bytes(struct.pack("<Q", 2) + b"\xff\xfe"), "UTF-8"),
    "array of 2**60 bytes": (gguf_bytes(array_field(0, 1 << 60), 2), "bytes of 'a'"),
    "array of 2**60 strings": (gguf_bytes(array_field(STRING, 1 << 60), 2), "strings in 'a'"),
    "array of 2**20 strings": (gguf_bytes(array_field(STRING, 1 << 20), 2), "expected"),
    "array of arrays": (gguf_bytes(array_field(ARRAY, 1), 2), "known type, found type 9"),
    "unknown field type": (
        gguf_bytes(ARCHITECTURE + text("a") + struct.pack("<I", 77), 2),
        "known type, found type 77",
    ),
    "a key twice": (gguf_bytes(ARCHITECTURE * 2, 2), "'general.architecture' once"),
    "alignment 3": (
        gguf_bytes(ARCHITECTURE + text("general.alignment") + struct.pack("<II", U32, 3), 2),
        "power of two",
    ),
    "alignment 0": (
        gguf_bytes(ARCHITECTURE + text("general.alignment") + struct.pack("<II", U32, 0), 2),
        "power of two",
    ),
    "alignment 2**62": (
        gguf_bytes(
            ARCHITECTURE + text("general.alignment") + struct.pack("<IQ", U64, 1 << 62),
            2,
            tensor_line(),
            1,
        ),
        "a file of",
    ),
    "offset 2**40": (gguf_bytes(table=tensor_line(offset=1 << 40), num_tensors=1), "a file of"),
    "offset 2**64-1": (
        gguf_bytes(table=tensor_line(offset=(1 << 64) - 1), num_tensors=1),
        "a file of",
    ),
    "too many elements": (
        gguf_bytes(table=tensor_line(dims=(1 << 62, 1 << 62)), num_tensors=1),
        "a file of",
    ),
    "no axes": (gguf_bytes(table=tensor_line(dims=()), num_tensors=1), "1 to 4 axes, found 0"),
    "nine axes": (gguf_bytes(table=tensor_line(dims=(1,) * 9), num_tensors=1), "found 9"),
    "unknown block type": (
        gguf_bytes(table=tensor_line(kind=999), num_tensors=1),
        "tensor 't' of a known block type, found type 999",
    ),
    "block type without dequantization": (
        gguf_bytes(table=tensor_line(kind=int(Type.Q8_1), dims=(32,)), num_tensors=1),
        "tensor 't' has block type Q8_1",
    ),
    "half a block": (
        gguf_bytes(table=tensor_line(kind=int(Type.Q8_0), dims=(33,)), num_tensors=1),
        "multiples of 32",
    ),
    "a tensor twice": (gguf_bytes(table=tensor_line() * 2, num_tensors=2), "tensor 't' once"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_one_line_without_a_large_allocation(tmp_path: Path, case: str):
    content, reason = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            GGUFSource(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.startswith(str(path))
    assert reason in message
    assert "\n" not in message


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, tiny):
    raw = tiny.gguf(tmp_path / "m.gguf", tiny.model("llama")).read_bytes()
    path = tmp_path / "cut.gguf"
    for percent in (0.01, 0.1, 1, 10, 50, 99, 99.99):
        path.write_bytes(raw[: int(len(raw) * percent / 100)])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: expected"):
            GGUFSource(path)


def test_a_damaged_head_opens_or_is_refused_but_never_crashes(tmp_path: Path, tiny):
    raw = tiny.gguf(tmp_path / "m.gguf", tiny.model("llama")).read_bytes()
    rng = np.random.default_rng(0)
    path = tmp_path / "damaged.gguf"
    num_refused = 0
    for _ in range(300):
        damaged = bytearray(raw[:8192])
        for at in rng.integers(0, 2600, size=3):
            damaged[at] = rng.integers(256)
        path.write_bytes(bytes(damaged) + raw[8192:])
        try:
            source = GGUFSource(path)
            for name in source.names():
                source.read(name)
        except CheckpointError:
            num_refused += 1
    assert num_refused > 100

"""Folders of GPTQ, AWQ and compressed-tensors are what their formulas say, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.checkpoint import open_checkpoint
from checkpoints.errors import CheckpointError
from checkpoints.formats import WeightFormat, quantization_of
from checkpoints.load import load_params
from checkpoints.prequantized.source import ConvertedSource
from checkpoints.qtensor import QTensor
from checkpoints.save_safetensors import save_safetensors
from jaxinfer.models.registry import decoder_for
from jaxinfer.runtime.weights import load_weights
from tests.checkpoints.other_tools import (
    METHODS,
    SIZES,
    Numbers,
    Pack,
    awq,
    awq_config,
    compressed_config,
    gptq,
    gptq_config,
    int_quantized,
    named,
    pack_quantized,
    random_numbers,
    write_quantized,
)
from tests.held_tensors import Held
from tests.models.tiny_decoder import MIXTRAL, PHI3, dense_logits
from tests.tiny import write_checkpoint

SHAPE = (24, 256)


def case(
    config: dict[str, Any], kept: WeightFormat, pack: Pack, *, is_symmetric: bool = False
) -> Any:
    name = f"{config['quant_method']} {kept.name}{' v2' if 'gptq_v2' in str(config) else ''}"
    return pytest.param(config, kept, pack, is_symmetric, id=name)


def gptq_cases() -> list[Any]:
    found: list[Any] = []
    for bits in (4, 8):
        for size in (32, 128, None):
            for version, form in ((1, "gptq"), (2, "gptq_v2")):
                config = gptq_config(bits, size, sym=False, checkpoint_format=form)
                kept = WeightFormat(bits, size, has_zero=True)  # type: ignore[arg-type]
                pack = lambda n, bits=bits, v=version: gptq(n, bits, version=v)  # noqa: E731
                found.append(case(config, kept, pack))
        config, kept = gptq_config(bits, 64, sym=True), WeightFormat(bits, 64)  # type: ignore[arg-type]
        pack = lambda n, bits=bits: gptq(n, bits, has_order=False)  # noqa: E731
        found.append(case(config, kept, pack, is_symmetric=True))
    return found


def compressed_cases() -> list[Any]:
    found: list[Any] = []
    for is_symmetric in (True, False):
        for bits, size in ((4, 32), (4, 128), (4, None), (8, 64), (8, None)):
            config = compressed_config("pack-quantized", bits, size, is_symmetric=is_symmetric)
            kept = WeightFormat(bits, size, has_zero=not is_symmetric)  # type: ignore[arg-type]
            pack = lambda n, b=bits, s=is_symmetric: pack_quantized(n, b, is_symmetric=s)  # noqa: E731
            found.append(case(config, kept, pack, is_symmetric=is_symmetric))
        config = compressed_config("int-quantized", 8, None, is_symmetric=is_symmetric)
        kept = WeightFormat(8, has_zero=not is_symmetric)
        pack = lambda n, s=is_symmetric: int_quantized(n, is_symmetric=s)  # noqa: E731
        found.append(case(config, kept, pack, is_symmetric=is_symmetric))
    return found


CASES = [
    *gptq_cases(),
    *(case(awq_config(size), WeightFormat(4, size, has_zero=True), awq) for size in (32, 64, 128)),  # type: ignore[arg-type]
    *compressed_cases(),
]


@pytest.mark.parametrize(("config", "kept", "pack", "is_symmetric"), CASES)
def test_values_are_those_of_the_formula(
    config: dict[str, Any], kept: WeightFormat, pack: Pack, is_symmetric: bool
):
    numbers = random_numbers(SHAPE, kept.bits, kept.group_size, is_symmetric=is_symmetric)
    other = np.ones((2, 3), np.float32)
    tensors = named(pack(numbers)) | {"model.embed_tokens.weight": other}
    source = ConvertedSource(Held(tensors), {"quantization_config": config}, "f")
    assert source.kept == kept
    parts = {name.rpartition(".")[2]: source.read(name) for name in source.names()}
    np.testing.assert_array_equal(parts.pop("weight"), other)
    assert set(parts) == {"q", "scale"} | ({"zero"} if kept.has_zero else set())
    for name, array in parts.items():
        full = f"model.layers.0.mlp.up_proj.{name}"
        info = source.info(full)
        assert (info.shape, info.dtype, info.nbytes) == (array.shape, array.dtype, array.nbytes)
        for slices in ((slice(3, 17),), (slice(0, 1), slice(5, 24)), (slice(4, 4),)):
            np.testing.assert_array_equal(source.read(full, slices), array[slices])
    found = QTensor.from_parts(parts, kept, SHAPE[1]).dequantized()
    np.testing.assert_array_equal(found, numbers.values)


def out_of_order(numbers: Numbers, seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Groups of inputs as act-order leaves them, int32[K], and the values float32[N, K] then."""
    groups = np.random.default_rng(seed).permutation(
        np.arange(numbers.q.shape[1], dtype=np.int32) // numbers.group_size
    )
    difference = (numbers.q - numbers.zero[:, groups]).astype(np.float32)
    return groups, difference * numbers.scale.astype(np.float32)[:, groups]


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_inputs_out_of_order_are_brought_together(method: str):
    numbers = random_numbers(SHAPE, 4, 64, is_symmetric=True)
    groups, values = out_of_order(numbers)
    if method == "gptq":
        config = gptq_config(4, 64, sym=True, desc_act=True)
        parts = gptq(numbers, 4) | {"g_idx": groups}
    else:
        config = compressed_config("pack-quantized", 4, 64, is_symmetric=True)
        parts = pack_quantized(numbers, 4, is_symmetric=True) | {"weight_g_idx": groups}
    source = ConvertedSource(Held(named(parts)), {"quantization_config": config}, "f")
    found = {name.rpartition(".")[2]: source.read(name) for name in source.names()}
    order = found.pop("order")
    dequantized = QTensor.from_parts(found, WeightFormat(4, 64), SHAPE[1]).dequantized()
    np.testing.assert_array_equal(dequantized, values[:, order])
    assert (np.diff(groups[order]) >= 0).all()


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        *((method, {}) for method in METHODS),
        ("gptq", MIXTRAL | {"intermediate_size": 64}),
    ],
)
def test_a_folder_computes_as_its_numbers_do(tmp_path: Path, method: str, changes: dict[str, Any]):
    floats = write_quantized(tmp_path / "model", method, **changes)
    checkpoint = open_checkpoint(tmp_path / "model")
    assert checkpoint.quantized_by == method
    kept = quantization_of(checkpoint.config, "f")
    assert kept is not None
    assert ("layers.0.self_attn.o_proj", None) in kept.exceptions
    decoder = decoder_for(checkpoint.config, dtype=jnp.dtype("float32"), quantization=kept)
    params = load_weights(checkpoint, decoder)
    ids = list(range(20, 60))
    found = dense_logits(decoder, params, ids)
    sizes: dict[str, Any] = SIZES | changes
    write_checkpoint(tmp_path / "float", **sizes)
    save_file(floats, tmp_path / "float" / "model.safetensors")
    original = open_checkpoint(tmp_path / "float")
    plain = decoder_for(original.config, dtype=jnp.dtype("float32"))
    want = dense_logits(plain, load_weights(original, plain), ids)
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-3 * np.abs(want).max())


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_folder_in_act_order_computes_as_its_numbers_do(tmp_path: Path, family: str):
    changes: dict[str, Any] = SIZES | (PHI3 if family == "phi3" else {})
    floats = write_quantized(tmp_path / "model", "gptq", **changes)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    for number, name in enumerate([name for name in tensors if name.endswith("g_idx")]):
        product = name.removesuffix(".g_idx")
        shape = floats[f"{product}.weight"].shape
        seed = list(floats).index(f"{product}.weight")
        numbers = random_numbers((shape[0], shape[1]), 4, 32, is_symmetric=True, seed=seed)
        tensors[name], floats[f"{product}.weight"] = out_of_order(numbers, number)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    write_checkpoint(tmp_path / "float", **changes)
    save_file(floats, tmp_path / "float" / "model.safetensors")
    ids, logits = list(range(20, 60)), list[np.ndarray]()
    for folder in ("model", "float"):
        checkpoint = open_checkpoint(tmp_path / folder)
        kept = quantization_of(checkpoint.config, "f")
        decoder = decoder_for(
            checkpoint.config, dtype=jnp.dtype("float32"), quantization=kept, max_model_len=None
        )
        logits.append(dense_logits(decoder, load_weights(checkpoint, decoder), ids))
    np.testing.assert_allclose(*logits, rtol=0, atol=2e-3 * np.abs(logits[1]).max())


def test_it_is_written_again_in_our_own_form(tmp_path: Path):
    write_quantized(tmp_path / "model", "gptq")
    original = open_checkpoint(tmp_path / "model")
    save_safetensors(tmp_path / "out", original)
    found = open_checkpoint(tmp_path / "out")
    assert found.quantized_by is None
    assert found.config["quantization_config"] == original.config["quantization_config"]
    for name in original.source.names():
        np.testing.assert_array_equal(found.source.read(name), original.source.read(name))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method jaxinfer, gptq, awq, compressed-tensors, ",
        ),
        ({"quant_method": None}, "found 'None'"),
        ({"bits": 3}, "bits in quantization_config to be 4 or 8, found 3"),
        ({"group_size": 16}, "group_size in quantization_config to be 32 or 64 or 128 or -1"),
        ({"group_size": True}, "group_size in quantization_config to be"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format gptq or gptq_v2, found 'marlin'"),
        ({"group_size": 64}, "scales' is float16 .*, expected shape"),
        ({"bits": 8}, "scales' is float16 .*, expected shape"),
        ({"quant_method": "compressed-tensors"}, "expected one of config_groups"),
        ({"quant_method": "awq", "version": "marlin"}, "version gemm with zero points"),
        ({"quant_method": "awq"}, "expected shape"),
    ],
)
def test_a_config_that_is_not_read_is_told(tmp_path: Path, changes: dict[str, Any], message: str):
    write_quantized(tmp_path, "gptq")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("part", "array", "message"),
    [
        ("qweight", np.zeros((4, 4), np.float32), "expected int32 of 2 axes"),
        ("qzeros", np.zeros((2, 2), np.int32), "expected shape"),
        ("qzeros", None, "qzeros', found none"),
        ("scales", np.zeros((3, 1, 1), np.float16), "float16 or bfloat16 or float32 of 2 axes"),
        ("g_idx", np.zeros(5, np.int32), "expected shape"),
        ("g_idx", np.arange(64, dtype=np.int32) // 16, "groups of 32 inputs each, from 0 on"),
        ("g_idx", np.arange(64, dtype=np.int32) // 32 + 1, "groups of 32 inputs each, from 0 on"),
    ],
)
def test_parts_that_do_not_fit_are_told(
    tmp_path: Path, part: str, array: np.ndarray | None, message: str
):
    write_quantized(tmp_path, "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.1.mlp.up_proj.{part}"
    del tensors[name]
    if array is not None:
        tensors[name] = np.ascontiguousarray(array)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_zero_points_that_sym_does_not_say_are_told_while_loading(tmp_path: Path):
    write_quantized(tmp_path, "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.qzeros"][1, 3] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    kept = quantization_of(checkpoint.config, "f")
    decoder = decoder_for(checkpoint.config, dtype=jnp.dtype("float32"), quantization=kept)
    with pytest.raises(CheckpointError, match="zero points of 8 alone"):
        load_params(
            checkpoint.source,
            decoder.weight_plan(),
            dtype=np.float32,
            is_quantized=True,
            file="f",
        )

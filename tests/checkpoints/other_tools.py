"""Products as other tools pack them, number by number, from the formats' descriptions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.tiny import tiny_config, tiny_tensors, write_checkpoint


@dataclass(frozen=True)
class Numbers:
    """Of one product: value[n, k] = (q[n, k] - zero[n, g]) * scale[n, g]."""

    q: np.ndarray  # [N, K], unsigned
    zero: np.ndarray  # [N, G]
    scale: np.ndarray  # float16[N, G]
    group_size: int

    @property
    def values(self) -> np.ndarray:
        """float32[N, K], by the formula."""
        groups = np.arange(self.q.shape[1]) // self.group_size
        difference = (self.q - self.zero[:, groups]).astype(np.float32)
        return difference * self.scale.astype(np.float32)[:, groups]


Pack = Callable[[Numbers], dict[str, Any]]


def random_numbers(
    shape: tuple[int, int], bits: int, group_size: int | None, *, is_symmetric: bool, seed: int = 0
) -> Numbers:
    rng = np.random.default_rng(seed)
    size = group_size or shape[1]
    groups = (shape[0], shape[1] // size)
    zero = np.full(groups, 2 ** (bits - 1)) if is_symmetric else rng.integers(0, 2**bits, groups)
    q = rng.integers(0, 2**bits, shape)
    q[0, :2] = 0, 2**bits - 1
    scale = (rng.random(groups) * 0.3 / 2**bits + 1e-3).astype(np.float16)
    return Numbers(q, zero, scale, size)


def packed_along(values: np.ndarray, bits: int, axis: int, order: tuple[int, ...]) -> np.ndarray:
    """int32: of each 32/bits numbers along `axis`, number order[i] at bits i * bits of a word."""
    values = np.moveaxis(values, axis, 0).astype(np.uint32)
    per_word = 32 // bits
    values = np.pad(values, ((0, -len(values) % per_word), (0, 0)))
    words = np.zeros((len(values) // per_word, values.shape[1]), np.uint32)
    for word in range(len(words)):
        for place, index in enumerate(order):
            words[word] |= values[word * per_word + index] << np.uint32(place * bits)
    return np.ascontiguousarray(np.moveaxis(words, 0, axis)).view(np.int32)


def in_order(bits: int) -> tuple[int, ...]:
    return tuple(range(32 // bits))


def gptq(
    numbers: Numbers, bits: int, *, version: int = 1, has_order: bool = True
) -> dict[str, Any]:
    stored = (numbers.zero.T - (version == 1)) % 2**bits
    tensors = {
        "qweight": packed_along(numbers.q.T, bits, 0, in_order(bits)),
        "qzeros": packed_along(stored, bits, 1, in_order(bits)),
        "scales": np.ascontiguousarray(numbers.scale.T),
    }
    groups = np.arange(numbers.q.shape[1], dtype=np.int32) // numbers.group_size
    return tensors | ({"g_idx": groups.astype(np.int32)} if has_order else {})


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq(numbers: Numbers) -> dict[str, Any]:
    return {
        "qweight": packed_along(numbers.q.T, 4, 1, AWQ_ORDER),
        "qzeros": packed_along(numbers.zero.T, 4, 1, AWQ_ORDER),
        "scales": np.ascontiguousarray(numbers.scale.T),
    }


def pack_quantized(numbers: Numbers, bits: int, *, is_symmetric: bool) -> dict[str, Any]:
    tensors = {
        "weight_packed": packed_along(numbers.q, bits, 1, in_order(bits)),
        "weight_scale": numbers.scale,
        "weight_shape": np.array(numbers.q.shape, np.int64),
    }
    if is_symmetric:
        return tensors
    return tensors | {"weight_zero_point": packed_along(numbers.zero, bits, 0, in_order(bits))}


def int_quantized(numbers: Numbers, *, is_symmetric: bool) -> dict[str, Any]:
    tensors = {"weight": (numbers.q - 128).astype(np.int8), "weight_scale": numbers.scale}
    if is_symmetric:
        return tensors
    return tensors | {"weight_zero_point": (numbers.zero - 128).astype(np.int8)}


def gptq_config(bits: int, group_size: int | None, **more: Any) -> dict[str, Any]:
    size = -1 if group_size is None else group_size
    return {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": False} | more


def awq_config(group_size: int, **more: Any) -> dict[str, Any]:
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size}
    return config | {"zero_point": True, "version": "gemm"} | more


def compressed_config(
    form: str, bits: int, group_size: int | None, *, is_symmetric: bool, **group: Any
) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": is_symmetric,
        "strategy": "group" if group_size else "channel",
        "group_size": group_size,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights} | group},
    }


def named(parts: dict[str, Any], product: str = "model.layers.0.mlp.up_proj") -> dict[str, Any]:
    return {f"{product}.{part}": array for part, array in parts.items()}


METHODS: dict[str, tuple[dict[str, Any], int, int | None, bool, Pack]] = {
    "gptq": (gptq_config(4, 32, sym=True), 4, 32, True, lambda n: gptq(n, 4)),
    "awq": (awq_config(32), 4, 32, False, awq),
    "compressed-tensors": (
        compressed_config("pack-quantized", 8, None, is_symmetric=True),
        8,
        None,
        True,
        lambda n: pack_quantized(n, 8, is_symmetric=True),
    ),
}
SIZES = {"hidden_size": 64, "intermediate_size": 96}


def write_quantized(folder: Path, method: str, **changes: Any) -> dict[str, np.ndarray]:
    """A tiny model with all products of its layers so quantized, but one that stays; the same in
    floats.
    """
    config, bits, size, is_symmetric, pack = METHODS[method]
    changes = SIZES | changes
    write_checkpoint(folder, quantization_config=config, **changes)
    tensors, floats = dict[str, np.ndarray](), tiny_tensors(tiny_config(**changes))
    for number, (name, tensor) in enumerate(floats.items()):
        product = name.removesuffix(".weight")
        stays = "layers.0.self_attn.o_proj" in name or name.endswith(".gate.weight")
        if tensor.ndim == 1 or "layers" not in name or stays:
            tensors[name] = tensor
            continue
        shape = (tensor.shape[0], tensor.shape[1])
        numbers = random_numbers(shape, bits, size, is_symmetric=is_symmetric, seed=number)
        tensors |= named(pack(numbers), product)
        floats[name] = numbers.values
    save_file(tensors, folder / "model.safetensors")
    return floats

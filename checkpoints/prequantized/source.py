"""A folder that another tool has quantized, as a `TensorSource` with our parts of each product.

Read some rows at a time; the values are those of the tool's own formula in float32, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.formats import CONFIG_KEY, METHOD, Quantization, WeightFormat, packed_group
from checkpoints.prequantized.awq import AWQ
from checkpoints.prequantized.compressed_tensors import CompressedTensors
from checkpoints.prequantized.gptq import GPTQ
from checkpoints.prequantized.product import Method, PackedProduct, Tensors
from checkpoints.qtensor import pack_int4
from checkpoints.source import TensorInfo, TensorSource

METHODS: dict[str, Callable[[Mapping[str, Any], str], Method]] = {
    "gptq": GPTQ.of,
    "awq": AWQ.of,
    "compressed-tensors": CompressedTensors.of,
}
LAYERS = "model.layers."


def method_of(config: Mapping[str, Any]) -> str | None:
    """The quant_method of config.json, if it is of another tool."""
    found = config.get(CONFIG_KEY)
    if not isinstance(found, Mapping) or found.get("quant_method") == METHOD:
        return None
    return str(found.get("quant_method"))


class ConvertedSource:
    """Our parts (q, scale, zero) in place of another tool's; all else is the other source's.

    Args:
        config: of the folder; its quantization_config is of another tool.
    Attributes:
        kept: the format of products whose inputs are in their order.

    Raises: CheckpointError for a method that is not read, and for parts that do not fit together.
    """

    def __init__(self, source: TensorSource, config: Mapping[str, Any], file: str) -> None:
        name = method_of(config)
        make = METHODS.get(name or "")
        if make is None:
            raise CheckpointError(
                f"{file}: expected {CONFIG_KEY} of quant_method {METHOD}, {', '.join(METHODS)}, "
                f"found {name!r:.60}; give the model that it was made from"
            )
        self._source, self._file = source, file
        method = make(config[CONFIG_KEY], file)
        parts, kept = _by_product(source, method.marks)
        self._infos = {name: source.info(name) for name in kept}
        self._products: dict[str, PackedProduct] = {}
        for product, infos in parts.items():
            found = method.product(Tensors(source, product, infos, file))
            self._products[product] = found
            self._infos |= _infos(product, found)
        if not self._products:
            raise CheckpointError(f"{file}: expected products quantized by {name}, found none")
        self.kept = method.kept

    def names(self) -> Sequence[str]:
        return list(self._infos)

    def info(self, name: str) -> TensorInfo:
        info = self._infos.get(name)
        if info is None:
            raise CheckpointError(f"{self._file}: expected a tensor {name!r}, found none")
        return info

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> np.ndarray:
        self.info(name)
        product_name, _, part = name.rpartition(".")
        product = self._products.get(product_name)
        if product is None or part not in ("q", "scale", "zero", "order"):
            return self._source.read(name, slices)
        if part == "order":
            assert product.order is not None
            return product.order[slices or ()]
        first, second = (*(slices or ()), slice(None), slice(None))[:2]
        if part == "q":
            q = product.q(first)
            kept = product.kept
            q = pack_int4(q, kept.group_size) if kept.bits == 4 else np.ascontiguousarray(q)
            return q[:, second]
        values = product.scale(second) if part == "scale" else product.zero(second)
        return np.ascontiguousarray(values[first])

    def close(self) -> None:
        self._source.close()


def converted_config(
    config: Mapping[str, Any], source: TensorSource, kept: WeightFormat
) -> dict[str, Any]:
    """The config.json that our own checkpoint of these tensors would have.

    Args:
        source: with the names that models here have.
        kept: the format of products, but for those that are floats or have an order of their own.
    """
    others: dict[str, WeightFormat | None] = {}
    for name in source.names():
        product, _, part = name.removeprefix("model.").rpartition(".")
        if not name.startswith(LAYERS):
            continue
        if part == "weight" and len(source.info(name).shape) == 2:
            others[product] = None
        elif part == "order":
            others[product] = replace(kept, has_order=True)
    quantization = Quantization(kept, None, tuple(sorted(others.items())))
    return {**config, CONFIG_KEY: quantization.to_config()}


def _by_product(
    source: TensorSource, marks: tuple[str, ...]
) -> tuple[dict[str, dict[str, TensorInfo]], list[str]]:
    """The parts of each quantized product, and the names of all other tensors."""
    found: dict[str, dict[str, TensorInfo]] = {}
    for name in source.names():
        product, _, part = name.rpartition(".")
        if part in marks:
            found.setdefault(product, {})[part] = source.info(name)
    kept = list[str]()
    for name in source.names():
        product, _, part = name.rpartition(".")
        if product in found and part == "weight":  # integers that are not packed
            found[product][part] = source.info(name)
        elif not (product in found and part in marks):
            kept.append(name)
    return found, kept


def _infos(name: str, product: PackedProduct) -> dict[str, TensorInfo]:
    num_outputs, num_inputs = product.shape
    kept = product.kept
    groups = kept.groups(num_inputs)
    width = num_inputs
    if kept.bits == 4:
        width = groups * packed_group(kept.group_size, num_inputs) // 2
    parts: dict[str, tuple[tuple[int, ...], Any]] = {
        "q": ((num_outputs, width), np.int8),
        "scale": ((groups, num_outputs), np.float32),
    }
    if kept.has_zero:
        parts["zero"] = ((groups, num_outputs), np.int8)
    if kept.has_order:
        parts["order"] = ((num_inputs,), np.int32)
    return {
        f"{name}.{part}": TensorInfo(
            f"{name}.{part}", shape, np.dtype(dtype), math.prod(shape) * np.dtype(dtype).itemsize
        )
        for part, (shape, dtype) in parts.items()
    }

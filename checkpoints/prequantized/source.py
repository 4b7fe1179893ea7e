"""A folder that another tool has quantized, as a `TensorSource` with our parts of each product.

Read some rows at a time; the values are those of the tool's own formula in float32, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.formats import CONFIG_KEY, METHOD, Quantization, WeightFormat
from checkpoints.load_product import PART_DTYPES, ProductSpec
from checkpoints.prequantized.awq import AWQ
from checkpoints.prequantized.compressed_tensors import CompressedTensors
from checkpoints.prequantized.gptq import GPTQ
from checkpoints.prequantized.product import Method, PackedProduct, Tensors
from checkpoints.qtensor import pack_int4
from checkpoints.source import DerivedSource, TensorInfo, TensorSource

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


class ConvertedSource(DerivedSource):
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
        method = make(config[CONFIG_KEY], file)
        parts, kept = _by_product(source, method.marks)
        all_infos = {name: source.info(name) for name in kept}
        super().__init__(source, all_infos, file)
        self._products: dict[str, PackedProduct] = {}
        for product, infos in parts.items():
            found = method.product(Tensors(source, product, infos, file))
            self._products[product] = found
            all_infos |= _infos(product, found)
        if not self._products:
            raise CheckpointError(f"{file}: expected products quantized by {name}, found none")
        self.kept = method.kept

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
    """Of our parts, as the loader expects them."""
    shapes = ProductSpec((), (name,), product.shape, product.kept).part_shapes()
    found: dict[str, TensorInfo] = {}
    for part, shape in shapes.items():
        full, dtype = f"{name}.{part}", np.dtype(PART_DTYPES[part])
        found[full] = TensorInfo(full, shape, dtype, math.prod(shape) * dtype.itemsize)
    return found

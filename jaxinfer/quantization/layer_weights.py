"""The parameters of one layer on the host, float and quantized, while it is being quantized."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from checkpoints.qtensor import QTensor
from jaxinfer.quantization.sites import Fold, KeyRows, Site
from jaxinfer.quantization.tensors import leaves

Floats = npt.NDArray[np.float32]


class LayerWeights:
    """What the layer computes with is always `params`: those that are quantized, dequantized."""

    def __init__(self, params: dict[str, Any]):
        """Of a nested dict of float32 arrays on the host, which is taken over."""
        self.params = params
        self._quantized: dict[str, QTensor] = {}
        self.x_scales: dict[str, float] = {}  # static, by the site's name

    def has(self, product: str) -> bool:
        """Whether the layer has such a product."""
        found: Any = self.params
        for part in product.split("."):
            found = found.get(part, {})
        return "weight" in found

    def weight(self, product: str) -> Floats:
        """float32[N, K]."""
        return self._module(product)["weight"]

    def product_of(self, product: str, rows: Floats) -> Floats:
        """float32[T, K] -> float32[T, N], with the bias."""
        bias = self._module(product).get("bias", np.float32(0))
        return rows @ self.weight(product).T + bias

    def quantize(self, product: str, quantized: QTensor) -> None:
        """From now on the product is this."""
        self._quantized[product] = quantized
        self._module(product)["weight"] = quantized.dequantized()

    def scale_channels(self, site: Site, scales: Floats, folded: Floats) -> None:
        """The site's inputs become their quotients by scales float32[K], with the same outputs.

        Args:
            folded: the scales by channel of what makes the inputs.
        """
        assert site.fold is not None
        for product in site.products:
            self._module(product)["weight"] = self.weight(product) * scales
        self._divide(site.fold, folded)

    def _divide(self, fold: Fold, scales: Floats) -> None:
        if fold.form == "rows":
            self._multiply_rows(fold.module, np.reciprocal(scales))
            return
        one = np.float32(fold.form == "norm_plus_one")
        module = self._module(fold.module)
        module["weight"] = (module["weight"] + one) / scales - one

    def scale_keys(self, rows: KeyRows, scales: Floats) -> None:
        """Keys are divided by scales float32[K, D], the queries that meet them multiplied."""
        num_queries = len(self.weight(rows.queries)) // scales.shape[1]
        shared = num_queries // len(scales)
        self._multiply_rows(rows.keys, np.reciprocal(scales.reshape(-1)))
        self._multiply_rows(rows.queries, np.repeat(scales, shared, axis=0).reshape(-1))

    def tensors(self, sites: Sequence[Site]) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """What a file holds, by dotted name in the layer."""
        for name, array in leaves(self.params):
            product, _, part = name.rpartition(".")
            if part != "weight" or product not in self._quantized:
                yield name, array
        for product, quantized in self._quantized.items():
            for part, array in quantized.parts().items():
                yield f"{product}.{part}", array
        for site in sites:
            if site.name in self.x_scales:
                x_scale = np.array(self.x_scales[site.name], np.float32)
                yield from ((f"{product}.x_scale", x_scale) for product in site.products)

    def _multiply_rows(self, product: str, factors: Floats) -> None:
        """Exact for a quantized product too: a row's factor goes into its scales."""
        module = self._module(product)
        quantized = self._quantized.get(product)
        if quantized is None:
            module["weight"] = module["weight"] * factors[:, None]
        else:
            self._quantized[product] = replace(quantized, scale=quantized.scale * factors[None, :])
            module["weight"] = self._quantized[product].dequantized()
        if "bias" in module:
            module["bias"] = module["bias"] * factors

    def _module(self, name: str) -> dict[str, Floats]:
        found: Any = self.params
        for part in name.split("."):
            found = found[part]
        return found

"""One layer after another, site by site: scale channels, round products, hand on what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from checkpoints.certificate import LayerError
from checkpoints.channel_scaling import search_scales
from checkpoints.formats import WeightFormat
from checkpoints.qtensor import QTensor
from checkpoints.rounding import round_to_nearest
from jaxinfer.errors import EngineFailure
from jaxinfer.models.decoder import Decoder
from jaxinfer.quantization.activation_scales import static_scale
from jaxinfer.quantization.calibration_check import Criteria, check_enough, covered_share
from jaxinfer.quantization.calibration_set import CalibrationSet
from jaxinfer.quantization.key_scales import key_scales
from jaxinfer.quantization.layer_inputs import LayerInputs, SiteInputs
from jaxinfer.quantization.layer_weights import LayerWeights
from jaxinfer.quantization.methods import relative_error, rounded
from jaxinfer.quantization.outliers import Outliers, outliers_of
from jaxinfer.quantization.recipe import Recipe
from jaxinfer.quantization.sites import LayerSites, Site

Floats = npt.NDArray[np.float32]


class LayerQuantizer:
    """Gathers what is to be told of all layers: errors, outliers, and formats that differ."""

    def __init__(
        self,
        recipe: Recipe,
        calibration: CalibrationSet,
        sites: LayerSites,
        inputs: LayerInputs,
        decoder: Decoder,
        seed: int,
    ):
        self._recipe, self._calibration, self._sites = recipe, calibration, sites
        self._inputs, self._config, self._seed = inputs, decoder.config, seed
        self.errors = list[LayerError]()
        self.outliers = list[Outliers]()
        self.exceptions = dict[str, WeightFormat | None]()

    def products(
        self, index: int, kind: int, layer: LayerWeights, hidden: Sequence[Floats]
    ) -> Iterator[str]:
        """Quantizes the layer's products in place; gives each one's name when it is done.

        Args:
            hidden: what the layer takes, by window.
        Raises: NotEnoughCalibration if static scales are asked for and ranges do not hold;
            EngineFailure for inputs that are not finite.
        """
        for site in self._sites.sites:
            found = self._inputs.inputs(layer.params, hidden, layer.x_scales, kind=kind, site=site)
            self._look_at(f"layers.{index}.{site.name}", found)
            found = self._scaled(layer, site, found)
            if self._recipe.weights.activations == "int8_static":
                layer.x_scales[site.name] = self._static_scale(layer, site, found)
            keys = self._sites.key_rows
            if self._recipe.migrate_keys and keys and keys.keys in site.products:
                self._scale_keys(layer, found)
            for product in site.products:
                self._round(f"layers.{index}.{product}", layer, product, found)
                yield f"layers.{index}.{product}"
        for product in filter(layer.has, self._sites.unseen):
            self._keep(f"layers.{index}.{product}", layer, product, round_to_nearest, None)
            yield f"layers.{index}.{product}"

    def _look_at(self, name: str, found: SiteInputs) -> None:
        if not np.isfinite(found.all_largest).all():
            raise EngineFailure(
                f"{name} takes NaN or infinite inputs on calibration set {self._calibration.name}: "
                "the model overflows in float32 or is damaged; nothing can be learned from them"
            )
        self.outliers.append(outliers_of(name, found.all_largest))
        if self._recipe.weights.activations != "int8_static":
            return
        share = covered_share(found.largest, found.held_largest, factor=Criteria().range_factor)
        check_enough(self._calibration, {name: share})

    def _scaled(self, layer: LayerWeights, site: Site, found: SiteInputs) -> SiteInputs:
        if not self._recipe.migrate or site.fold is None:
            return found
        config = self._config
        shared = config.num_attention_heads // config.num_key_value_heads
        scales = search_scales(
            [layer.weight(product) for product in site.products],
            found.rows,
            self._recipe.weights,
            tied=shared if site.is_by_heads else 1,
            head_dim=config.head_dim,
        ).scales
        by_kv_head = (
            scales.reshape(-1, shared, config.head_dim)[:, 0] if site.is_by_heads else scales
        )
        layer.scale_channels(site, scales, by_kv_head.reshape(-1))
        return found.scaled(scales)

    def _static_scale(self, layer: LayerWeights, site: Site, found: SiteInputs) -> float:
        energy = sum(np.square(layer.weight(product)).sum(axis=0) for product in site.products)
        return static_scale(found.rows, float(found.all_largest.max()), np.asarray(energy))

    def _scale_keys(self, layer: LayerWeights, found: SiteInputs) -> None:
        keys = self._sites.key_rows
        assert keys is not None
        queries, own = (
            layer.product_of(product, found.rows).reshape(
                len(found.rows), -1, self._config.head_dim
            )
            for product in (keys.queries, keys.keys)
        )
        layer.scale_keys(keys, key_scales(queries, own))

    def _round(self, name: str, layer: LayerWeights, product: str, found: SiteInputs) -> None:
        method, seed = self._recipe.method, self._seed

        def by_method(weight: Floats, kept: WeightFormat) -> QTensor:
            return rounded(weight, found, kept, method, seed=seed)

        self._keep(name, layer, product, by_method, found.all_hessian)

    def _keep(
        self,
        name: str,
        layer: LayerWeights,
        product: str,
        make: Callable[[Floats, WeightFormat], QTensor],
        hessian: Floats | None,
    ) -> None:
        recipe, weight = self._recipe, layer.weight(product)
        kept = recipe.weights
        quantized = make(weight, kept)
        error = relative_error(weight, quantized, hessian)
        if recipe.keep_at_8_bits is not None and error > recipe.keep_at_8_bits:
            kept = self.exceptions[name] = recipe.spared
            quantized = make(weight, kept)
            error = relative_error(weight, quantized, hessian)
        nearest = round_to_nearest(weight, kept, search_clip=False)
        self.errors.append(
            LayerError(name, kept.name, error, relative_error(weight, nearest, hessian))
        )
        layer.quantize(product, quantized)

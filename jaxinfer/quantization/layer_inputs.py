"""One layer over all windows: what its products take in, and what it gives to the next.

The layer is the model's own, in float; int8 activations are rounded as a server rounds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from checkpoints.formats import Activations
from jaxinfer.models.attention import DenseKV
from jaxinfer.models.decoder import Decoder
from jaxinfer.quantization.sites import Site
from jaxinfer.quantization.windows import Window
from jaxinfer.runtime.steps import Params
from pallas_kernels.integer_matmul import terms_of

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SiteInputs:
    """Of one site. Every eighth sample is held, so that what was learned can be checked."""

    hessian: Floats  # [K, K]: x.T @ x / tokens of what is not held
    held_hessian: Floats  # the same of what is held; zeros of nothing
    held_share: float  # of the tokens
    largest: Floats  # [K]: magnitudes of what is not held
    held_largest: Floats
    rows: Floats  # [R, K]: some of all

    @property
    def all_hessian(self) -> Floats:
        more = self.held_hessian - self.hessian
        return np.asarray(self.hessian + more * self.held_share, np.float32)

    @property
    def all_largest(self) -> Floats:
        return np.maximum(self.largest, self.held_largest)

    def scaled(self, scales: Floats) -> SiteInputs:
        """The same with channels divided by scales."""
        both = np.outer(scales, scales)
        return replace(
            self,
            hessian=self.hessian / both,
            held_hessian=self.held_hessian / both,
            largest=self.largest / scales,
            held_largest=self.held_largest / scales,
            rows=self.rows / scales,
        )


class LayerInputs:
    """Compiles a program per length of window, and for inputs per site.

    Args:
        sites: of each layer.
        activations: how a served product rounds its inputs.
    """

    def __init__(
        self,
        decoder: Decoder,
        sites: Sequence[Site],
        activations: Activations,
        windows: Sequence[Window],
    ):
        self._decoder, self._sites, self._activations = decoder, sites, activations
        self._windows = windows
        self._begin = jax.jit(self._traced_begin)
        self._output = jax.jit(self._traced_output, static_argnames="kind")
        self._add = jax.jit(self._traced_add, static_argnames=("kind", "site"))
        self._ropes: dict[int, Any] = {}

    def begin(self, top: Params) -> list[Floats]:
        """What the first layer takes, by window: float32[T, E]."""
        return [self._first(top, window) for window in self._windows]

    def outputs(
        self, params: Params, hidden: Sequence[Floats], x_scales: Mapping[str, float], *, kind: int
    ) -> list[Floats]:
        """What the layer gives of what it takes."""
        scales = self._all_scales(x_scales)
        run = partial(self._output, params, x_scales=scales, kind=kind)
        return [np.asarray(run(x, self._ropes[len(x)])) for x in hidden]

    def inputs(
        self,
        params: Params,
        hidden: Sequence[Floats],
        x_scales: Mapping[str, float],
        *,
        kind: int,
        site: Site,
    ) -> SiteInputs:
        """What the layer's products at `site` take, as float, of what the layer takes."""
        width = self._width(params, site)
        zeros = jnp.zeros((2, width, width)), jnp.zeros((2, width))
        add = partial(self._add, params, x_scales=self._all_scales(x_scales), kind=kind, site=site)
        sums, rows = zeros, list[Floats]()
        for window, x in zip(self._windows, hidden, strict=True):
            place = np.int32(window.is_held), np.int32(window.num_tokens)
            sums, found = add(x, self._ropes[len(x)], sums, place)
            rows.append(np.asarray(found)[window.rows])
        return self._joined(sums, rows)

    def _first(self, top: Params, window: Window) -> Floats:
        x, rope = self._begin(top, window.token_ids)
        self._ropes.setdefault(len(window.token_ids), rope)
        return np.asarray(x)

    def _joined(self, sums: Any, rows: list[Floats]) -> SiteInputs:
        products, largest = (np.asarray(part) for part in sums)
        held = sum(window.num_tokens for window in self._windows if window.is_held)
        total = sum(window.num_tokens for window in self._windows)
        return SiteInputs(
            hessian=products[0] / np.float32(max(1, total - held)),
            held_hessian=products[1] / np.float32(max(1, held)),
            held_share=held / total,
            largest=largest[0],
            held_largest=largest[1],
            rows=np.concatenate(rows),
        )

    def _all_scales(self, x_scales: Mapping[str, float]) -> dict[str, Any]:
        """By site, so that one program serves all; those that aren't known yet are not used."""
        return {site.name: np.float32(x_scales.get(site.name, 1)) for site in self._sites}

    def _width(self, params: Params, site: Site) -> int:
        found: Any = params
        for part in site.name.split("."):
            found = found[part]
        return found["weight"].shape[1]

    def _traced_begin(self, top: Params, token_ids: jax.Array) -> tuple[jax.Array, Any]:
        positions = jnp.arange(len(token_ids), dtype=jnp.int32)
        return self._decoder.bind_top(top).begin(token_ids, positions)

    def _traced_output(
        self, params: Params, x: jax.Array, rope: Any, *, x_scales: Mapping[str, Any], kind: int
    ) -> jax.Array:
        return self._run(params, x, rope, x_scales, kind)[0]

    def _traced_add(
        self,
        params: Params,
        x: jax.Array,
        rope: Any,
        sums: tuple[jax.Array, jax.Array],
        place: tuple[jax.Array, jax.Array],
        *,
        x_scales: Mapping[str, Any],
        kind: int,
        site: Site,
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """Sums of both parts with this window's added; and the inputs float32[T, K]."""
        (products, largest), (part, num_tokens) = sums, place
        found = self._run(params, x, rope, x_scales, kind)[1][site.name]
        real = jnp.where(jnp.arange(len(found))[:, None] < num_tokens, found, 0)
        product = jnp.matmul(real.T, real, precision="highest")
        reach = jnp.abs(real).max(axis=0)
        return (products.at[part].add(product), largest.at[part].max(reach)), found

    def _run(
        self, params: Params, x: jax.Array, rope: Any, x_scales: Mapping[str, Any], kind: int
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The layer's output, and the inputs by site."""
        layer, seen = self._decoder.bind_layer(params, kind), dict[str, jax.Array]()
        for site in self._sites:
            served = partial(self._served, x_scale=x_scales[site.name])
            for product in site.products:
                _watch(layer, product, partial(_note, seen, site.name, served))
        return layer(x, rope, DenseKV(self._decoder.config)), seen

    def _served(self, x: jax.Array, *, x_scale: jax.Array) -> jax.Array:
        if self._activations == "float":
            return x
        terms, scale = terms_of(x, 1, x_scale if self._activations == "int8_static" else None)
        return terms.astype(x.dtype) * scale[:, None]


def _note(
    seen: dict[str, jax.Array], name: str, served: Callable[[jax.Array], jax.Array], x: jax.Array
) -> jax.Array:
    seen[name] = x
    return served(x)


def _watch(layer: Any, product: str, on_input: Callable[[jax.Array], jax.Array]) -> None:
    """The product takes what `on_input` makes of its input; for use while tracing."""
    *parents, name = product.split(".")
    module = layer
    for parent in parents:
        module = getattr(module, parent)
    own = getattr(module, name)
    setattr(module, name, lambda x: own(on_input(x)))

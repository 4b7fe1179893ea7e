"""Products of a mixture of experts, in each format of weights: tokens choose their experts at
random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.case import Arrays, Case, Check, Operands, kernel_forms
from bench.kernels.costs import Cost, expert_cost
from bench.kernels.products import Product, products
from bench.kernels.random_arrays import normal
from bench.kernels.sizes import Mixture, Sizes
from jaxinfer.models.expert_layout import ExpertLayout, block_rows, lay_out
from pallas_kernels.backend import Backend
from pallas_kernels.expert_blocks import over_blocks
from pallas_kernels.expert_matmul_gpu import expert_int4_matmul, expert_int8_matmul, expert_matmul

LEAST_ROWS = 8  # of a block


@dataclass(frozen=True, slots=True)
class ExpertProduct:
    """The same product of one weight, and what a mixture of it is."""

    one: Product
    kernel: Callable[..., jax.Array]  # (x, *weight, experts, num_blocks)
    bits: int
    group: int | None = None

    def run(self, mixture: Mixture, *operands: jax.Array, backend: Backend) -> jax.Array:
        """(x, *weight, experts, num_blocks) -> bfloat16[B*R, out]."""
        x, *weight, experts, num_blocks = operands
        options: dict[str, Any] = {"num_experts": mixture.count, "out_dtype": jnp.bfloat16}
        if backend.form == "reference":
            parts = list(zip(weight, (0, 1), strict=False))  # the axes of outputs
            return over_blocks(self.one.run, x, parts, experts, num_blocks, **options)
        return self.kernel(x, *weight, experts, num_blocks, backend=backend, **options)


def kinds(group: int) -> Iterator[ExpertProduct]:
    """`group` elements of a row share a scale."""
    by_name = {product.name: product for product in products(group)}
    yield ExpertProduct(by_name["bf16"], expert_matmul, 16)
    for name, kernel, bits in (
        ("int8", expert_int8_matmul, 8),
        ("int4", expert_int4_matmul, 4),
    ):
        yield ExpertProduct(by_name[f"{name} g{group}"], partial(_symmetric, kernel), bits, group)


def cases(sizes: Sizes) -> Iterator[Case]:
    """Into the experts: gate and up are alike, and down is the same turned round."""
    mixture = sizes.mixture
    for kind in kinds(sizes.group):
        for tokens in (*sizes.rows, *sizes.chunks):
            yield Case(
                f"experts {kind.one.name}, {tokens} tokens",
                _cost(kind, mixture, tokens),
                partial(_operands, kind, mixture, tokens),
                kernel_forms(partial(kind.run, mixture)),
            )


def checks(sizes: Sizes, backend: Backend) -> Iterator[Check]:
    """What a token gets of its experts, one after the other."""
    mixture, most = sizes.mixture, sizes.checked[-1]
    chosen, x = _chosen(mixture, most), normal(0, (most, mixture.dim), jnp.bfloat16)
    for kind in kinds(sizes.group):
        weight = cache(partial(kind.one.weight, 0, mixture.weight))
        run = jax.jit(partial(_outputs, kind, mixture, backend))

        def rows(number: int, run: Any = run, weight: Any = weight) -> np.ndarray:
            return np.asarray(run(x[:number], weight(), chosen[:number]))

        def expected(kind: ExpertProduct = kind, weight: Any = weight) -> np.ndarray:
            wide = kind.one.wide(weight()).reshape(mixture.count, mixture.hidden_dim, -1)
            of_all = np.einsum("te,xfe->txf", np.asarray(x, np.float64), wide)
            return np.take_along_axis(of_all, chosen[:, :, None], 1).reshape(most, -1)

        yield Check(f"experts {kind.one.name}", rows, expected, bound=5e-3)


def _outputs(
    kind: ExpertProduct,
    mixture: Mixture,
    backend: Backend,
    x: jax.Array,
    weight: Arrays,
    chosen: jax.Array,
) -> jax.Array:
    """bfloat16[T, in], the experts int32[T, k] of each token -> [T, k * out]."""
    layout = _layout(mixture, chosen)
    rows = x.at[layout.token_of].get(mode="fill", fill_value=0)
    blocks = layout.experts, layout.num_blocks
    out = kind.run(mixture, rows, *weight, *blocks, backend=backend)
    return out[layout.row_of].reshape(len(x), -1)


def _symmetric(kernel: Callable[..., jax.Array], *operands: jax.Array, **options: Any) -> jax.Array:
    """Without zero points."""
    x, q, scale, *blocks = operands
    return kernel(x, q, scale, None, *blocks, **options)


def _chosen(mixture: Mixture, tokens: int) -> np.ndarray:
    """int32[tokens, per_token]."""
    rng = np.random.default_rng(0)
    order = rng.random((tokens, mixture.count)).argsort(axis=1)
    return order[:, : mixture.per_token].astype(np.int32)


def _layout(mixture: Mixture, chosen: Any) -> ExpertLayout:
    rows = block_rows(len(chosen), mixture.per_token, mixture.count, least=LEAST_ROWS)
    return lay_out(jnp.asarray(chosen), None, num_experts=mixture.count, rows=rows)


def _operands(kind: ExpertProduct, mixture: Mixture, tokens: int, number: int) -> Operands:
    layout = _layout(mixture, _chosen(mixture, tokens))
    x = normal(number, (len(layout.token_of), mixture.dim), jnp.bfloat16)
    weight = kind.one.weight(number, mixture.weight)
    return Operands((), (x, *weight, layout.experts, layout.num_blocks))


def _cost(kind: ExpertProduct, mixture: Mixture, tokens: int) -> Cost:
    chosen = _chosen(mixture, tokens)
    return expert_cost(
        chosen.size,
        len(np.unique(chosen)),
        mixture.dim,
        mixture.hidden_dim,
        weight_bits=kind.bits,
        group=kind.group,
    )

"""Products of a mixture of experts by the GPU's kernels, in the format that the weights are kept in
(as quantized_product.py does for other products).
"""

from __future__ import annotations

from typing import Any

import jax
from jax.typing import DTypeLike

from jaxinfer.models.expert_layout import ExpertLayout
from jaxinfer.models.layers import Linear, QuantizedLinear
from pallas_kernels.expert_matmul_gpu import (
    expert_int4_matmul,
    expert_int8_matmul,
    expert_matmul,
    expert_w8a8_matmul,
)
from pallas_kernels.w8a8_matmul import quantize_rows


def kernel_product(
    product: Linear | QuantizedLinear,
    x: jax.Array,
    layout: ExpertLayout,
    *,
    num_experts: int,
    out_dtype: DTypeLike,
) -> jax.Array:
    """float[B * R, in] -> out_dtype[B * R, out], each block by its own expert."""
    options: dict[str, Any] = {
        "num_experts": num_experts,
        "out_dtype": out_dtype,
        "backend": product.backend,
    }
    blocks = layout.experts, layout.num_blocks
    if isinstance(product, Linear):
        return expert_matmul(x, product.weight[...], *blocks, **options)
    q, scale = product.q[...], product.scale[...]
    if product.kept.activations != "float":
        x_scale = None if product.x_scale is None else product.x_scale[...]
        xq, row_scale = quantize_rows(x, x_scale)
        return expert_w8a8_matmul(xq, row_scale, q, scale[0], *blocks, **options)
    zero = None if product.zero is None else product.zero[...]
    matmul = expert_int4_matmul if product.kept.bits == 4 else expert_int8_matmul
    return matmul(x, q, scale, zero, *blocks, **options)

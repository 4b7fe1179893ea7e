"""One-byte arrays between 2 and 4 GiB are refused; nothing is allocated here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.addressing import check_addressable


def shaped(size: int, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct((size,), dtype)


@pytest.mark.parametrize("size", [1, 2**31 - 1, 2**32 + 1, 2**33])
def test_a_one_byte_array_below_2_and_above_4_gib_is_taken(size: int):
    check_addressable(k_pages=shaped(size, jnp.int8))


@pytest.mark.parametrize("size", [2**31, 3 * 2**30, 2**32])
def test_a_one_byte_array_in_between_is_refused_by_name(size: int):
    with pytest.raises(ValueError, match=rf"v_pages must have .* got \({size},\), {size} bytes"):
        check_addressable(k_pages=shaped(1, jnp.int8), v_pages=shaped(size, jnp.int8))


def test_wider_elements_are_taken_at_any_size():
    check_addressable(w=shaped(3 * 2**30, jnp.bfloat16), x=shaped(2**31, jnp.float32))

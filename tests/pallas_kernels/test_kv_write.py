"""Writing a step's keys and values: the kernels are interpreted; float64 judges what is int8."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import REFERENCE, Backend
from pallas_kernels.kv_write import LEAST_SCALE, quantize, write_kv, write_quantized_kv

INTERPRET = Backend("interpret")
P, S = 7, 16

written = jax.jit(write_kv, static_argnames="backend")
written_int8 = jax.jit(write_quantized_kv, static_argnames="backend")
quantized = jax.jit(quantize)


def new_tokens(tokens: int, heads: int, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Keys and values; their heads have very different sizes."""
    rng = np.random.default_rng(tokens)
    size = 10 ** rng.uniform(-3, 3, (2, tokens, heads, 1))
    k, v = jnp.asarray(rng.normal(size=(2, tokens, heads, head_dim)) * size, jnp.bfloat16)
    return k, v


def places(tokens: int) -> tuple[jax.Array, jax.Array]:
    """A page and slot for each token; every fourth one is padding, in a slot of a real one."""
    chosen = np.random.default_rng(1).permutation(P * S)[:tokens]
    page, slot = chosen // S, chosen % S
    page[::4], slot[::4] = P, slot[:1]
    return jnp.asarray(page, jnp.int32), jnp.asarray(slot, jnp.int32)


def pools(heads: int, head_dim: int, dtype: Any) -> tuple[jax.Array, ...]:
    """Full of old numbers; int8 ones with their scales."""
    rng = np.random.default_rng(2)
    old = rng.integers(-127, 128, size=(2, P, heads, S, head_dim))
    pages = tuple(jnp.asarray(old, dtype))
    if dtype != jnp.int8:
        return pages
    return *pages, *jnp.asarray(rng.random((2, P, heads, S)), jnp.float32)


def assert_same(got: Any, want: Any) -> None:
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 64), (3, 80)])
def test_each_token_is_at_its_place_and_nothing_else_changes(heads: int, head_dim: int):
    k, v = new_tokens(13, heads, head_dim)
    page, slot = places(13)
    old = pools(heads, head_dim, jnp.bfloat16)
    want = [np.array(pool) for pool in old]
    for token in range(13):
        if page[token] < P:
            for pool, new in zip(want, (k, v), strict=True):
                pool[page[token], :, slot[token]] = new[token]
    for backend in (REFERENCE, INTERPRET):
        assert_same(written(k, v, *old, page, slot, backend=backend), want)


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 256), (3, 96)])
def test_both_forms_write_the_same_int8_and_scales(heads: int, head_dim: int):
    k, v = new_tokens(13, heads, head_dim)
    page, slot = places(13)
    old = pools(heads, head_dim, jnp.int8)
    want = [np.array(pool) for pool in old]
    for token in range(13):
        if page[token] < P:
            for i, new in enumerate((k, v)):
                q, scale = quantized(new[token])
                want[i][page[token], :, slot[token]] = q
                want[i + 2][page[token], :, slot[token]] = scale[:, 0]
    for backend in (REFERENCE, INTERPRET):
        assert_same(written_int8(k, v, *old, page, slot, backend=backend), want)


def test_a_step_of_padding_writes_nothing():
    k, v = new_tokens(4, 2, 64)
    page, slot = jnp.full(4, P, jnp.int32), jnp.zeros(4, jnp.int32)
    for backend in (REFERENCE, INTERPRET):
        old = pools(2, 64, jnp.int8)
        assert_same(written_int8(k, v, *old, page, slot, backend=backend), old)
        old = pools(2, 64, jnp.bfloat16)
        assert_same(written(k, v, *old, page, slot, backend=backend), old)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_quantized_numbers_are_the_nearest_half_to_even(dtype: Any):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(400, 96)) * 10 ** rng.uniform(-20, 20, (400, 1))
    x = jnp.asarray(x, dtype)
    q, scale = (np.asarray(part, np.float64) for part in quantized(x))
    wide = np.asarray(x, np.float64)
    largest = np.abs(wide).max(axis=1, keepdims=True)
    np.testing.assert_array_equal(q, np.rint(wide / scale))
    assert (scale <= largest / 127 * (1 + 1e-7)).all()
    assert (scale >= largest / 127 * (1 - 2**-13)).all()
    assert np.abs(q).max() == 127


def test_ties_go_to_the_even_number_whatever_the_division_says():
    """The largest is a little more than 127 scales, of which the cut leaves exactly this scale."""
    scale = 25_741 * 2.0**-30  # 15 bits, and no power of two: its reciprocal is not exact
    largest = 127 * scale * (1 + 2.0**-17)
    ties = (np.arange(-127, 127) + 0.5) * scale
    x = np.append(ties, largest)
    q, got = quantized(jnp.asarray(x[None, :], jnp.float32))
    assert float(got[0, 0]) == scale
    assert np.asarray(q)[0].tolist() == [*np.rint(ties / scale), 127]


def test_a_head_of_zeros_is_exactly_zero_and_so_is_a_very_small_one():
    x = jnp.asarray([[0.0, 0.0], [127 * LEAST_SCALE / 2, 0.0], [-4 * 127 * LEAST_SCALE, 0.0]])
    q, scale = quantized(x)
    assert np.asarray(q).tolist() == [[0, 0], [0, 0], [-127, 0]]
    assert np.asarray(scale)[:2].tolist() == [[0], [0]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite_stays_so_and_spoils_no_other(bad: float):
    k, v = new_tokens(6, 2, 64)
    page, slot = jnp.arange(6, dtype=jnp.int32), jnp.zeros(6, jnp.int32)
    old = pools(2, 64, jnp.int8)
    want = written_int8(k, v, *old, page, slot, backend=INTERPRET)
    got = written_int8(k.at[3, 1, 5].set(bad), v, *old, page, slot, backend=INTERPRET)
    keys, scales = np.array(got[0]), np.array(got[2])
    assert scales[3, 1, 0] == np.inf
    assert not keys[3, 1, 0].any()
    keys[3, 1, 0], scales[3, 1, 0] = np.asarray(want[0])[3, 1, 0], np.asarray(want[2])[3, 1, 0]
    assert_same((keys, got[1], scales, got[3]), want)


@pytest.mark.parametrize("backend", [REFERENCE, INTERPRET], ids=lambda backend: backend.form)
def test_bits_of_a_token_do_not_depend_on_the_number_of_tokens(backend: Backend):
    rng = np.random.default_rng(5)
    k = jnp.asarray(rng.normal(size=(130, 2, 80)), jnp.bfloat16)
    blank = (jnp.zeros((130, 2, 1, 80), jnp.int8),) * 2 + (jnp.zeros((130, 2, 1)),) * 2
    at = jnp.arange(130, dtype=jnp.int32)
    want = written_int8(k, k, *blank, at, at * 0, backend=backend)
    for tokens in (1, 3, 64):
        new = k[-tokens:]
        got = written_int8(new, new, *blank, at[:tokens], at[:tokens] * 0, backend=backend)
        assert_same([pool[:tokens] for pool in got], [pool[-tokens:] for pool in want])


def arguments(**changed: Any) -> dict[str, Any]:
    pages = jax.ShapeDtypeStruct((P, 2, S, 64), jnp.int8)
    scales = jax.ShapeDtypeStruct((P, 2, S), jnp.float32)
    k = jax.ShapeDtypeStruct((4, 2, 64), jnp.bfloat16)
    index = jax.ShapeDtypeStruct((4,), jnp.int32)
    shapes = {"k": k, "v": k, "k_pages": pages, "v_pages": pages}
    return {**shapes, "k_scales": scales, "v_scales": scales, "page": index, "slot": index} | {
        name: jax.ShapeDtypeStruct(*shape) for name, shape in changed.items()
    }


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("k", ((4, 3, 64), jnp.bfloat16), r"k must be float\[T, 2, 64\].*got bfloat16\[4, 3, 64\]"),
        ("v", ((5, 2, 64), jnp.bfloat16), r"v must be float\[T, 2, 64\], with one T"),
        ("k", ((4, 2, 64), jnp.int8), r"k must be float"),
        ("v_pages", ((P, 2, S, 80), jnp.int8), r"k_pages and v_pages must have one shape"),
        ("v_pages", ((P, 2, S, 64), jnp.bfloat16), r"v_pages must be int8; got bfloat16"),
        ("k_scales", ((P, S, 2), jnp.float32), r"k_scales must be float32\[7, 2, 16\]; got"),
        ("v_scales", ((P, 2, S), jnp.bfloat16), r"v_scales must be float32.* got bfloat16"),
        ("page", ((3,), jnp.int32), r"page must be int32\[4\]; got int32\[3\]"),
        ("slot", ((4,), jnp.uint32), r"slot must be int32\[4\]; got uint32\[4\]"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, shape: Any, message: str):
    for backend in (REFERENCE, INTERPRET):
        with pytest.raises(ValueError, match=message):
            write_quantized_kv(**arguments(**{name: shape}), backend=backend)


def test_an_int8_pool_of_three_gib_is_refused():
    big = jax.ShapeDtypeStruct((3 * 2**20, 1, 16, 64), jnp.int8)
    scales = jax.ShapeDtypeStruct(big.shape[:3], jnp.float32)
    given = arguments(k=((4, 1, 64), jnp.bfloat16), v=((4, 1, 64), jnp.bfloat16))
    given |= {"k_pages": big, "v_pages": big, "k_scales": scales, "v_scales": scales}
    with pytest.raises(ValueError, match=r"k_pages must have fewer than 2\*\*31"):
        write_quantized_kv(**given)


def test_more_heads_than_a_program_takes_are_refused():
    pages: Any = jax.ShapeDtypeStruct((P, 65, S, 256), jnp.bfloat16)
    k: Any = jax.ShapeDtypeStruct((4, 65, 256), jnp.bfloat16)
    index = arguments()["page"]
    with pytest.raises(ValueError, match=r"k must have at most 16384 elements per token.*got \(4,"):
        write_kv(k, k, pages, pages, index, index, backend=INTERPRET)


def test_float_pools_are_not_for_int8():
    given = arguments()
    del given["k_scales"], given["v_scales"]
    with pytest.raises(ValueError, match=r"k_pages and v_pages must be of one float dtype"):
        write_kv(**given)

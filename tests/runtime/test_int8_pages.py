"""Int8 pages: what a step writes into them and reads from them, and that they are never copied."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.attention import QuantizedDenseKV
from jaxinfer.models.config import ModelConfig
from jaxinfer.runtime.aot import Programs, make_ready
from jaxinfer.runtime.kv_cache import (
    LayerPages,
    PagedKV,
    layer_shapes,
    make_pages,
    page_bytes,
    pages_dtype,
)
from jaxinfer.runtime.program_list import ProgramList
from jaxinfer.runtime.steps import DecodeArrays, Steps
from jaxinfer.scheduling.buckets import Buckets
from pallas_kernels.backend import REFERENCE
from tests.models.tiny_decoder import TinyDecoder, load_tiny

NUM_PAGES, PAGE_SIZE, ROWS = 6, 16, 8
INT8 = jnp.dtype("int8")
TABLE = jnp.array([[4, 2], [1, 5], *[[0, 0]] * 6], jnp.int32)
BUCKETS = Buckets(rows=(ROWS,), tokens=(16,), max_pages_per_seq=2, max_history=128)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyDecoder:
    return load_tiny(tmp_path_factory.mktemp("model"))


def pool(config: ModelConfig, dtype: jnp.dtype = INT8) -> list[LayerPages[jax.Array]]:
    return make_pages(config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=dtype)


@jax.jit
def attended(
    pages: LayerPages[jax.Array], at: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, LayerPages[jax.Array]]:
    """A decode step's attention of one layer."""
    cache = PagedKV(pages, TABLE, at, None, None, backend=REFERENCE)
    return cache.attend(q, k, v), cache.pages


def positions(*at: int) -> jax.Array:
    return jnp.array([*at, *[-1] * (ROWS - len(at))], jnp.int32)


def random_tokens(config: ModelConfig, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of ROWS tokens."""
    rng = np.random.default_rng(seed)
    heads = config.num_attention_heads, *[config.num_key_value_heads] * 2
    q, k, v = (rng.normal(size=(ROWS, h, config.head_dim)).astype(np.float32) for h in heads)
    return jnp.array(q), jnp.array(k), jnp.array(v)


def test_auto_is_the_models_dtype_and_int8_brings_scales(tiny: TinyDecoder):
    assert pages_dtype("auto", jnp.dtype("bfloat16")) == jnp.dtype("bfloat16")
    assert pages_dtype("int8", jnp.dtype("bfloat16")) == INT8
    config = tiny.decoder.config
    (first, *_) = layers = pool(config)
    assert first.keys.dtype == first.values.dtype == INT8
    assert first.key_scales is not None
    assert first.key_scales.shape == first.keys.shape[:3]
    one = page_bytes(config, page_size=PAGE_SIZE, dtype=INT8)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(layers)) == NUM_PAGES * one
    assert pool(config, jnp.dtype("float32"))[0].key_scales is None


def test_a_pool_is_as_many_arrays_of_their_own(tiny: TinyDecoder):
    """Zeros are equal: a compiler might give one buffer for all of a layer's."""
    leaves = jax.tree.leaves(pool(tiny.decoder.config))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves) == 2 * 4


def test_a_token_is_written_at_its_slot_with_a_scale_for_each_head(tiny: TinyDecoder):
    config = tiny.decoder.config
    q, k, v = random_tokens(config)
    k = k.at[0, 0, 3].set(12.7).at[0, 1, 3].set(0.127)  # far apart: never one scale for both
    pages = attended(pool(config)[0], positions(17), q, jnp.clip(k, -12.7, 12.7), v)[1]
    assert pages.key_scales is not None
    scales = np.asarray(pages.key_scales)
    assert {tuple(at) for at in np.argwhere(scales)} == {(2, h, 1) for h in range(scales.shape[1])}
    assert scales[2, 0, 1] == pytest.approx(0.1, rel=1e-4)
    assert int(pages.keys[2, 0, 1, 3]) == 127
    read = np.asarray(pages.keys[2, :, 1]) * scales[2, :, 1, None]
    np.testing.assert_allclose(read, np.asarray(k[0]), atol=0.51 * scales[2, :, 1].max())
    written = {tuple(at[[0, 2]]) for at in np.argwhere(np.asarray(pages.keys))}
    assert written == {(2, 1)}


def test_a_token_of_zeros_is_zeros_and_attends_as_such(tiny: TinyDecoder):
    q, k, v = random_tokens(tiny.decoder.config)
    k, v = k.at[0].set(0), v.at[0].set(0)
    out, pages = attended(pool(tiny.decoder.config)[0], positions(0), q, k, v)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(pages))
    assert not np.asarray(out).any()


def test_a_token_that_is_no_number_is_none_when_read_and_no_affair_of_others(tiny: TinyDecoder):
    q, k, v = random_tokens(tiny.decoder.config)
    sound = attended(pool(tiny.decoder.config)[0], positions(0, 0), q, k, v)[0]
    out, _ = attended(
        pool(tiny.decoder.config)[0],
        *(positions(0, 0), q, k.at[0, 0, 0].set(jnp.nan), v.at[0, 1, 1].set(jnp.inf)),
    )
    assert np.isnan(out[0]).any()
    np.testing.assert_array_equal(out[1], sound[1])


def test_a_reused_page_may_hold_anything_behind_a_sequence(tiny: TinyDecoder):
    """Scales of inf, that a token which was no number left."""
    q, k, v = random_tokens(tiny.decoder.config)
    fresh = pool(tiny.decoder.config)[0]
    stale = jax.tree.map(lambda x: jnp.full_like(x, 99 if x.dtype == INT8 else jnp.inf), fresh)
    outs = [attended(pages, positions(0, 0), q, k, v)[0] for pages in (fresh, stale)]
    np.testing.assert_array_equal(*outs)


def test_the_dense_cache_rounds_as_the_pool_does(tiny: TinyDecoder):
    config = tiny.decoder.config
    pages, dense = pool(config)[0], QuantizedDenseKV(config)
    tokens = [random_tokens(config, seed=at) for at in range(18)]
    outs: list[jax.Array] = []
    for at, (q, k, v) in enumerate(tokens):
        out, pages = attended(pages, positions(at), q, k, v)
        outs.append(out[:1])
    whole = [jnp.concatenate([x[:1] for x in parts]) for parts in zip(*tokens, strict=True)]
    np.testing.assert_allclose(jnp.concatenate(outs), dense.attend(*whole), atol=2e-6)
    assert pages.key_scales is not None
    read = pages.keys[2, :, :2].astype(jnp.float32) * pages.key_scales[2, :, :2, None]
    np.testing.assert_array_equal(read.transpose(1, 0, 2), dense.keys[16:18])


@pytest.fixture(scope="module")
def programs(tiny: TinyDecoder) -> Programs:
    listed = ProgramList(
        tiny.decoder,
        Steps(tiny.decoder, max_rows=ROWS),
        BUCKETS,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        pages_dtype=INT8,
        is_fused=False,
    )
    return make_ready([p for p in listed.serving() if p.name.endswith("layer")], None)


def test_pages_and_scales_are_aliased_and_never_copied(tiny: TinyDecoder, programs: Programs):
    config = tiny.decoder.config
    shapes = layer_shapes(config, num_pages=NUM_PAGES, page_size=PAGE_SIZE, dtype=INT8)
    layer = NUM_PAGES * page_bytes(config, page_size=PAGE_SIZE, dtype=INT8) // 2
    assert len(programs.by_name) == 2
    for name, program in programs.by_name.items():
        x_bytes = (16 if name.startswith("prefill") else ROWS) * config.hidden_size * 4
        memory = program.memory_analysis()
        assert memory is not None
        assert memory.alias_size_in_bytes == layer + x_bytes
        text = program.as_text()
        assert text is not None
        for leaf in (shapes.keys, shapes.key_scales):
            assert leaf is not None
            kind = "s8" if leaf.dtype == INT8 else "f32"
            spelled = rf"{kind}\[{','.join(map(str, leaf.shape))}\]"
            assert re.search(spelled, text)
            made = set(re.findall(rf"= {spelled}\S* ([\w-]+)\(", text))
            assert not {op for op in made if op.startswith(("copy", "convert", "transpose"))}


def test_what_was_given_to_a_step_is_gone(tiny: TinyDecoder, programs: Programs):
    config = tiny.decoder.config
    given = pool(config)[0]
    nowhere = np.full(ROWS, -1, np.int32)
    batch = DecodeArrays(np.zeros(ROWS, np.int32), nowhere, nowhere, np.asarray(TABLE))
    x = jnp.zeros((ROWS, config.hidden_size))
    rope = tiny.decoder.bind_top(tiny.params).begin(jnp.zeros(ROWS, int), jnp.zeros(ROWS, int))[1]
    step = programs["decode rows=8 layer"]
    _, pages = step(tiny.params["layers"][0], given, x, rope, jax.device_put(batch))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    assert isinstance(pages, LayerPages)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(pages))

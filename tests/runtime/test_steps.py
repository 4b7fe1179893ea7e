"""The compiled steps: right next to the reference decoder, on pages that are never copied."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.runtime.aot import Programs, make_ready
from jaxinfer.runtime.kv_cache import KVPages, make_pages, page_bytes, page_shape
from jaxinfer.runtime.program_list import ProgramList
from jaxinfer.runtime.steps import DecodeArrays, PrefillArrays, Steps, without_layers
from jaxinfer.scheduling.buckets import Buckets
from pallas_kernels.query_blocks import QueryBlocks
from tests.models.tiny_decoder import QWEN2, TinyDecoder, load_tiny

NUM_PAGES, PAGE_SIZE = 14, 16
BUCKETS = Buckets(rows=(8,), tokens=(16,), max_pages_per_seq=4, max_history=128)
STALE = 1e3  # what pages that nobody has written hold
TABLE = [[5, 9, 2, 11], [13, 0, 7, 3]]  # of two sequences


class Machine:
    """The programs of a tiny decoder and its pages, driven without a runner."""

    def __init__(self, tiny: TinyDecoder, *, is_fused: bool):
        decoder = tiny.decoder
        self.tiny, self.is_fused = tiny, is_fused
        program_list = ProgramList(
            decoder,
            Steps(decoder, max_rows=BUCKETS.max_rows),
            BUCKETS,
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            is_fused=is_fused,
        )
        programs = [p for p in program_list.serving() if not p.name.startswith("sample")]
        self.programs: Programs = make_ready(programs, None)
        self.clear()

    def clear(self) -> None:
        fresh = make_pages(
            self.tiny.decoder.config,
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            dtype=self.tiny.decoder.dtype,
        )
        self.newest = jnp.zeros(BUCKETS.max_rows, jnp.int32)
        self.pages: KVPages = jax.tree.map(lambda x: jnp.full_like(x, STALE), fresh)

    def step(self, name: str, batch: DecodeArrays | PrefillArrays) -> np.ndarray:
        """Runs a step; logits float32[R, V] of what it leaves to be sampled."""
        batch = jax.device_put(batch)
        params, top = self.tiny.params, without_layers(self.tiny.params)
        if self.is_fused:
            step = self.programs[f"{name} step"]
            self.pages, hidden = step(params, self.pages, self.newest, batch)
        else:
            x, rope = self.programs[f"{name} begin"](top, self.newest, batch)
            for i, layer in enumerate(params["layers"]):
                run = self.programs[f"{name} layer"]
                x, self.pages[i] = run(layer, self.pages[i], x, rope, batch)
            hidden = self.programs[f"{name} end"](top, x, batch)
        assert hidden.shape == (BUCKETS.max_rows, self.tiny.decoder.config.hidden_size)
        return np.asarray(self.tiny.decoder.bind_top(top).logits(hidden))

    def prefill(self, row: int, ids: Sequence[int], start: int) -> np.ndarray:
        """Logits after the last of these tokens."""
        return self.step("prefill tokens=16", prefill_arrays(row, ids, start))[0]

    def decode(self, rows: Sequence[tuple[int, int, int]]) -> np.ndarray:
        """(row of TABLE, token, position) each -> logits [len(rows), V]."""
        token_ids, positions = np.zeros(8, np.int32), np.full(8, -1, np.int32)
        table = np.zeros((8, 4), np.int32)
        for i, (row, token_id, position) in enumerate(rows):
            token_ids[i], positions[i], table[i] = token_id, position, TABLE[row]
        batch = DecodeArrays(token_ids, np.full(8, -1, np.int32), positions, table)
        return self.step("decode rows=8", batch)[: len(rows)]

    def written(self) -> set[tuple[int, int]]:
        """(page, slot) of everything that is not stale, the same in all layers."""
        places = []
        for array in jax.tree.leaves(self.pages):
            is_new = np.asarray(array) != STALE
            places.append({(int(p), int(s)) for p, _, s, _ in np.argwhere(is_new)})
            assert is_new.sum() == len(places[-1]) * array.shape[1] * array.shape[3]
        assert all(p == places[0] for p in places)
        return places[0]


def prefill_arrays(row: int, ids: Sequence[int], start: int) -> PrefillArrays:
    number, width = len(ids), BUCKETS.block_q(16)
    token_ids, positions = np.zeros(16, np.int32), np.full(16, -1, np.int32)
    token_ids[:number], positions[:number] = ids, np.arange(start, start + number)
    table = np.zeros((8, 4), np.int32)
    table[3] = TABLE[row]
    rows = np.where(positions >= 0, 3, 0).astype(np.int32)
    wide = np.full((BUCKETS.wide_blocks(16), width), 16, np.int32)
    wide.reshape(-1)[:number] = np.arange(number)
    num_wide = np.array(-(-number // width), np.int32)
    blocks = QueryBlocks(np.full(8, 16, np.int32), np.array(0, np.int32), wide, num_wide)
    nowhere = np.full(16, -1, np.int32)
    return PrefillArrays(
        token_ids, nowhere, positions, rows, table, blocks, np.full(8, number - 1, np.int32)
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyDecoder:
    return load_tiny(tmp_path_factory.mktemp("qwen2"), **QWEN2)


@pytest.fixture(scope="module")
def machines(tiny: TinyDecoder) -> dict[str, Machine]:
    return {name: Machine(tiny, is_fused=name == "fused") for name in ("layered", "fused")}


@pytest.fixture(params=["layered", "fused"])
def machine(machines: dict[str, Machine], request: pytest.FixtureRequest) -> Machine:
    return machines[request.param]


@pytest.fixture(autouse=True)
def fresh_pages(machines: dict[str, Machine]) -> None:
    for machine in machines.values():
        machine.clear()


def places(row: int, start: int, end: int) -> set[tuple[int, int]]:
    return {(TABLE[row][t // PAGE_SIZE], t % PAGE_SIZE) for t in range(start, end)}


def test_prefill_and_decode_give_the_references_logits(machine: Machine):
    ids = machine.tiny.random_ids(30)
    want = machine.tiny.reference.logits(ids)
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-4}
    np.testing.assert_allclose(machine.prefill(0, ids[:16], 0), want[15], **close)
    np.testing.assert_allclose(machine.prefill(0, ids[16:21], 16), want[20], **close)
    for at in range(21, 30):
        (logits,) = machine.decode([(0, ids[at], at)])
        np.testing.assert_allclose(logits, want[at], **close)


def test_pages_and_growing_arrays_give_the_same_logits(machine: Machine):
    ids = machine.tiny.random_ids(12, seed=1)
    dense = machine.tiny.dense(ids)
    np.testing.assert_allclose(machine.prefill(1, ids, 0), dense[-1], rtol=1e-4, atol=1e-4)


def test_sequences_of_a_decode_step_do_not_see_each_other(machine: Machine):
    first, second = machine.tiny.random_ids(10, seed=2), machine.tiny.random_ids(16, seed=3)
    machine.prefill(0, first[:9], 0)
    machine.prefill(1, second[:15], 0)
    together = machine.decode([(0, first[9], 9), (1, second[15], 15)])
    for logits, ids in zip(together, (first, second), strict=True):
        want = machine.tiny.reference.logits(ids)[-1]
        np.testing.assert_allclose(logits, want, rtol=1e-4, atol=2e-4)


def test_a_step_writes_its_own_tokens_places_and_nothing_else(machine: Machine):
    ids = machine.tiny.random_ids(16, seed=4)
    machine.prefill(0, ids[:7], 0)
    assert machine.written() == places(0, 0, 7)
    machine.prefill(0, ids[7:16], 7)
    assert machine.written() == places(0, 0, 16)
    machine.decode([(0, 1, 16), (1, 2, 0)])
    assert machine.written() == places(0, 0, 17) | places(1, 0, 1)


def test_padding_alone_writes_nothing(machine: Machine):
    machine.decode([])
    machine.prefill(0, [], 0)
    assert machine.written() == set()


def test_computing_a_token_again_writes_the_same_bits(machine: Machine):
    ids = machine.tiny.random_ids(16, seed=5)
    machine.prefill(0, ids, 0)
    before = jax.device_get(machine.pages)
    machine.prefill(0, ids[8:], 8)
    machine.decode([(0, ids[15], 15)])
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(machine.pages), strict=True):
        np.testing.assert_array_equal(old, np.asarray(new))


def writers(machine: Machine) -> dict[str, Any]:
    """The programs that write pages."""
    part = "step" if machine.is_fused else "layer"
    return {n: p for n, p in machine.programs.by_name.items() if n.endswith(part)}


def test_pages_are_aliased_from_argument_to_result(machine: Machine):
    config = machine.tiny.decoder.config
    one_layer = NUM_PAGES * page_bytes(config, page_size=PAGE_SIZE, dtype=jnp.dtype("float32")) // 2
    found = writers(machine)
    assert len(found) == 2
    for name, program in found.items():
        tokens = 16 if name.startswith("prefill") else 8
        x_bytes = 0 if machine.is_fused else tokens * config.hidden_size * 4
        pool = one_layer * (config.num_hidden_layers if machine.is_fused else 1)
        assert program.memory_analysis().alias_size_in_bytes == pool + x_bytes


def test_no_program_copies_pages(machine: Machine):
    """What must not be copied is the pool's shape in the optimized code; a scatter keeps it."""
    shape = page_shape(machine.tiny.decoder.config, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    spelled = re.escape(f"f32[{','.join(map(str, shape))}]")
    for program in writers(machine).values():
        text = program.as_text()
        assert re.search(spelled, text)
        copies = re.findall(rf"= {spelled}\S* copy(?:-start)?\(.*", text)
        assert not copies, copies


def test_pages_that_were_given_to_a_step_are_gone(machine: Machine):
    old = machine.pages[0].keys
    machine.decode([(0, 1, 0)])
    assert old.is_deleted()


def test_layered_and_fused_steps_agree(machines: dict[str, Machine]):
    """Two ways to run the same layers."""
    layered, fused = machines["layered"], machines["fused"]
    ids = layered.tiny.random_ids(16, seed=6)
    np.testing.assert_allclose(layered.prefill(0, ids, 0), fused.prefill(0, ids, 0), atol=1e-4)
    assert layered.written() == fused.written()


def test_page_bytes_count_all_layers(tiny: TinyDecoder):
    config = tiny.decoder.config
    pages = make_pages(config, num_pages=3, page_size=16, dtype=jnp.dtype("bfloat16"))
    assert len(pages) == config.num_hidden_layers
    one = page_bytes(config, page_size=16, dtype=jnp.dtype("bfloat16"))
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(pages)) == 3 * one
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(pages))

"""Every token meets each of its experts once, whatever the others choose; padding meets none."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.models.expert_layout import block_rows, lay_out, num_blocks

CASES = {
    "spread": [[0, 1], [2, 3], [4, 0], [1, 2]],
    "all want the same": [[3, 1]] * 11,
    "one token": [[4, 2]],
    "every expert": [[0, 1], [2, 3], [4, 0]] * 9,
}


def check(chosen: np.ndarray, is_token: np.ndarray | None, num_experts: int, rows: int) -> None:
    mask = None if is_token is None else jnp.asarray(is_token)
    layout = lay_out(jnp.asarray(chosen), mask, num_experts=num_experts, rows=rows)
    token_of, row_of, experts, used = map(np.asarray, layout)
    assert len(experts) == num_blocks(chosen.size, num_experts, rows)
    assert len(token_of) == len(experts) * rows
    real = np.ones(len(chosen), bool) if is_token is None else is_token
    places = row_of[real].reshape(-1)
    assert len(set(places)) == len(places)
    tokens = np.repeat(np.flatnonzero(real), chosen.shape[1])
    np.testing.assert_array_equal(token_of[places], tokens)
    np.testing.assert_array_equal(experts[places // rows], chosen[real].reshape(-1))
    assert (token_of == len(chosen)).sum() == len(token_of) - len(places)  # the rest is empty
    counts = np.bincount(chosen[real].reshape(-1), minlength=num_experts)
    assert used == sum(-(-count // rows) for count in counts)
    assert all(token_of[block * rows] < len(chosen) for block in range(used))
    assert (row_of[~real] == len(token_of)).all()


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_tokens_meet_their_experts(name: str, rows: int):
    chosen = np.array(CASES[name], np.int32)
    check(chosen, None, 5, rows)
    check(chosen, np.arange(len(chosen)) % 3 > 0, 5, rows)
    check(chosen, np.zeros(len(chosen), bool), 5, rows)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 20), st.integers(1, 6), st.integers(1, 9))
def test_any_choice_has_room(data: st.DataObject, num_tokens: int, num_experts: int, rows: int):
    per_token = data.draw(st.integers(1, num_experts))
    chosen = [data.draw(st.permutations(range(num_experts)))[:per_token] for _ in range(num_tokens)]
    is_token = data.draw(st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens))
    check(np.array(chosen, np.int32), np.array(is_token), num_experts, rows)


@pytest.mark.parametrize(
    ("sizes", "rows"), [((8, 2, 8), 8), ((512, 2, 8), 64), ((512, 8, 128), 32), ((64, 8, 64), 8)]
)
def test_blocks_have_as_many_rows_as_an_expert_usually_has(sizes: tuple[int, int, int], rows: int):
    assert block_rows(*sizes, least=8) == rows

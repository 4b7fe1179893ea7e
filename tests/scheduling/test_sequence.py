"""Tests of a sequence's counters and of the seeds of choices."""

from __future__ import annotations

import pytest

from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.running_table import RunningTable
from jaxinfer.scheduling.sequence import Sequence, choice_seed


def sequence(token_ids: tuple[int, ...] = (1, 2, 3), *, index: int = 0, seed: int = 7) -> Sequence:
    return Sequence(Request("r", token_ids), index=index, seed=seed, version="v1")


def seated(num_scheduled: int) -> Sequence:
    """One that runs, with so many tokens under way or computed."""
    running = sequence()
    running.page_table = [4]
    table = RunningTable(2, max_pages_per_seq=1, page_size=16)
    table.sit(running, 0)
    table.num_scheduled[running.seat] = num_scheduled
    return running


def test_a_new_sequence_is_behind_by_its_whole_prompt():
    new = sequence()
    assert (new.num_tokens, new.num_prompt_tokens, new.num_behind) == (3, 3, 3)
    assert (new.num_output_tokens, new.num_computed_tokens, new.page_table) == (0, 0, [])


def test_an_appended_token_is_output_and_behind():
    grown = seated(3)
    grown.token_ids.append(9)
    assert (grown.num_output_tokens, grown.num_behind, grown.num_prompt_tokens) == (1, 1, 3)


def test_a_token_on_its_way_counts_and_is_not_known():
    grown = seated(3)
    assert (grown.num_tokens, grown.num_behind, grown.num_output_tokens) == (4, 1, 0)
    grown = seated(4)
    assert (grown.num_tokens, grown.num_output_tokens) == (5, 0)
    grown.token_ids.extend([7, 8])
    assert (grown.num_tokens, grown.num_output_tokens) == (5, 2)


def test_who_has_stood_up_has_computed_nothing():
    grown = seated(3)
    assert grown.table is not None
    grown.table.stand(grown)
    assert (grown.num_scheduled_tokens, grown.num_computed_tokens) == (0, 0)
    assert (grown.num_tokens, grown.num_behind) == (3, 3)


def test_page_tokens_are_the_int32_bytes_of_one_page():
    assert sequence((1, 2, 3, 4)).page_tokens(1, 2) == b"\3\0\0\0\4\0\0\0"


def test_forgotten_pages_leave_all_tokens():
    running = sequence()
    running.page_table, running.num_indexed_pages = [4, 2], 1
    running.is_indexable = False
    assert running.forget_pages() == [4, 2]
    assert (running.page_table, running.num_indexed_pages) == ([], 0)
    assert running.is_indexable
    assert running.token_ids.tolist() == [1, 2, 3]


def test_stats_hold_what_the_sequence_counted():
    ended = sequence()
    ended.token_ids.append(4)
    ended.num_cached_tokens, ended.num_preemptions, ended.first_token_s = 2, 1, 5.0
    stats = ended.stats(8.0)
    assert (stats.num_prompt_tokens, stats.num_output_tokens, stats.num_cached_tokens) == (3, 1, 2)
    assert (stats.num_preemptions, stats.first_scheduled_s, stats.ttft_s) == (1, None, 5.0)
    assert stats.e2e_s == 8.0


def test_choices_of_one_seed_differ_and_repeat():
    seeds = [choice_seed(42, index) for index in range(16)]
    assert len(set(seeds)) == 16
    assert seeds == [choice_seed(42, index) for index in range(16)]


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1, 2**64 - 1])
def test_a_choice_seed_is_64_unsigned_bits(seed):
    assert 0 <= choice_seed(seed, 3) < 2**64


def test_near_seeds_give_far_seeds():
    flipped = [choice_seed(seed, 0) ^ choice_seed(seed + 1, 0) for seed in range(200)]
    assert all(16 <= bits.bit_count() <= 48 for bits in flipped)


def test_a_negative_seed_is_not_its_absolute_value():
    assert choice_seed(-5, 0) != choice_seed(5, 0)


def test_the_first_choice_does_not_depend_on_how_many_there_are():
    assert sequence(seed=9).seed == sequence(seed=9, index=0).seed != sequence(seed=9, index=1).seed


def test_the_salt_holds_the_version_and_the_salt_of_the_request():
    salted = Sequence(Request("r", (1,), cache_salt="s"), index=0, seed=0, version="v2")
    assert salted.salt == ("v2", "s")

"""Tests of who runs, on which pages, and who has to wait."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.config import SchedulerConfig
from jaxinfer.errors import ConfigError, ContextLengthExceeded
from jaxinfer.scheduling.batch import StepResult
from jaxinfer.scheduling.buckets import Buckets
from jaxinfer.scheduling.page_pool import PagePool
from jaxinfer.scheduling.rank import AGING_S
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.scheduling.seating import MAX_HELD
from jaxinfer.scheduling.sequence import Sequence, Status
from tests.scheduling.plain_world import SIZE, World, prompt


def test_nothing_to_do_is_no_step():
    world = World()
    assert world.scheduler.schedule(0.0) is None
    assert not world.scheduler.has_work()


def test_a_prompt_is_computed_then_decoded_token_by_token():
    world = World()
    only = world.submit(prompt(0, 6), max_tokens=3)
    kinds = [
        (s.batch.kind, s.rows.num_new.tolist()) for s in (world.step(), world.step(), world.step())
    ]
    assert kinds == [("prefill", [6]), ("decode", [1]), ("decode", [1])]
    assert only.status is Status.FINISHED
    assert only.num_output_tokens == 3
    assert world.pool.num_used == 0


def test_a_prompt_of_one_token_needs_no_prefill_step():
    world = World()
    world.submit([5])
    assert world.step().batch.kind == "decode"


def test_a_long_prompt_comes_in_chunks_of_the_token_budget():
    world = World(max_num_batched_tokens=32)
    world.submit(prompt(0, 70))
    steps = [world.step() for _ in range(3)]
    assert [s.rows.num_new.tolist() for s in steps] == [[32], [32], [6]]
    assert [len(s.sampled) for s in steps] == [0, 0, 1]


def test_several_prompts_share_a_step_and_the_last_one_is_cut():
    world = World(max_num_batched_tokens=32)
    for start, length in ((0, 10), (1, 10), (2, 20)):
        world.submit(prompt(start, length))
    assert world.step().rows.num_new.tolist() == [10, 10, 12]


def test_decoding_rows_ride_along_with_every_chunk_of_a_long_prompt():
    world = World(max_num_batched_tokens=32)
    decoding = [world.submit(prompt(start, 4), max_tokens=9) for start in range(3)]
    world.step()
    world.submit(prompt(9, 90))
    for _ in range(3):
        scheduled = world.step()
        assert scheduled.batch.kind == "prefill"
        assert scheduled.rows.num_new.sum() == 32
        assert set(decoding) < set(scheduled.sampled) | set(scheduled.sequences)
    assert [each.num_output_tokens for each in decoding] == [4, 4, 4]


def test_every_step_leaves_a_chunk_at_least_one_token():
    world = World(max_num_seqs=32, max_num_batched_tokens=16)
    for start in range(15):
        world.submit(prompt(start, 1), max_tokens=50)
    world.step()
    late = world.submit(prompt(50, 20))
    assert world.step().rows.num_new.tolist() == [1] * 16
    assert late.num_computed_tokens == 1
    world.submit([1])
    assert len(world.step().sequences) == 16


def test_no_more_sequences_run_than_allowed():
    world = World(max_num_seqs=2)
    for start in range(5):
        world.submit(prompt(start, 3), max_tokens=2)
    world.step()
    stats = world.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 3)
    world.drain()


def test_a_finished_sequence_makes_room_for_the_next_in_the_same_order():
    world = World(max_num_seqs=1)
    sequences = [world.submit(prompt(start, 3), max_tokens=2) for start in range(4)]
    order = []
    while world.scheduler.has_work():
        order += [s for s in world.step().sequences if s not in order]
    assert order == sequences


def test_a_lower_priority_number_runs_first():
    world = World(max_num_seqs=1)
    low, high = world.submit([1], priority=1), world.submit([2], priority=0)
    assert world.step().sequences == [high]
    assert low.status is Status.WAITING


def test_waiting_makes_up_for_a_lower_class_after_the_stated_time():
    world = World(max_num_seqs=1)
    too_late = world.submit([1], priority=0, arrival_s=AGING_S + 0.1)
    old = world.submit([2], priority=1, arrival_s=0.0)
    just_in_time = world.submit([3], priority=0, arrival_s=AGING_S - 0.1)
    order = []
    while world.scheduler.has_work():
        order += [s for s in world.step().sequences if s not in order]
    assert order == [just_in_time, old, too_late]


def test_the_first_of_a_new_version_does_not_share_a_step_with_the_old_one():
    world = World()
    old = world.submit(prompt(0, 3), version="v1")
    world.step()
    new = world.submit(prompt(1, 3), version="v2")
    steps = [world.step() for _ in range(4)]
    assert [step.batch.version for step in steps] == ["v2", "v1", "v2", "v1"]
    assert [step.sequences for step in steps] == [[new], [old], [new], [old]]


def test_short_requests_of_new_versions_do_not_keep_an_old_one_from_its_turn():
    world = World()
    old = world.submit(prompt(0, 3), version="v1", max_tokens=9)
    world.step()
    versions = []
    for number in range(8):
        world.submit(prompt(number + 1, 3), version=f"v{2 + number % 2}", max_tokens=1)
        versions.append(world.step().batch.version)
    assert versions.count("v1") >= 2
    world.drain()
    assert old.num_output_tokens == 9


def test_the_running_and_the_waiting_are_counted():
    world = World(num_pages=16, max_num_seqs=1)
    world.submit(prompt(0, 9))
    world.submit(prompt(1, 9))
    world.step()
    stats = world.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert (stats.pages_total, stats.pages_used) == (16, 3)
    assert stats.pages_used + stats.pages_cached + stats.pages_free == 16
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (9, 0)


@pytest.mark.parametrize("length", [1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 3 * SIZE])
def test_the_same_prompt_again_computes_at_least_its_last_token(length):
    world = World()
    first = world.submit(prompt(0, length))
    world.drain()
    second = world.submit(prompt(0, length))
    scheduled = world.step()
    assert second.num_cached_tokens == (length - 1) // SIZE * SIZE
    assert scheduled.rows.num_new.tolist() == [length - second.num_cached_tokens]
    world.drain()
    assert second.token_ids == first.token_ids


def test_hits_and_queries_are_counted_in_tokens_once_per_sequence():
    world = World()
    for _ in range(2):
        world.submit(prompt(0, 10))
        world.drain()
    stats = world.scheduler.stats()
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (20, 8)


def test_two_prompts_with_one_start_do_not_read_what_is_not_yet_computed():
    world = World()
    first, second = world.submit([1, 2, 3, 4, 5]), world.submit([1, 2, 3, 4, 6])
    assert world.step().sequences == [first]  # the other waits for the page, one step
    assert set(world.step().sequences) == {first, second}
    world.drain()
    assert second.num_cached_tokens == SIZE


def test_many_equal_prompts_at_once_are_computed_once():
    world = World(max_num_seqs=32, max_num_batched_tokens=64)
    sequences = [world.submit(prompt(0, 40)) for _ in range(16)]
    assert len(world.step().sequences) == 1
    assert len(world.step().sequences) == 16
    world.drain()
    assert all(s.token_ids == sequences[0].token_ids for s in sequences)
    assert [s.num_cached_tokens for s in sequences] == [0] + [36] * 15


def test_a_sequence_held_back_does_not_hold_back_others():
    world = World()
    first, held, other = (world.submit(prompt(start, 9)) for start in (0, 0, 5))
    assert world.step().sequences == [first, other]
    assert held.status is Status.WAITING


def test_only_so_many_are_looked_at_in_one_step():
    world = World(max_num_seqs=32, max_num_batched_tokens=64, num_pages=256)
    for _ in range(MAX_HELD + 5):
        world.submit(prompt(0, 9))
    other = world.submit(prompt(5, 9))
    assert other not in world.step().sequences
    assert other in world.step().sequences


def test_equal_prompts_without_a_cache_run_together():
    world = World(enable_prefix_caching=False)
    for _ in range(3):
        world.submit(prompt(0, 9))
    assert len(world.step().sequences) == 3


def test_a_held_sequence_runs_when_the_one_it_waited_for_fails():
    world = World()
    first, held = world.submit(prompt(0, 9)), world.submit(prompt(0, 9))
    scheduled = world.scheduler.schedule(0.0)
    assert scheduled is not None
    assert scheduled.sequences == [first]
    world.scheduler.discard(scheduled)
    world.scheduler.finish(first, is_failed=True)
    assert world.step().sequences == [held]
    assert held.num_cached_tokens == 0


def test_what_can_never_fit_is_refused_at_submission():
    world = World(num_pages=8, max_model_len=200)
    with pytest.raises(ContextLengthExceeded):
        world.submit(prompt(0, 9 * SIZE))
    assert not world.scheduler.has_work()
    world.submit(prompt(0, 3))
    world.drain()


def test_without_max_tokens_a_sequence_ends_where_the_pool_ends():
    world = World(num_pages=8, max_model_len=200)
    only = world.submit(prompt(0, 6 * SIZE), max_tokens=None)
    world.drain()
    assert only.num_tokens == 8 * SIZE + 1
    assert world.pool.num_used == 0


def test_cached_pages_do_not_keep_anybody_waiting():
    world = World(num_pages=8)
    world.submit(prompt(0, 8 * SIZE - 1), max_tokens=2)
    world.drain()
    assert world.pool.num_cached == 8
    late = world.submit(prompt(50, 7 * SIZE), max_tokens=2)
    world.step()
    assert late.status is Status.RUNNING


@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "preempted"])
def test_an_abort_frees_all_pages_at_once_from_any_state(state):
    world = World(num_pages=9, max_num_seqs=2, max_num_batched_tokens=16)
    kept = world.submit(prompt(0, 8), max_tokens=16)
    world.step()
    gone = world.submit(prompt(1, 20), max_tokens=10)
    while state != "waiting":
        world.step()
        if state == "prefill" and gone.status is Status.RUNNING:
            assert gone.num_behind > 1
            break
        if state == "decode" and gone.num_output_tokens == 2:
            break
        if state == "preempted" and gone.status is Status.PREEMPTED:
            break
    assert world.scheduler.abort("r2") == [gone]
    assert gone.status is Status.FINISHED
    assert world.pool.num_used == len(kept.page_table)
    world.scheduler.check_integrity()
    assert world.scheduler.abort("r2") == []
    world.drain()
    assert kept.num_output_tokens == 16


def test_a_deadline_ends_a_sequence_in_any_state_and_only_that_one():
    world = World(max_num_seqs=2)
    running = world.submit(prompt(0, 8), max_tokens=20, deadline_s=5.0)
    endless = world.submit(prompt(1, 8), max_tokens=20)
    waiting = world.submit(prompt(2, 8), max_tokens=20, deadline_s=3.0)
    world.step()
    assert world.scheduler.expire(3.0) == []
    assert world.scheduler.expire(3.5) == [waiting]
    assert world.scheduler.expire(9.0) == [running]
    assert world.scheduler.expire(9.0) == []
    world.scheduler.check_integrity()
    world.drain()
    assert endless.num_output_tokens == 20


def test_who_has_never_run_by_its_queue_deadline_ends_and_nobody_else():
    world = World(max_num_seqs=1, max_num_batched_tokens=16)
    running = world.submit(prompt(0, 40), max_tokens=20, queue_deadline_s=5.0)
    patient = world.submit(prompt(1, 8), max_tokens=2, queue_deadline_s=50.0)
    waiting = world.submit(prompt(2, 8), max_tokens=2, queue_deadline_s=5.0)
    gone = world.submit(prompt(3, 8), max_tokens=2, queue_deadline_s=4.0)
    world.step()
    world.scheduler.abort(gone.request.request_id)
    assert world.scheduler.expire_queued(5.0) == []
    assert world.scheduler.expire_queued(5.5) == [waiting]
    assert world.scheduler.expire(99.0) == world.scheduler.expire_queued(9.0) == []
    world.scheduler.check_integrity()
    world.drain()
    assert (running.num_output_tokens, patient.num_output_tokens) == (20, 2)


def test_a_preempted_one_that_has_run_is_past_its_queue_deadline():
    world = World(max_num_seqs=1)
    old = world.submit(prompt(0, 8), max_tokens=9, queue_deadline_s=5.0, priority=1)
    world.step()
    world.submit(prompt(1, 8), max_tokens=9)
    world.step()
    assert old.status is Status.PREEMPTED
    assert world.scheduler.expire_queued(99.0) == []
    world.drain()
    assert old.num_output_tokens == 9


def test_a_row_without_a_number_gets_no_token_and_no_index():
    world = World()
    bad, good = world.submit(prompt(0, 8)), world.submit(prompt(1, 8))
    scheduled = world.scheduler.schedule(0.0)
    assert scheduled is not None
    logprobs = np.array([np.nan, -1.0], np.float32)
    result = StepResult(np.array([3, 4], np.int32), logprobs, None, None)
    assert world.scheduler.update(scheduled, result, 1.0) == [bad]
    assert (bad.num_output_tokens, bad.first_token_s) == (0, None)
    assert (good.token_ids[-1], good.first_token_s) == (4, 1.0)
    world.scheduler.finish(bad, is_failed=True)
    assert world.pool.num_cached == 0
    world.scheduler.check_integrity()


def test_times_are_those_of_the_first_start_and_the_first_token():
    world = World(max_num_batched_tokens=16)
    only = world.submit(prompt(0, 30), max_tokens=3)
    world.step(now=1.0)
    world.step(now=2.0)
    world.step(now=3.0)
    assert (only.first_scheduled_s, only.first_token_s) == (1.0, 2.0)


def test_nothing_is_remembered_of_what_has_ended():
    world = World(max_num_seqs=2)
    for start in range(6):
        world.submit(prompt(start, 9), deadline_s=100.0, queue_deadline_s=100.0)
    world.step()
    world.scheduler.abort("r6")
    world.drain()
    assert len(world.scheduler._deadlines) == len(world.scheduler._queue_deadlines) == 0
    assert len(world.scheduler._waiting) == 0
    assert not world.scheduler._by_request
    assert not len(world.scheduler.running)


def test_finishing_twice_is_once():
    world = World()
    only = world.submit(prompt(0, 8))
    world.step()
    world.scheduler.finish(only)
    world.scheduler.finish(only)
    world.scheduler.check_integrity()
    assert not world.scheduler.has_work()


def test_a_scheduler_needs_a_resolved_length_and_wide_enough_page_tables():
    buckets = Buckets((8,), (16,), max_pages_per_seq=2, max_history=128)
    with pytest.raises(ConfigError, match="resolved"):
        Scheduler(SchedulerConfig(), PagePool(8, SIZE), buckets)
    with pytest.raises(ConfigError, match="too narrow"):
        Scheduler(SchedulerConfig(max_model_len=20), PagePool(8, SIZE), buckets)


def test_ten_thousand_waiting_are_not_looked_at():
    world = World(max_num_seqs=1)
    world.submit(prompt(0, 8), max_tokens=20)
    for _ in range(10_000):
        world.submit([1, 2, 3])
    world.step()
    looked_at: list[Sequence] = []
    match = world.pool.match
    world.pool.match = lambda sequence: looked_at.append(sequence) or match(sequence)
    for _ in range(5):
        world.step()
    assert looked_at == []
    assert world.scheduler.stats().num_waiting == 10_000

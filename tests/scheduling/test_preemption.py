"""Tests of who is preempted while a step is under way, and who comes after."""

from __future__ import annotations

from jaxinfer.scheduling.sequence import Sequence, Status
from tests.scheduling.laws import check
from tests.scheduling.plans import request
from tests.scheduling.world import Setup, World


def a_full_pool_with_a_step_under_way() -> tuple[World, list[Sequence]]:
    """Best first: two that need a page now, one whose token is on its way, one in its prompt."""
    world = World(
        Setup(num_pages=6, page_size=2, max_num_seqs=4, max_num_batched_tokens=6, max_model_len=12)
    )
    world.submit(request("c", (4, 5, 6, 4, 5), 4))
    world.schedule()
    world.read()
    for name in "ab":
        world.submit(request(name, (1, ord(name) % 7), 4, priority=-1))
    world.submit(request("d", (6, 6, 6, 6), 1))
    world.schedule()
    sequences = [world.sequences[name][0] for name in "abcd"]
    assert world.running == sequences
    assert world.scheduler.pool.num_available == 0
    return world, sequences


def test_a_worse_one_does_not_overtake_one_that_awaits_its_token():
    world, (_, _, awaiting, worst) = a_full_pool_with_a_step_under_way()
    world.schedule()
    assert (awaiting.status, awaiting.is_awaited) == (Status.PREEMPTED, True)
    assert worst.status is Status.PREEMPTED
    check(world)
    while awaiting.status is Status.PREEMPTED:
        assert worst.status is Status.PREEMPTED
        world.read()
        world.schedule()
        check(world)


def test_a_preempted_one_takes_the_token_that_was_on_its_way():
    world, (_, _, awaiting, _) = a_full_pool_with_a_step_under_way()
    world.schedule()
    num_known = len(awaiting.token_ids)
    world.read()
    assert (len(awaiting.token_ids), awaiting.is_awaited) == (num_known + 1, False)

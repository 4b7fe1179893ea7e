"""Tests of the queue of sequences."""

from __future__ import annotations

import random

from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.sequence import Sequence
from jaxinfer.scheduling.sequence_heap import SequenceHeap


def sequence(name: str) -> Sequence:
    return Sequence(Request(name, (1,)), index=0, seed=0, version="v1")


def drain(heap: SequenceHeap) -> list[str]:
    names = []
    while (first := heap.peek()) is not None:
        names.append(first[1].request.request_id)
        heap.remove(first[1])
    return names


def test_the_smallest_key_comes_first():
    heap = SequenceHeap()
    for key, name in ((3, "c"), (1, "a"), (2, "b")):
        heap.push(key, sequence(name))
    assert drain(heap) == ["a", "b", "c"]


def test_equal_keys_come_in_the_order_of_the_pushes():
    heap = SequenceHeap()
    for name in "dacb":
        heap.push(0.0, sequence(name))
    assert drain(heap) == ["d", "a", "c", "b"]


def test_what_was_removed_never_comes_up():
    heap = SequenceHeap()
    sequences = [sequence(name) for name in "abc"]
    for key, each in enumerate(sequences):
        heap.push(key, each)
    heap.remove(sequences[0])
    heap.remove(sequences[1])
    assert sequences[0] not in heap
    assert (len(heap), drain(heap)) == (1, ["c"])


def test_removing_what_is_not_there_does_nothing():
    heap = SequenceHeap()
    heap.remove(sequence("a"))
    assert (len(heap), heap.peek()) == (0, None)


def test_a_removed_sequence_can_come_back_with_another_key():
    heap = SequenceHeap()
    first, second = sequence("a"), sequence("b")
    heap.push(1, first)
    heap.push(2, second)
    heap.remove(first)
    heap.push(3, first)
    assert drain(heap) == ["b", "a"]


def test_the_dead_do_not_pile_up():
    heap = SequenceHeap()
    kept = sequence("kept")
    heap.push(0, kept)
    for key in range(1, 10_000):
        aborted = sequence("aborted")
        heap.push(key, aborted)
        heap.remove(aborted)
    assert len(heap._heap) < 200
    assert heap.peek() == (0, kept)


def test_any_mix_of_pushes_and_removals_matches_a_sorted_list():
    rng, heap, model = random.Random(5), SequenceHeap(), dict[Sequence, int]()
    for _ in range(3000):
        if rng.random() < 0.55 or not model:
            new = sequence("x")
            model[new] = rng.randrange(10**9)
            heap.push(model[new], new)
        else:
            gone = rng.choice(list(model))
            del model[gone]
            heap.remove(gone)
        first = heap.peek()
        assert len(heap) == len(model)
        assert (first and first[0]) == min(model.values(), default=None)

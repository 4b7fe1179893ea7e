"""XLA's lists of thunks, as written by jax 0.10.2 and 0.12, shortened."""

from __future__ import annotations

from bench.aot.launches import COMMAND_BUFFER, COPY, KERNEL, LOOP, read_launches

PLAIN = """\
001: kCustomKernel [source       | sink        ] matmul grid: [4, 2, 1] threads: [128, 1, 1]  \
shared_memory: 32768 bytes
002: kCustomKernel [prev=001 (1) | sink        ] loop_add_fusion grid: [128, 1, 1] \
threads: [32, 4, 1]  shared_memory: 0 bytes
"""
LOOPED = """\
000: kCommandBuffer [source       | next=015 (1)]
    001: kCustomKernel [source       | sink        ] a grid: [32, 1, 1] threads: [128, 1, 1]  \
shared_memory: 0 bytes
    009: kCopy         [source       | next=010 (1)] kCopy
015: kWhile         [prev=000 (1) | next=000 (1)]
condition:
    016: kCustomKernel [source | sink] b grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    000: kCommandBuffer [source       | next=026 (1)]
        017: kCustomKernel [source | sink] a grid: [1, 1, 1] threads: [8, 1, 1]  \
shared_memory: 512 bytes
    038: kCustomKernel  [prev=026 (1) | sink        ] c grid: [256, 1, 1] threads: [128, 1, 1]  \
shared_memory: 0 bytes
000: kCommandBuffer [prev=015 (1) | sink]
    040: kCustomCall [source | sink]
"""


def test_a_kernel_has_its_name_grid_threads_and_shared_memory():
    first, second = read_launches(PLAIN).all
    assert (first.kind, first.name, first.grid) == (KERNEL, "matmul", (4, 2, 1))
    assert (first.threads, first.shared_bytes) == (128, 32768)
    assert (second.threads, second.shared_bytes) == (128, 0)


def test_kinds_are_counted_at_every_depth():
    launches = read_launches(LOOPED)
    counted = [launches.count(kind) for kind in (KERNEL, COPY, LOOP, COMMAND_BUFFER)]
    assert counted == [4, 1, 1, 3]
    assert launches.library_calls() == 1


def test_only_what_stands_below_a_graph_is_part_of_it():
    outside = [(x.kind, x.name) for x in read_launches(LOOPED).outside_graphs()]
    assert outside == [(LOOP, ""), (KERNEL, "b"), (KERNEL, "c")]


def test_all_launches_of_a_kernel_are_found():
    assert [x.shared_bytes for x in read_launches(LOOPED).of_kernel("a")] == [0, 512]


def test_no_text_is_no_launches():
    assert read_launches("\n").all == ()

"""The table, line by line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.measures import memory_figures
from bench.results import Failure, Result, Statistic
from bench.table import LABEL_WIDTH, METRICS, NAME_WIDTH, WIDTH, block, footer, header
from bench.workloads import WORKLOADS, Prompts
from tests.bench.stopwatch import Stopwatch

CONTEXT = {
    "model": "smollm2-135m-instruct",
    "jaxinfer": "0.1.0",
    "jax": "0.12.0",
    "python": "3.12.11",
    "device": "cpu",
    "cpu": "Some Processor @ 2.40GHz",
    "cores": 2,
}


def result(others: float | None = 0.02, **metrics: tuple[float, float, float]) -> Result:
    return Result(
        "prefix",
        "16 in turn",
        {name: Statistic(*values) for name, values in metrics.items()},
        wall_s=Statistic(7.04, 7.0, 8.0),
        cpu_s=Statistic(13.96, 13.0, 15.0),
        others=None if others is None else Statistic(0.0, 0.0, others),
        num_kept=3,
        num_run=3,
    )


def lines_of_everything() -> Iterator[str]:
    yield from header(CONTEXT, 3)
    huge = (123456.7, 123456.7, 123456.7)
    for name, workload in WORKLOADS.items():
        metrics = {metric: Statistic(*huge) for metric in METRICS}
        yield from block(
            Result(name, workload.title, metrics, *[Statistic(*huge)] * 3, num_kept=3, num_run=3)
        )
    yield from footer([result(others=0.9)])


def test_the_header_says_what_was_measured_on_what():
    first, second, third, blank, names = header(CONTEXT, 3)
    assert first == "smollm2-135m-instruct; jaxinfer 0.1.0, JAX 0.12.0, Python 3.12.11"
    assert second == "device cpu; 2 cores of Some Processor @ 2.40GHz"
    assert third == "repetitions: the 3 quietest of up to 6"
    assert blank == ""
    assert names.split() == ["median", "min", "max", "wall", "s", "CPU", "s", "others"]


def test_a_measure_is_its_cost_and_a_row_per_metric():
    rows = list(block(result(miss_ttft_s=(1.5, 1.4, 1.6), miss_over_hit=(20.04, 19.0, 21.0))))
    assert [row.split() for row in rows] == [
        ["prefix", "16", "in", "turn", "7.0", "14.0", "0.02"],
        ["first", "token,", "prefix", "miss,", "ms", "1,500.0", "1,400.0", "1,600.0"],
        ["miss", "/", "hit", "20.0", "19.0", "21.0"],
    ]


def test_figures_stand_under_their_names():
    *_, names = header(CONTEXT, 3)
    cost, row = block(result(miss_over_hit=(20.0, 19.0, 21.0)))
    assert row.index("20.0") + 4 == names.index("median") + 6
    assert row.index("21.0") + 4 == names.index("max") + 3
    assert cost.index("7.0") + 3 == names.index("wall s") + 6
    assert len(cost) == len(names)


def test_bytes_are_shown_in_whole_mebibytes():
    row = list(block(result(peak_bytes=(1537 << 20, 1 << 20, 2 << 30))))[1]
    assert row.split()[-3:] == ["1,537", "1", "2,048"]


def test_a_disturbed_measure_is_marked_and_the_mark_explained():
    disturbed, quiet = result(others=0.35), result(others=0.15)
    assert next(block(disturbed)).endswith("0.35*")
    assert not next(block(quiet)).endswith("*")
    assert any(line.startswith("*:") for line in footer([quiet, disturbed]))
    assert not any(line.startswith("*:") for line in footer([quiet]))


def test_what_others_used_is_unknown_on_some_systems():
    assert next(block(result(others=None))).endswith("?")


def test_a_failure_says_why():
    title, why = block(Failure("prefill", "1 prompt", "the model holds 640 tokens"))
    assert title.split() == ["prefill", "1", "prompt"]
    assert why.strip() == "failed: the model holds 640 tokens"


def test_no_line_is_wider_than_a_hundred_columns():
    lines = list(lines_of_everything())
    assert len(lines) > 100
    for line in lines:
        assert len(line) <= WIDTH
        assert line == line.rstrip()


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_metric_of_a_workload_has_a_label(name: str):
    watch = Stopwatch()
    figures = WORKLOADS[name](watch.run, Prompts(range(9), name), watch)
    assert figures.keys() <= METRICS.keys()


def test_every_metric_of_memory_and_load_has_a_label():
    plan = {"process": 1, "weights": 1, "programs": 1, "kv_pool": 1}
    assert {*memory_figures(plan, 3, 4), "load_s", "loaded_bytes"} <= METRICS.keys()


def test_labels_and_titles_leave_room_for_the_figures():
    labels = [shown.label for shown in METRICS.values()]
    titles = [workload.title for workload in WORKLOADS.values()]
    assert max(map(len, labels)) <= LABEL_WIDTH
    assert max(map(len, titles)) <= LABEL_WIDTH
    assert max(map(len, [*WORKLOADS, "memory"])) < NAME_WIDTH

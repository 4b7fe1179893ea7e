"""What a report says of figures that are known."""

from __future__ import annotations

import numpy as np

from checkpoints.certificate import Answer, LayerError
from jaxinfer.quantization.document import Heading, Paragraph, Picture, SideBySide, Table, to_html
from jaxinfer.quantization.evaluation import Evaluation
from jaxinfer.quantization.report import (
    answer_blocks,
    cost_table,
    drift_blocks,
    kl_pictures,
    layer_blocks,
    worst,
)

KINDS = ("self_attn.q_proj", "mlp.down_proj")
ERRORS = [
    LayerError(f"layers.{i}.{kind}", "int4-g128", 0.01 * (i + 1) * (k + 1), 0.2)
    for i in range(8)
    for k, kind in enumerate(KINDS)
]


def evaluation() -> Evaluation:
    shape = (4, 40)
    nll = np.full(shape, np.log(8.0))
    agrees = np.ones(shape, bool)
    agrees[0, :8] = False
    return Evaluation(np.full(shape, 0.25), nll + np.log(1.5), nll, agrees, 0)


def test_the_table_of_costs_has_each_figure_and_its_interval():
    rows = {row[0]: row[1:] for row in cost_table(evaluation(), ("A", "B")).rows}
    assert rows["KL(A to B), mean, nats per token"] == ("0.25000", "")
    assert rows["perplexity of A"] == ("8.000", "8.000 to 8.000")
    assert rows["perplexity of B"] == ("12.000", "12.000 to 12.000")
    assert rows["change of perplexity, paired"] == ("+50.000 %", "+50.000 to +50.000 %")
    assert rows["greedy tokens that agree"][0] == "95.00 %"
    assert rows["held-out tokens"][0] == "160"


def test_a_last_bin_of_positions_may_be_shorter():
    pictures = list(kl_pictures(evaluation()))
    assert [block.name for block in pictures if isinstance(block, Picture)] == ["kl", "position"]


def test_the_worst_layers_come_first():
    assert [error.product for error in worst(ERRORS, 3)] == [
        "layers.7.mlp.down_proj",
        "layers.6.mlp.down_proj",
        "layers.5.mlp.down_proj",
    ]
    (table,) = (block for block in layer_blocks(ERRORS) if isinstance(block, Table))
    assert len(table.rows) == 10
    assert table.rows[0] == ("layers.7.mlp.down_proj", "int4-g128", "0.1600", "0.2000")


def test_products_outside_the_layers_have_no_place_among_them():
    errors = [LayerError("lm_head", "int8", 0.1, 0.1)]
    assert [type(block) for block in layer_blocks(errors)] == [Heading, Paragraph, Table, Picture]


def test_what_was_not_measured_is_not_in_the_report():
    assert list(layer_blocks([])) == []
    assert list(drift_blocks([])) == []
    assert list(answer_blocks([], ("A", "B"))) == []


def test_answers_are_counted_and_shown():
    answers = [Answer("q", "yes", "yes"), Answer("r", "yes", "no")]
    heading, told, *sides = answer_blocks(answers, ("A", "B"))
    assert isinstance(heading, Heading)
    assert isinstance(told, Paragraph)
    assert told.text.startswith("Greedy. 1 of 2 are the same")
    assert sides == [
        SideBySide("q", ("A", "B"), ("yes", "yes")),
        SideBySide("r", ("A", "B"), ("yes", "no")),
    ]
    assert "<mark>no</mark>" in to_html("t", sides)

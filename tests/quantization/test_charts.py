"""Axes whose numbers can be checked by hand, and pictures that are well-formed and complete."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest

from jaxinfer.quantization.axis import Axis, label
from jaxinfer.quantization.charts import Labels, Series, bars, histogram, points

SVG = "{http://www.w3.org/2000/svg}"
LABELS = Labels("a <title> & more", "across", "up")


@pytest.mark.parametrize(
    ("values", "bounds", "ticks"),
    [
        ([0.0, 10.0], (0, 10), [0, 2, 4, 6, 8, 10]),
        ([0.013], (0, 0.015), [0, 0.005, 0.01, 0.015]),
        ([511.0], (0, 600), [0, 200, 400, 600]),
        ([-3.0, 4.0], (-4, 4), [-4, -2, 0, 2, 4]),
        ([0.0], (0, 1), [0, 0.2, 0.4, 0.6, 0.8, 1]),
        ([], (0, 1), [0, 0.2, 0.4, 0.6, 0.8, 1]),
    ],
)
def test_a_plain_axis_begins_at_0_and_ends_at_a_tick(values, bounds, ticks):
    axis = Axis.over(values)
    assert (axis.low, axis.high) == pytest.approx(bounds)
    assert axis.ticks() == pytest.approx(ticks)


def test_a_log_axis_has_powers_of_ten_and_counts_only_what_is_above_0():
    axis = Axis.over([0.0, 0.003, 2.0], is_log=True)
    assert (axis.low, axis.high) == pytest.approx((0.001, 10))
    assert axis.ticks() == pytest.approx([0.001, 0.01, 0.1, 1, 10])
    assert [axis.place(x) for x in (0.0, 0.001, 0.1, 10, 99)] == pytest.approx([0, 0, 0.5, 1, 1])


def test_a_log_axis_of_many_decades_shows_the_largest():
    axis = Axis.over([1e-300, 1.0], is_log=True)
    assert (axis.low, axis.high) == pytest.approx((1e-12, 1.0))
    assert len(axis.ticks()) <= 8


def test_a_log_axis_of_nothing_or_of_one_power_still_has_a_length():
    assert Axis.over([], is_log=True).low < Axis.over([], is_log=True).high
    one = Axis.over([10.0], is_log=True)
    assert one.low < 10.0 <= one.high


@pytest.mark.parametrize("bounds", [(1, 1), (2, 1), (0, float("nan")), (float("-inf"), 0)])
def test_an_axis_without_a_length_is_refused(bounds):
    with pytest.raises(ValueError, match="low < high"):
        Axis(*bounds)


def test_labels_are_short():
    assert [label(x) for x in (0.0025, 1500.0, 1e-6, 0.0)] == ["0.0025", "1500", "1e-06", "0"]


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def heights(svg: str) -> list[float]:
    return [float(r.attrib["height"]) for r in parsed(svg).iter(f"{SVG}rect") if len(r)]


def test_bars_are_as_high_as_their_values():
    found = heights(bars(LABELS, ["a", "b", "c<"], [1.0, 2.0, 0.5]))
    assert found[1] == pytest.approx(2 * found[0], abs=0.2)
    assert found[0] == pytest.approx(2 * found[2], abs=0.2)


def test_titles_names_and_axes_are_written_and_escaped():
    svg = bars(LABELS, ["a", "b", "c<"], [1.0, 2.0, 0.5])
    texts = [text.text for text in parsed(svg).iter(f"{SVG}text")]
    assert {"a <title> & more", "across", "up", "a", "b", "c<", "0", "2"} <= set(texts)


def test_a_histogram_holds_every_value_once():
    values = np.array([[0.0, 1e-9, 0.01], [0.02, 0.5, 3.0]])
    svg = histogram(LABELS, values, least=1e-6)
    titles = [t.text or "" for r in parsed(svg).iter(f"{SVG}rect") for t in r.iter(f"{SVG}title")]
    assert sum(int(title.rpartition(": ")[2]) for title in titles) == 6


def test_equal_values_make_one_bar():
    assert len(heights(histogram(LABELS, np.zeros(50), least=1e-6))) == 1


def test_points_of_several_series_have_colours_and_a_legend():
    series = [Series("up_proj", [0, 1], [0.1, 0.2]), Series("down_proj", [0, 1], [0.3, 0.4])]
    root = parsed(points(LABELS, series, is_log=True))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"up_proj", "down_proj"} <= set(texts)
    circles = list(root.iter(f"{SVG}circle"))
    assert len(circles) == 4 + 2
    assert {circle.attrib["fill"] for circle in circles} == {"var(--c0)", "var(--c1)"}


def test_a_curve_goes_up_where_values_do():
    root = parsed(points(LABELS, [Series("kl", [0, 1, 2], [1, 2, 3])], is_joined=True))
    (line,) = root.iter(f"{SVG}polyline")
    ys = [float(place.split(",")[1]) for place in line.attrib["points"].split()]
    assert ys == sorted(ys, reverse=True)  # y grows downwards

"""Pictures as SVG text: bars, a histogram, points and curves. No library, no script.

A picture carries its own colours for light and dark, so it reads in a page and as a file. Numbers
and words only: what is drawn is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from jaxinfer.quantization.axis import Axis, label

WIDTH, HEIGHT = 760, 320
LEFT, RIGHT, TOP, BOTTOM = 72, 16, 40, 52  # around the plot, in pixels
PLOT_WIDTH, PLOT_HEIGHT = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
MAX_NAMES = 24  # under an axis of names
NUM_BINS = 40
STYLE = """
.chart{--ink:#1f2328;--soft:#59636e;--grid:#d8dee4;--paper:#fff;
--c0:#0969da;--c1:#bc4c00;--c2:#1a7f37;--c3:#8250df;--c4:#bf3989;--c5:#9a6700;--c6:#57606a;
background:var(--paper);font:12px system-ui,sans-serif}
@media(prefers-color-scheme:dark){.chart{--ink:#f0f6fc;--soft:#9198a1;--grid:#30363d;
--paper:#0d1117;--c0:#58a6ff;--c1:#ff9b50;--c2:#4ac26b;--c3:#bc8cff;--c4:#ff7bc5;--c5:#e3b341;--c6:#b1bac4}}
.chart text{fill:var(--ink)}.chart .soft{fill:var(--soft)}
.chart .title{font-size:14px;font-weight:600}
.chart .grid{stroke:var(--grid)}.chart .axis{stroke:var(--soft)}
""".replace("\n", "")
NUM_COLOURS = 7


@dataclass(frozen=True, slots=True)
class Labels:
    """What is written around a plot."""

    title: str
    x: str
    y: str


def bars(labels: Labels, names: Sequence[str], values: Sequence[float]) -> str:
    """A bar for each name, from 0. Many names are written every few bars."""
    axis = Axis.over(values)
    slot = PLOT_WIDTH / max(len(values), 1)
    every = -(-len(names) // MAX_NAMES)
    parts = list(_y_axis(axis))
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        ends = sorted((_y(axis, 0.0), _y(axis, value)))
        parts.append(
            f'<rect x="{LEFT + slot * (i + 0.1):.1f}" y="{ends[0]:.1f}" '
            f'width="{slot * 0.8:.1f}" height="{ends[1] - ends[0]:.1f}" fill="var(--c0)">'
            f"<title>{escape(name)}: {label(value)}</title></rect>"
        )
        if i % every == 0:
            parts.append(_under(LEFT + slot * (i + 0.5), name))
    return _picture(labels, parts)


def histogram(labels: Labels, values: np.ndarray, *, least: float) -> str:
    """How many values lie where, over a log axis; those below `least` count as `least`."""
    kept = np.maximum(np.asarray(values, np.float64).ravel(), least)
    x = Axis.over([least, float(kept.max(initial=least * 10))], is_log=True)
    edges = np.geomspace(x.low, x.high, NUM_BINS + 1)
    counts = [int(count) for count in np.histogram(kept, edges)[0]]
    y = Axis.over(counts)
    width = PLOT_WIDTH / NUM_BINS
    parts = [*_y_axis(y), *_x_ticks(x)]
    parts += (
        f'<rect x="{LEFT + i * width:.1f}" y="{_y(y, count):.1f}" width="{width - 1:.1f}" '
        f'height="{PLOT_HEIGHT + TOP - _y(y, count):.1f}" fill="var(--c0)">'
        f"<title>{label(edges[i])} to {label(edges[i + 1])}: {count}</title></rect>"
        for i, count in enumerate(counts)
        if count
    )
    return _picture(labels, parts)


@dataclass(frozen=True, slots=True)
class Series:
    """Points (x, y) under a name."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def points(
    labels: Labels, series: Sequence[Series], *, is_log: bool = False, is_joined: bool = False
) -> str:
    """Each series in a colour of its own, with a legend if there are several.

    Args:
        is_log: of the y axis.
        is_joined: neighbours are joined by a line.
    """
    x = Axis.over([value for one in series for value in one.x])
    y = Axis.over([value for one in series for value in one.y], is_log=is_log)
    parts = [*_y_axis(y), *_x_ticks(x)]
    for number, one in enumerate(series):
        colour = f"var(--c{number % NUM_COLOURS})"
        places = [(_x(x, a), _y(y, b)) for a, b in zip(one.x, one.y, strict=True)]
        if is_joined:
            line = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
            parts.append(
                f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            )
        else:
            parts += (
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5" fill="{colour}"/>' for a, b in places
            )
    if len(series) > 1:
        parts += _legend([one.name for one in series])
    return _picture(labels, parts)


def _legend(names: Sequence[str]) -> Iterator[str]:
    """In one row under the title."""
    place = float(LEFT)
    for number, name in enumerate(names):
        yield f'<circle cx="{place + 5:.1f}" cy="31" r="4" fill="var(--c{number % NUM_COLOURS})"/>'
        yield f'<text x="{place + 13:.1f}" y="35">{escape(name)}</text>'
        place += 26 + 6.6 * len(name)


def _picture(labels: Labels, parts: Sequence[str]) -> str:
    """All around the plot; `role` and `title` are for those who don't see it."""
    middle = TOP + PLOT_HEIGHT / 2
    bottom = TOP + PLOT_HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img"><title>{escape(labels.title)}</title>'
        f"<style>{STYLE}</style>"
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="var(--paper)"/>'
        f'<text class="title" x="{LEFT}" y="18">{escape(labels.title)}</text>{"".join(parts)}'
        f'<path class="axis" fill="none" d="M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}"/>'
        f'<text class="soft" x="{LEFT + PLOT_WIDTH / 2:.1f}" y="{HEIGHT - 10}" '
        f'text-anchor="middle">{escape(labels.x)}</text>'
        f'<text class="soft" text-anchor="middle" '
        f'transform="translate(16 {middle:.1f}) rotate(-90)">{escape(labels.y)}</text></svg>'
    )


def _y_axis(axis: Axis) -> Iterator[str]:
    """Ticks and lines across the plot."""
    for tick in axis.ticks():
        at = _y(axis, tick)
        yield f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>'
        yield (
            f'<text class="soft" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">'
            f"{label(tick)}</text>"
        )


def _x_ticks(axis: Axis) -> Iterator[str]:
    for tick in axis.ticks():
        at = _x(axis, tick)
        yield f'<path class="axis" d="M{at:.1f} {TOP + PLOT_HEIGHT}v4"/>'
        yield _under(at, label(tick))


def _under(at: float, text: str) -> str:
    return (
        f'<text class="soft" x="{at:.1f}" y="{TOP + PLOT_HEIGHT + 18}" text-anchor="middle">'
        f"{escape(text)}</text>"
    )


def _x(axis: Axis, value: float) -> float:
    return LEFT + PLOT_WIDTH * axis.place(value)


def _y(axis: Axis, value: float) -> float:
    return TOP + PLOT_HEIGHT * (1 - axis.place(value))

"""What GET /admin/versions says, as lines for people.

Plain data in, text out: no HTTP, no clock. Fields are those of server/version_status.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

Json = Mapping[str, Any]

ENDED = ("promoted", "rolled_back", "failed")
BAR_CELLS = 20
HEADS = (
    *("VERSION", "ROLE", "SHARE", "REQUESTS", "ERRORS"),
    *("FIRST TOKEN", "TOKENS/S", "OPEN", "FROM"),
)
LEFT = ("VERSION", "ROLE", "FROM")


def goes_back(rollout: Json | None) -> bool:
    """Whether there is something to promote or to roll back."""
    return rollout is not None and rollout["phase"] not in ("rolled_back", "failed")


def is_under_way(rollout: Json | None) -> bool:
    return rollout is not None and rollout["phase"] not in ENDED


def report_lines(report: Json) -> Iterator[str]:
    """All of it: the table, the rollout with its evidence, the last decisions."""
    yield from _table([HEADS, *map(_row, report["versions"])])
    yield ""
    for title in ("before_this_start", "reload", "pause"):
        if report[title] is not None:
            yield f"{title.replace('_', ' ')}: {report[title]}"
    yield state_line(report)
    if report["rollout"] is not None:
        yield from _evidence_lines(report["rollout"]["evidence"])
    if report["decisions"]:
        yield ""
        yield from map(decision_line, report["decisions"])


def state_line(report: Json) -> str:
    """How the rollout stands."""
    rollout = report["rollout"]
    if rollout is None:
        return "no rollout since the start"
    text = f"{rollout['version']}: {rollout['phase'].replace('_', ' ')}"
    if rollout["phase"] == "loading":
        doing = [c["progress"].rstrip(": ") for c in report["versions"] if c["role"] == "loading"]
        return f"{rollout['version']}: {doing[0]}" if doing else text
    if rollout["phase"] == "canary":
        text += f" at {percent(rollout['share'])}"
        if rollout["num_stages"] > 1:
            text += f", stage {rollout['stage'] + 1} of {rollout['num_stages']}"
    has_ended_badly = rollout["phase"] in ("rolled_back", "failed")
    return f"{text}: {rollout['reason']}" if has_ended_badly else text


def decision_line(decision: Json) -> str:
    """When, which, what, by whom, why, and the numbers behind it."""
    when = datetime.fromisoformat(decision["at"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    numbers = " ".join(f"{name}={_short(value)}" for name, value in decision["numbers"].items())
    what = decision["kind"].replace("_", " ")
    line = f"{when} {decision['version']}: {what} by {decision['by']}: {decision['reason']}"
    return f"{line} ({numbers})" if numbers else line


class News:
    """What a report says that the one before did not."""

    def __init__(self) -> None:
        self._latest: str | None = None  # time of a decision, which sorts as text
        self._state = ""

    def lines(self, report: Json) -> Iterator[str]:
        """Decisions that came since; at first only how the rollout stands."""
        if self._latest is not None:
            yield from (decision_line(d) for d in report["decisions"] if d["at"] > self._latest)
        self._latest = max((d["at"] for d in report["decisions"]), default=self._latest or "")
        state = state_line(report)
        if state != self._state:
            self._state = state
            yield state


def _row(card: Json) -> tuple[str, ...]:
    return (
        card["version"],
        card["role"],
        percent(card["share"]),
        f"{card['requests']:,}",
        f"{card['errors']:,}",
        _milliseconds(card["ttft_s"]),
        _or_dash(card["tokens_per_s"]),
        str(card["open_calls"]),
        card["root"],
    )


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            text.ljust(width) if name in LEFT else text.rjust(width)
            for name, text, width in zip(HEADS, row, widths, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def _evidence_lines(evidence: Sequence[Json]) -> Iterator[str]:
    """A full bar rolls it back."""
    width = max((len(signal["name"]) for signal in evidence), default=0)
    for signal in evidence:
        threshold = math.inf if signal["threshold"] is None else signal["threshold"]
        filled = round(BAR_CELLS * part_of(signal["e_value"], threshold))
        bar = "#" * filled + "." * (BAR_CELLS - filled)
        yield (
            f"  {signal['name']:{width}}  {bar}  e-value {signal['e_value']:.3g} "
            f"of {threshold:.3g}{_means(signal)}"
        )


def part_of(e_value: float, threshold: float) -> float:
    """Of its way to the threshold, by logarithms, within 0..1."""
    if e_value >= threshold:
        return 1.0
    return math.log(e_value) / math.log(threshold) if e_value > 1.0 else 0.0


def _means(signal: Json) -> str:
    means = [signal[who] for who in ("canary", "stable") if signal[who] is not None]
    if not means:
        return ""
    shown = " beside ".join(f"{mean:.3g}" for mean in means)
    return f"; {shown} {signal['unit']} over {signal['num_observations']}"


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{1000 * value:,.0f} ms"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _short(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

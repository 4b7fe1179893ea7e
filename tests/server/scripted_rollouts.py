"""In place of `Rollouts`: says what a test wrote down, and remembers what it was asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxinfer.errors import JaxInferError
from jaxinfer.rollout import RolloutPlan
from jaxinfer.server.smoke import Recorded
from jaxinfer.version_order import VersionOrder

PLAN = {
    "stages": [{"share": 0.1, "hold_s": 60.0, "min_requests": 50}],
    "shadow_share": 0.0,
    "promotes": True,
}


def version(name: str, role: str, share: float, **more: Any) -> dict[str, Any]:
    """One as `Rollouts.status` has it."""
    plain = {"root": f"models/{name}", "calls": 0, "bytes": 1000, "progress": None, "lines": []}
    return {"version": name, "role": role, "share": share, **plain, **more}


def rollout(name: str | None, phase: str, **more: Any) -> dict[str, Any]:
    plain = {"stage": 0, "share": 0.1, "reason": "", "plan": PLAN, "evidence": []}
    return {"version": name, "phase": phase, **plain, **more}


def decision(at: float, kind: str, reason: str, **numbers: Any) -> dict[str, Any]:
    return {"at": at, "kind": kind, "by": "operator", "reason": reason, "numbers": numbers}


class ScriptedRollouts:
    """`told`: what it was asked, in order; `refusal`: what the next one is answered with."""

    def __init__(self, *versions: dict[str, Any], rollout: dict[str, Any] | None = None):
        self.versions = list(versions) or [version("v1", "stable", 1.0)]
        self.rollout = rollout
        self.decisions: list[dict[str, Any]] = []
        self.told: list[tuple[Any, ...]] = []
        self.refusal: JaxInferError | None = None

    async def begin(
        self,
        order: VersionOrder,
        plan: RolloutPlan,
        *,
        recorded: Sequence[Recorded] = (),
        promotes_at_once: bool = False,
    ) -> None:
        self._note("begin", order, plan, recorded, promotes_at_once)

    async def promote(self, version: str) -> None:
        self._note("promote", version)

    async def roll_back(self, version: str) -> None:
        self._note("roll_back", version)

    async def drop(self, version: str) -> None:
        self._note("drop", version)

    async def reload(self, version: str, *, within_s: float) -> None:
        self._note("reload", version, within_s)

    def status(self) -> dict[str, Any]:
        return {
            "stable": self.versions[0]["version"],
            "versions": self.versions,
            "rollout": self.rollout,
            "decisions": self.decisions,
            "pause": None,
            "before_this_start": None,
        }

    def _note(self, *told: Any) -> None:
        self.told.append(told)
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            raise refusal
        if told[0] != "begin":
            self.decisions.append(decision(1000.0 + len(self.told), told[0], "as asked"))

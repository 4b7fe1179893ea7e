"""In place of `Rollouts`: says what a test wrote down, and remembers what it was asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxinfer.config import ModelSource
from jaxinfer.errors import JaxInferError, ModelNotFound
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
    plain = {"root": f"models/{name}", "calls": 0, "bytes": 1000, "progress": "", "lines": []}
    return {"version": name, "role": role, "share": share, "standby_s": None, **plain, **more}


def rollout(name: str, phase: str, **more: Any) -> dict[str, Any]:
    plain = {"stable": "v1", "share": 0.1, "reason": "", "plan": PLAN, "evidence": []}
    return {"version": name, "phase": phase, **plain, **more}


def decision(second: int, kind: str, reason: str, **numbers: Any) -> dict[str, Any]:
    at = f"2026-01-01T00:00:{second:02}.000+00:00"
    told = {"by": "operator", "reason": reason, "numbers": numbers}
    return {"at": at, "kind": kind, "canary": "v2", **told}


class ScriptedRollouts:
    """`told`: what it was asked, in order; `refusal`: what the next one is answered with."""

    def __init__(self, *versions: dict[str, Any], rollout: dict[str, Any] | None = None):
        self.versions = list(versions) or [version("v1", "stable", 1.0)]
        self.stable_source = ModelSource("tests/letters", dtype="float32", quantization="int8")
        self.rollout = rollout
        start = {"at": "2026-01-01T00:00:00.000+00:00", "kind": "start", "stable": "v1"}
        self.decisions: list[dict[str, Any]] = [start]
        self.pause: str | None = None
        self.reloads: str | None = None
        self.before_this_start: str | None = None
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
        self._note("promote", self._known(version))

    async def roll_back(self, version: str) -> None:
        self._note("roll_back", self._known(version))

    async def drop(self, version: str) -> None:
        self._note("drop", self._known(version))

    async def reload(self, version: str, *, within_s: float) -> None:
        self.reloads = "finding"
        self._note("reload", self._known(version), within_s)

    def status(self) -> dict[str, Any]:
        return {
            "stable": self.versions[0]["version"],
            "versions": self.versions,
            "rollout": self.rollout,
            "reload": self.reloads,
            "decisions": self.decisions,
            "pause": self.pause,
            "before_this_start": self.before_this_start,
        }

    def _known(self, version: str) -> str:
        there = [one["version"] for one in self.versions]
        if version not in there:
            raise ModelNotFound(f"no version {version!r}; there is {', '.join(there)}")
        return version

    def _note(self, *told: Any) -> None:
        self.told.append(told)
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            raise refusal
        if told[0] != "begin":
            self.decisions.append(decision(20 + len(self.told), told[0], "as asked"))

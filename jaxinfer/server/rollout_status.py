"""What operators are shown of versions and of the rollout, as plain JSON.

No HTTP and no JAX.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.rollout import Rollout
    from jaxinfer.server.served_versions import ServedVersions
    from jaxinfer.server.version_slot import VersionSlot


def version_status(slot: VersionSlot, versions: ServedVersions, now: float) -> dict[str, Any]:
    """One version."""
    return {
        "version": slot.name,
        "role": "loading" if slot.is_arriving else slot.life,
        "root": slot.root or slot.order.source.model,
        "share": versions.share_of(slot.name) if slot.is_routed else 0.0,
        "calls": versions.num_calls(slot.name),
        "bytes": slot.weights_bytes,
        "progress": ": ".join(filter(None, (slot.life, slot.progress))) if slot.is_arriving else "",
        "lines": list(slot.lines),
        "standby_s": now - slot.standby_since_s if slot.life == "standby" else None,
    }


def machine_status(slot: VersionSlot, machine: Rollout) -> dict[str, Any]:
    """A rollout, under way or the last one."""
    decisions = machine.decisions
    return {
        "version": slot.name,
        "stable": machine.stable,
        "phase": str(machine.phase),
        "share": machine.share,
        "plan": _plain(asdict(machine.plan)),
        "evidence": [_plain(asdict(evidence)) for evidence in machine.evidence()],
        "reason": decisions[-1].reason if decisions else "",
    }


def _plain(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

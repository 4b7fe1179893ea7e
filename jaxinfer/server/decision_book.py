"""What was decided about versions, and by whom: for the log, for operators, for the next process.

No HTTP and no JAX. Everything belongs to the event loop; the file is written on a thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from jaxinfer.rollout import Phase
from jaxinfer.rollout_log import last_state, record_of

if TYPE_CHECKING:
    from jaxinfer.rollout import Decision, Rollout
    from jaxinfer.rollout_log import RolloutLog

log = logging.getLogger(__name__)

MAX_KEPT = 100  # records that are shown
BAD = ("roll_back", "fail")


def before_this_start(records: Sequence[Mapping[str, Any]], version: str) -> str | None:
    """What the last process has left half done, or served instead, for people; None: neither.

    Args:
        records: of the log, oldest first.
        version: what is served now.
    """
    state = next((r for r in reversed(records) if "phase" in r and "stable" in r), None)
    if state is None:
        return None
    phase = state["phase"]
    served = state.get("canary") if phase == Phase.PROMOTED else state["stable"]
    if served == version and phase not in (Phase.LOADING, Phase.CANARY):
        return None
    return last_state([state])


class DecisionBook:
    """Records in the order of their making.

    Args:
        file: where they outlive the process.
        wall_clock: seconds since 1970.
    """

    def __init__(self, file: RolloutLog, wall_clock: Callable[[], float]):
        self._file = file
        self._wall_clock = wall_clock
        self._records: deque[dict[str, Any]] = deque(maxlen=MAX_KEPT)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="decision-book")
        self._held: list[dict[str, Any]] | None = []  # until there is something to tell

    @property
    def records(self) -> list[dict[str, Any]]:
        """The last ones of this process, oldest first."""
        return list(self._records)

    def started(self, version: str, root: str) -> None:
        """What was under way before is told no more by the next start.

        A server that never gets an order leaves no file, unless there is one.
        """
        self._keep({"kind": "start", "phase": "started", "stable": version, "root": root})
        if self._file.records():
            self._write_held()

    def ordered(self, machine: Rollout, version: str) -> None:
        """A version was ordered; it has no better name yet."""
        log.info("version %s was ordered, beside %s", version, machine.stable)
        phase = str(machine.phase)
        self._write_held()
        self._keep({"kind": "load", "phase": phase, "stable": machine.stable, "canary": version})

    def decided(self, decision: Decision, machine: Rollout, version: str) -> None:
        """One line in the log; the file has it a moment later."""
        record = {**record_of(decision, machine, at=self._now()), "canary": version}
        level = logging.WARNING if decision.kind in BAD else logging.INFO
        told = decision.kind, decision.by, decision.reason, _told(decision.numbers)
        log.log(level, "version %s: %s (%s): %s%s", version, *told)
        self._keep(record)

    def note(self, kind: str, version: str, *, by: str, reason: str) -> None:
        """What no machine decides."""
        log.info("version %s: %s (%s): %s", version, kind, by, reason)
        self._keep({"kind": kind, "version": version, "by": by, "reason": reason})

    def close(self) -> None:
        """Returns when the file has all of it."""
        self._writer.shutdown()

    def _keep(self, record: Mapping[str, Any]) -> None:
        record = {"at": self._now(), **record}
        self._records.append(record)
        if self._held is None:
            self._writer.submit(self._file.append, record)
        else:
            self._held.append(record)

    def _write_held(self) -> None:
        held, self._held = self._held, None
        for record in held or ():
            self._writer.submit(self._file.append, record)

    def _now(self) -> str:
        return datetime.fromtimestamp(self._wall_clock(), UTC).isoformat(timespec="milliseconds")


def _told(numbers: Mapping[str, float | int | str]) -> str:
    shown = (f"{k}={v:.6g}" if isinstance(v, float) else f"{k}={v}" for k, v in numbers.items())
    return f" [{' '.join(shown)}]" if numbers else ""

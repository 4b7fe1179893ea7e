"""What was decided about versions, in a file that outlives the process: one JSON object a line.

Whatever is wrong with the file is logged and never stops who serves. Time is the caller's, on the
wall's clock. No JAX, no HTTP. A write waits for the disk: not for an event loop's own thread.

A record has any keys; `last_state` reads `phase`, `stable`, `canary` and `share`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from jaxinfer.rollout import Decision, Phase, Rollout

log = logging.getLogger(__name__)

MAX_BYTES = 1 << 20  # of the file; the one from before it is kept, too
MAX_READ_BYTES = 4 * MAX_BYTES  # of a file that somebody else made


class RolloutLog:
    """Append-only, at most two files of `max_bytes`: the second has `.1` after its name."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES):
        self.path = path
        self._before = path.with_name(path.name + ".1")
        self._max_bytes = max_bytes
        self._is_broken = False  # said so already

    def append(self, record: Mapping[str, Any]) -> bool:
        """On the disk when this returns. False: it could not be written, which has been logged."""
        try:
            line = json.dumps(dict(record), allow_nan=False, ensure_ascii=False) + "\n"
            self._write(line.encode())
        except (OSError, ValueError, TypeError) as error:
            if not self._is_broken:
                log.error(
                    "the rollout log %s cannot be written (%s); decisions go on, but a restart "
                    "will not know of them",
                    self.path,
                    error,
                )
            self._is_broken = True
            return False
        self._is_broken = False
        return True

    def records(self) -> list[dict[str, Any]]:
        """Oldest first. Lines that are no JSON object, as one that a crash tore, are left out."""
        return [record for path in (self._before, self.path) for record in self._read(path)]

    def _write(self, line: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._rotate(len(line))
        is_new = not self.path.exists()
        with self.path.open("ab+") as file:
            file.write(b"\n" + line if _is_torn(file) else line)
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            _sync_folder(self.path.parent)

    def _rotate(self, num_bytes: int) -> None:
        if self.path.exists() and self.path.stat().st_size + num_bytes > self._max_bytes:
            self.path.replace(self._before)

    def _read(self, path: Path) -> list[dict[str, Any]]:
        try:
            with path.open("rb") as file:
                lines = file.read(MAX_READ_BYTES).split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            log.error("the rollout log %s cannot be read (%s); taken as empty", path, error)
            return []
        found = [record for line in lines if (record := _parsed(line)) is not None]
        num_bad = sum(bool(line.strip()) for line in lines) - len(found)
        if num_bad:
            log.warning("the rollout log %s: %d damaged lines are left out", path, num_bad)
        return found


def record_of(decision: Decision, rollout: Rollout, *, at: str) -> dict[str, Any]:
    """A decision and the state after it. `at`: wall-clock time."""
    return {
        "at": at,
        "kind": decision.kind,
        "by": decision.by,
        "reason": decision.reason,
        "phase": str(rollout.phase),
        "stable": rollout.stable,
        "canary": rollout.canary,
        "share": rollout.share,
        "numbers": dict(decision.numbers),
    }


def last_state(records: Iterable[Mapping[str, Any]]) -> str | None:
    """For people: what served when the process ended. None: no record says it."""
    state = next((r for r in reversed(list(records)) if "phase" in r and "stable" in r), None)
    if state is None:
        return None
    stable, canary = state["stable"], state.get("canary") or "a new version"
    match state["phase"]:
        case Phase.LOADING:
            return f"stable {stable}, while {canary} was loading"
        case Phase.CANARY:
            return f"canary {canary} at {_percent(state.get('share'))} of stable {stable}"
        case Phase.PROMOTED:
            return f"{canary}, promoted over {stable}"
        case Phase.ROLLED_BACK:
            return f"stable {stable}; {canary} had been rolled back"
        case Phase.FAILED:
            return f"stable {stable}; {canary} could not be loaded"
        case _:
            return None


def _percent(share: object) -> str:
    return f"{100 * share:g} %" if isinstance(share, int | float) else "an unknown share"


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record: object = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast(dict[str, Any], record) if isinstance(record, dict) else None


def _is_torn(file: BinaryIO) -> bool:
    """Whether the last line has no end."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


def _sync_folder(folder: Path) -> None:
    """So that the name of a new file outlives a loss of power, where the system can do it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

"""What the --shadow file says of a canary, in short: for people who review it."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from jaxinfer.server.shadow_file import older_than
from jaxinfer.server.shadow_record import ShadowRecord

NUM_LARGEST = 10


@dataclass(slots=True)
class ShadowSummary:
    """Of all records, or those of one canary."""

    num_records: int = 0
    num_unreadable: int = 0  # lines that a crash has torn, or that are not ours
    num_same: int = 0  # of those with the same draws: equal token for token
    num_same_draw: int = 0
    pairs: Counter[str] = field(default_factory=Counter[str])  # "stable -> canary"
    stable_finishes: Counter[str] = field(default_factory=Counter[str])
    canary_finishes: Counter[str] = field(default_factory=Counter[str])
    mean_edit_distance: float | None = None  # of those with the same draws
    mean_kl: float | None = None  # nats per token of the prompts
    mean_nll_increase: float | None = None  # the same
    num_compared_tokens: int = 0  # of these means
    largest: list[ShadowRecord] = field(default_factory=list[ShadowRecord])
    # by KL, then edit distance; the largest first


def summary(path: Path, *, canary: str | None = None) -> ShadowSummary:
    """Of FILE.1 and FILE.

    Args:
        canary: only records of this version.
    Raises: OSError if FILE cannot be read.
    """
    found = ShadowSummary()
    records = _records(path, canary, found)
    edits = kl = nll = 0.0
    kept: list[tuple[float, float, int, ShadowRecord]] = []
    for record in records:
        _count(record, found)
        edits += record.edit_distance if record.is_same_draw else 0.0
        if record.facts is not None:
            kl += record.facts.kl * record.facts.num_tokens
            nll += record.facts.nll_increase * record.facts.num_tokens
        size = 0.0 if record.facts is None else record.facts.kl
        heapq.heappush(kept, (size, record.edit_distance, -found.num_records, record))
        if len(kept) > NUM_LARGEST:
            heapq.heappop(kept)
    found.largest = [entry[-1] for entry in sorted(kept, reverse=True)]
    if found.num_same_draw:
        found.mean_edit_distance = edits / found.num_same_draw
    if found.num_compared_tokens:
        found.mean_kl = kl / found.num_compared_tokens
        found.mean_nll_increase = nll / found.num_compared_tokens
    return found


def _count(record: ShadowRecord, found: ShadowSummary) -> None:
    found.num_records += 1
    found.pairs[f"{record.stable} -> {record.canary}"] += 1
    found.stable_finishes[record.stable_output.finish] += 1
    found.canary_finishes[record.canary_output.finish] += 1
    if record.is_same_draw:
        found.num_same_draw += 1
        found.num_same += record.first_difference is None
    if record.facts is not None:
        found.num_compared_tokens += record.facts.num_tokens


def _records(path: Path, canary: str | None, found: ShadowSummary) -> Iterator[ShadowRecord]:
    older = older_than(path)
    for part in ((older,) if older.exists() else ()) + (path,):
        with part.open("rb") as lines:
            for line in lines:
                try:
                    record = ShadowRecord.of(line)
                except ValueError:
                    found.num_unreadable += bool(line.strip())
                    continue
                if canary in (None, record.canary):
                    yield record

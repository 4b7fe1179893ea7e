"""One line of the --shadow file: a prompt with both versions' outputs, and how far they are apart.

Pure data, to and from JSON.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxinfer.canary.facts import ShadowFacts
from jaxinfer.config import SamplingParams
from jaxinfer.scheduling.request import FinishReason


@dataclass(frozen=True, slots=True)
class ShadowOutput:
    """What one version said."""

    text: str
    num_tokens: int
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class ShadowRecord:
    """One prompt, twice."""

    time_s: float  # since the epoch
    stable: str  # version
    canary: str  # version
    answered_by: str  # version: the user got its output; the other one was asked afterwards
    prompt: str
    sampling: Mapping[str, Any]  # fields that have not their default
    is_same_draw: bool  # greedy or seeded; else the outputs may differ by luck
    stable_output: ShadowOutput
    canary_output: ShadowOutput
    first_difference: int | None  # place among the output tokens; None: they are the same
    edit_distance: float  # of the output tokens, 0..1
    facts: ShadowFacts | None  # of a window of the prompt; None: too short, or it came to nothing

    def line(self) -> bytes:
        """JSON, with the end of the line."""
        text = json.dumps(dataclasses.asdict(self), ensure_ascii=False, default=str)
        return text.encode("utf-8", "replace") + b"\n"

    @classmethod
    def of(cls, line: bytes) -> ShadowRecord:
        """Raises: ValueError for a line that is not one."""
        try:
            fields: dict[str, Any] = json.loads(line)
            facts = fields["facts"]
            fields["facts"] = None if facts is None else ShadowFacts(**facts)
            for name in ("stable_output", "canary_output"):
                fields[name] = ShadowOutput(**fields[name])
            return cls(**fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a record of --shadow: {error}") from error


def fields_of(sampling: SamplingParams) -> dict[str, Any]:
    """Those that have not their default."""
    default = dataclasses.asdict(SamplingParams())
    return {k: v for k, v in dataclasses.asdict(sampling).items() if v != default[k]}

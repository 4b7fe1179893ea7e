"""What one choice of a request gave, compared bit by bit.

Knows nothing of engines: outputs go in, differences come out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from jaxinfer.outputs import RequestOutput
from jaxinfer.scheduling.request import FinishReason
from jaxinfer.stats import RequestStats

Top = tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Trace:
    """All outputs of one choice, joined. Per token: its id, its logprob, the likeliest ones."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])  # float32 values
    tops: list[Top] = field(default_factory=list[Top])
    finish_reason: FinishReason | None = None
    stats: RequestStats | None = None  # when it has ended

    def add(self, output: RequestOutput) -> None:
        self.token_ids += output.token_ids
        self.logprobs += [entry.logprob for entry in output.logprobs]
        self.tops += [entry.top for entry in output.logprobs]
        self.finish_reason, self.stats = output.finish_reason, output.stats

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, num_tokens: int) -> Trace:
        """As if it had been asked for at most so many tokens."""
        return replace(
            self,
            token_ids=self.token_ids[:num_tokens],
            logprobs=self.logprobs[:num_tokens],
            tops=self.tops[:num_tokens],
        )

    def followed_by(self, other: Trace) -> Trace:
        """The tokens of both."""
        return replace(
            other,
            token_ids=self.token_ids + other.token_ids,
            logprobs=self.logprobs + other.logprobs,
            tops=self.tops + other.tops,
        )


def difference(got: Trace, want: Trace, places: Iterable[int] | None = None) -> str | None:
    """The first difference in words; None if there is none.

    Args:
        places: of the tokens to compare, in both; None: all, which must be as many.
    """
    if places is None:
        places = range(max(len(got), len(want)))
    for place in places:
        if place >= len(got) or place >= len(want):
            return f"{len(got)} tokens, not {len(want)}"
        if got.token_ids[place] != want.token_ids[place]:
            return f"token {place} is {got.token_ids[place]}, not {want.token_ids[place]}"
        if _bits(got.logprobs[place]) != _bits(want.logprobs[place]):
            return (
                f"logprob of token {place} is {got.logprobs[place]:.9g}, "
                f"not {want.logprobs[place]:.9g}"
            )
        if _top_bits(got.tops[place]) != _top_bits(want.tops[place]):
            return f"likeliest of token {place} are {got.tops[place]}, not {want.tops[place]}"
    return None


def _bits(logprob: float) -> bytes:
    """NaN equals itself, and 0.0 is not -0.0."""
    return struct.pack("<f", logprob)


def _top_bits(top: Top) -> list[tuple[int, bytes]]:
    return [(token_id, _bits(logprob)) for token_id, logprob in top]

"""While a version is tried, what is known of calls and steps reaches those who judge it; and only
then, for it costs something to know.

No HTTP and no JAX. Everything belongs to the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from jaxinfer.canary.facts import RequestFacts, ShadowFacts
    from jaxinfer.server.answered import Answered
    from jaxinfer.server.roster import Spawn
    from jaxinfer.server.served_model import ServedModel
    from jaxinfer.server.state import ServerState
    from jaxinfer.stats import Verdict


class Judge(Protocol):
    """Is told facts, of any version."""

    def note_request(self, facts: RequestFacts) -> None:
        """A choice has ended."""
        ...

    def note_verdict(self, verdict: Verdict) -> None:
        """A step was read, or failed."""
        ...

    def note_shadow(self, facts: ShadowFacts) -> None:
        """A prompt was computed by both versions."""
        ...


class Comparison(Protocol):
    """Asks both versions the same, and tells the judge; one for each trial."""

    def note(self, answered: Answered) -> None: ...
    async def close(self) -> None: ...


Compare = Callable[["ServedModel", "ServedModel", float, Judge], Comparison]
"""Of the stable model, the canary, and the share of the calls that both compute."""


class Listening:
    """Begins with a canary and ends with it.

    Args:
        compare: None: versions are not compared, whatever a plan says.
        spawn: runs something in the background.
    """

    def __init__(self, state: ServerState, *, compare: Compare | None, spawn: Spawn):
        self._state = state
        self._compare = compare
        self._spawn = spawn
        self._comparison: Comparison | None = None

    def begin(
        self, judge: Judge, *, stable: ServedModel, canary: ServedModel, shadow_share: float
    ) -> None:
        """From the next call and the next step on."""
        self._state.on_request = judge.note_request
        self._state.on_verdict = judge.note_verdict
        if self._compare is not None and shadow_share > 0.0:
            self._comparison = self._compare(stable, canary, shadow_share, judge)
            self._state.on_answered = self._comparison.note

    def end(self) -> None:
        """Nothing is told any more; may be called again."""
        self._state.on_request = self._state.on_verdict = self._state.on_answered = None
        if self._comparison is not None:
            self._spawn(self._comparison.close())
            self._comparison = None

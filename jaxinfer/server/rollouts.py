"""What turns an operator's order into a served version, and does what the rollout machine decides.

No HTTP and no JAX. Everything belongs to the event loop; weights are read on threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.async_engine import AsyncEngine
    from jaxinfer.canary.facts import RequestFacts, ShadowFacts
    from jaxinfer.engine import Engine
    from jaxinfer.new_version import NewVersion, VersionSource
    from jaxinfer.rollout import RolloutPlan
    from jaxinfer.rollout_log import RolloutLog
    from jaxinfer.server.served_model import ServedModel
    from jaxinfer.server.smoke import Recorded
    from jaxinfer.server.state import ServerState
    from jaxinfer.stats import Verdict
    from jaxinfer.version_order import VersionOrder

STANDBY_S = 600.0
OPEN_S = 10.0  # that a caller waits for a version to be found; a download goes on behind that
TICK_S = 0.25


class Rollouts:
    """At most one version comes at a time, beside the stable one and the one before it.

    `ServerState.rollouts` holds it once the model is ready. After a promotion the version before
    stands by, so that going back is a matter of routing, until the next load, `standby_s`, or
    `drop`.

    Args:
        state: of the server; its stable model must be there.
        order: where the stable version came from.
        source: where versions come from; None: this build has none, and `begin` says so.
        log: every decision goes there.
        make_engine: an AsyncEngine for a version that has an engine of its own, not started.
        make_model: what serves a version on an engine; may take long, runs on a thread.
        standby_s: how long a version stands by.
        clock, wall_clock: monotonic seconds; seconds since 1970, for the log.
    """

    def __init__(
        self,
        state: ServerState,
        order: VersionOrder,
        *,
        source: VersionSource | None,
        log: RolloutLog,
        make_engine: Callable[[Engine], AsyncEngine],
        make_model: Callable[[NewVersion, AsyncEngine], ServedModel],
        standby_s: float = STANDBY_S,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ): ...

    async def begin(
        self,
        order: VersionOrder,
        plan: RolloutPlan,
        *,
        recorded: Sequence[Recorded] = (),
        promotes_at_once: bool = False,
    ) -> None:
        """Loads a version in the background, tries it out and rolls it out by `plan`.

        Returns when it has been found and its headers fit, or after OPEN_S; the rest is told by
        `status`.

        Args:
            recorded: what it must say before it gets a call; none: it must say anything at all.
            promotes_at_once: all calls go to it as soon as it is there, and nothing is judged.
        Raises: Conflict while another one comes; InvalidRequest with param `model` for one that
            cannot be found or does not fit; Unavailable while the server shuts down.
        """
        ...

    async def promote(self, version: str) -> None:
        """All new calls go to the canary, or back to the one that stands by.

        Raises: InvalidRequest for a version that is not there; Conflict if it is stable, or is not
            ready to be served.
        """
        ...

    async def roll_back(self, version: str) -> None:
        """No new call goes to this version: a canary, one that still loads, or the stable one
        while the one before it stands by. Calls that began end where they began.

        Raises: InvalidRequest for a version that is not there; Conflict if there is none to go
            back to.
        """
        ...

    async def drop(self, version: str) -> None:
        """It gets no more calls; its memory is free when its last one has ended. Not waited for.

        Raises: InvalidRequest for a version that is not there; Conflict for the stable one.
        """
        ...

    async def reload(self, version: str, *, within_s: float) -> None:
        """Reads the stable version once more from where it came, in the background.

        It is put in place when no call has been open for a second, at most `within_s` seconds
        after it is read, and then anyway.

        Raises: as `begin`; InvalidRequest for a version that is not there; Conflict for one that
            is not stable.
        """
        ...

    def status(self) -> dict[str, Any]:
        """For people and programs, plain JSON:

        stable: its version.
        versions: [{version, role: stable | canary | standby | loading | leaving, root, share,
            calls, bytes, progress, lines}].
        rollout: {version, phase, stage, share, plan, evidence, reason} of the last one, or None.
        decisions: the last ones of this process, oldest first: {at, kind, by, reason, numbers}.
        pause: why new calls wait, or None.
        before_this_start: what the log says was under way when the last process ended, or None.
        """
        ...

    def note_request(self, facts: RequestFacts) -> None:
        """A choice has ended, of any version."""

    def note_verdict(self, verdict: Verdict) -> None:
        """A step was read, or failed, of any version."""

    def note_shadow(self, facts: ShadowFacts) -> None:
        """A prompt was computed by both versions."""

    async def close(self) -> None:
        """Ends what is under way; the engines of versions that have their own are closed."""

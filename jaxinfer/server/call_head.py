"""What the headers of a generation call say, before its body has come.

No engine. The body may still name another class and a shorter time.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.datastructures import Headers

from jaxinfer.server.priority_class import PriorityClass
from jaxinfer.server.priority_classes import PRIORITY_HEADER, Claim
from jaxinfer.server.served_model import QUICK_BODY_BYTES
from jaxinfer.server.state import ServerState
from jaxinfer.server.time_limits import TIMEOUT_HEADER, TimeLimits, asked_limits


@dataclass(frozen=True, slots=True)
class CallHead:
    """Of one call."""

    claim: Claim
    judged: PriorityClass  # by whose bounds it gets in, before its body has come
    limits: TimeLimits  # of the server and of the headers
    headers: Headers

    @classmethod
    def read(cls, headers: Headers, state: ServerState) -> CallHead:
        """Raises: InvalidRequest, Forbidden for a class or a time that cannot be."""
        claim = Claim.read(
            state.admission.classes,
            priority=headers.get(PRIORITY_HEADER),
            authorization=headers.get("authorization", ""),
        )
        # A short body is worth reading to see whether it asks for a class that has room.
        length = headers.get("content-length", "")
        is_short = length.isdecimal() and int(length) <= QUICK_BODY_BYTES
        judged = claim.best if is_short else claim.presumed
        limits = asked_limits(None, headers.get(TIMEOUT_HEADER))
        return cls(claim, judged, limits.within(state.time_limits(None)), headers)

    def limits_of(
        self, asked: PriorityClass, field: float | None, state: ServerState
    ) -> TimeLimits:
        """Those that count, with the class and the body's `timeout`. Raises: InvalidRequest."""
        return asked_limits(field, None).within(self.limits).within(state.time_limits(asked))

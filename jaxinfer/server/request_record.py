"""What is known of the HTTP request that is being answered, for every log line written meanwhile.

No HTTP, no logging. A record travels in a context variable: through awaits, new tasks and the
threads of `ServedModel.off_loop`.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass, field

# https://www.w3.org/TR/trace-context/: version, trace id, parent id, flags; later versions go on.
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?"
)

Fact = str | int | float


@dataclass(slots=True)
class RequestRecord:
    """One request. `facts` are its own: numbers and our own words, never text of a client."""

    request_id: str
    trace_id: str | None = None
    facts: dict[str, Fact] = field(default_factory=dict[str, Fact])
    version: str | None = None  # of the weights, once one is chosen

    def ids(self) -> dict[str, str]:
        """The ids that a log line carries."""
        trace = {} if self.trace_id is None else {"trace_id": self.trace_id}
        return {"request_id": self.request_id, **trace}


CURRENT: ContextVar[RequestRecord | None] = ContextVar("request_record", default=None)


def note(**facts: Fact | None) -> None:
    """Facts of the request that is being answered; None leaves one out."""
    record = CURRENT.get()
    if record is not None:
        record.facts.update({name: fact for name, fact in facts.items() if fact is not None})


def note_version(version: str) -> None:
    """The weights that answer the request: for the log, and for the header of the reply."""
    record = CURRENT.get()
    if record is not None:
        record.version = record.facts["version"] = version


def trace_id_of(traceparent: str) -> str | None:
    """The trace id of a W3C traceparent header; None if it is malformed."""
    match = _TRACEPARENT.fullmatch(traceparent)
    return match[1] if match else None

"""Classes of requests: who goes first, and what each kind may take of the server.

Pure data: how a request finds its class is priority_classes.py's business, what a class is refused
admission.py's.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PriorityClass:
    """One class. None: no bound of its own besides the server's."""

    name: str
    priority: int  # of the scheduler; lower runs first, and each step of it is worth AGING_S
    max_requests: int | None = None  # queued and running together
    timeout_s: float | None = None  # from arrival to the last token
    queue_timeout_s: float | None = None  # from arrival to the first step
    max_output_tokens: int | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # whose requests are of this class


DEFAULT_CLASSES = (
    PriorityClass("interactive", -1),
    PriorityClass("normal", 0),
    PriorityClass("batch", 1),
)
DEFAULT_CLASS = "normal"

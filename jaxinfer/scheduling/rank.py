"""Who comes first: a class of requests is worth some waiting.

Host only: no JAX.
"""

from __future__ import annotations

from jaxinfer.scheduling.request import Request

AGING_S = 30.0  # a class is worth this much waiting
Rank = tuple[float, int]
Turn = tuple[int, Rank]  # (size, rank)


def rank_of(request: Request, number: int) -> Rank:
    """Smaller is better; `number` of its submission makes it unique."""
    return (request.arrival_s + request.priority * AGING_S, number)


def aging_bound_s(priority: int, better: int) -> float:
    """Seconds after its arrival in which requests of a better class can still overtake one.

    So it waits at most this much longer than one of that class that arrived at the same time.
    """
    return (priority - better) * AGING_S

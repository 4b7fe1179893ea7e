"""Which form of a kernel runs.

Imports nothing of ours. Today every operation has its jnp reference form only; the Pallas forms
take their place behind the same public functions and the same `backend=` argument.
"""

from __future__ import annotations

from typing import Literal, get_args

Backend = Literal["reference"]


def resolve_backend(requested: str) -> Backend:
    """`auto` or a name -> the form to run. Raises ValueError for a form that does not exist."""
    if requested in ("auto", "reference"):
        return "reference"
    raise ValueError(
        f"kernel backend must be auto or one of {', '.join(get_args(Backend))}; got {requested!r}"
    )

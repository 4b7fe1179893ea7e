"""Which token may come next in an answer that follows a grammar, as the scheduling sees it.

No JAX, and no grammar library. A constraint is the state of one choice. It knows the tokens that
have been read and nothing else: so it stays right when its sequence is preempted, resumed, or
computed again after a failed step.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.int32]
"""[ceil(V / 32)]: bit i % 32 of word i // 32 is set if token i may come next."""


class Constraint(Protocol):
    """One choice's. It belongs to one thread at a time."""

    @property
    def is_complete(self) -> bool:
        """Whether the answer is whole and nothing may follow it."""
        ...

    def copy(self) -> Constraint:
        """Another state, which goes its own way from here."""
        ...

    def take(self, token_id: int) -> None:
        """Goes on by the token that was drawn.

        Raises: EngineFailure if `mask` did not admit it; InvalidRequest if the grammar asks for too
            much work.
        """
        ...

    def prepare(self) -> None:
        """Finds what may come next. To be called before a token is drawn.

        Raises: InvalidRequest if nothing may come, or if the grammar asks for too much work.
        """
        ...

    def mask(self, *, may_end: bool) -> Mask:
        """What may come next, as `prepare` has found it; not to be written.

        Args:
            may_end: False: without the end tokens, unless nothing else may come.
        """
        ...

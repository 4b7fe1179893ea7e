"""Teacher forcing through the ordinary engine: a constraint that admits a given text and no other.

No JAX. A request with it, `forced_sampling` and the beginning of a text as its prompt gives the
log-probability of each token that follows there, and the likeliest ones in its place, as the
request's version of the weights sees them: log-probabilities are taken before masks. Its steps are
those of any guided request, so it needs no program of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxinfer.config import MAX_TOP_LOGPROBS, SamplingParams
from jaxinfer.constraint import Mask
from jaxinfer.errors import EngineFailure, InvalidRequest


class Forced:
    """A `Constraint` that admits one token after another, and is complete after the last.

    An end token is one like the others: with `ignore_eos` it ends nothing.

    Args:
        token_ids: at least one.
        vocab_size: of the model.
    Raises: InvalidRequest for no token, or one outside of the vocabulary.
    """

    def __init__(self, token_ids: Sequence[int], vocab_size: int):
        self._token_ids, self._vocab_size = tuple(token_ids), vocab_size
        self._place = 0  # of the next token
        if not self._token_ids:
            raise InvalidRequest("a text to force must have at least 1 token; got none")
        for token_id in (min(self._token_ids), max(self._token_ids)):
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"a text to force must hold ids in [0, {vocab_size}); got {token_id}"
                )

    @property
    def is_complete(self) -> bool:
        return self._place == len(self._token_ids)

    def copy(self) -> Forced:
        copied = Forced(self._token_ids, self._vocab_size)
        copied._place = self._place
        return copied

    def take(self, token_id: int) -> None:
        if self.is_complete or token_id != self._token_ids[self._place]:
            wanted = "nothing" if self.is_complete else f"token {self._token_ids[self._place]}"
            raise EngineFailure(f"token {token_id} was drawn where {wanted} was admitted")
        self._place += 1

    def prepare(self) -> None:
        if self.is_complete:
            raise InvalidRequest("the forced text has ended; nothing may follow it")

    def mask(self, *, may_end: bool) -> Mask:
        token_id = self._token_ids[self._place]
        mask = np.zeros(-(-self._vocab_size // 32), np.int32)
        mask.view(np.uint32)[token_id // 32] = 1 << token_id % 32
        return mask


def forced_sampling(num_tokens: int) -> SamplingParams:
    """Of a request whose constraint forces so many tokens."""
    return SamplingParams(
        max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=MAX_TOP_LOGPROBS
    )

"""What a request must be before it is queued.

Host only: no JAX. Ranges of sampling parameters are checked where a SamplingParams is made; here is
what depends on the model and on the engine's limits.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from jaxinfer.errors import InvalidRequest
from jaxinfer.scheduling.length_limit import LengthLimit
from jaxinfer.scheduling.request import Request

MAX_PRIORITY = 1000


@dataclass(frozen=True, slots=True)
class RequestRules:
    """Of one engine."""

    vocab_size: int  # ids are below it
    limit: LengthLimit
    has_tokenizer: bool  # without one there is no text to find a stop string in

    def check(self, request: Request) -> None:
        """Raises: InvalidRequest naming the field; ContextLengthExceeded if it can never fit."""
        sampling = request.sampling
        if abs(request.priority) > MAX_PRIORITY:
            raise InvalidRequest(
                f"priority must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}; "
                f"got {request.priority}",
                param="priority",
            )
        if not request.token_ids:
            raise InvalidRequest("prompt must have at least 1 token; got none", param="prompt")
        # The length first: it costs nothing, however long the prompt is.
        self.limit.total_tokens(len(request.token_ids), sampling.max_tokens, sampling.binding_cap)
        self._check_ids("prompt", request.token_ids)
        self._check_ids("stop_token_ids", sampling.stop_token_ids)
        self._check_ids("logit_bias", (token_id for token_id, _ in sampling.bias_pairs))
        if sampling.guided is not None and request.constraint is None:
            raise InvalidRequest(
                "guided needs a compiled constraint; make one with Guidance.compile", param="guided"
            )
        if sampling.stop and not self.has_tokenizer:
            raise InvalidRequest(
                "stop strings need a tokenizer; use stop_token_ids here", param="stop"
            )

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        try:
            ids = array("i", token_ids)
        except (TypeError, OverflowError) as error:
            raise InvalidRequest(f"{name} must hold token ids: {error}", param=name) from error
        for token_id in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(
                    f"{name} must hold ids in [0, {self.vocab_size}); got {token_id}", param=name
                )

"""One choice of a request from its first token to its end: its text, and when it ends.

Host only: no JAX. The tokens themselves are the Sequence's; here they become text and a finish
reason.
"""

from __future__ import annotations

from jaxinfer.detokenizer import Detokenizer
from jaxinfer.errors import JaxInferError
from jaxinfer.outputs import RequestOutput, TokenLogprob
from jaxinfer.scheduling.request import FinishReason
from jaxinfer.scheduling.sequence import Sequence


class Choice:
    """Reads the tokens of a sequence as they come.

    An end token (EOS, unless ignore_eos, or one of stop_token_ids) ends the choice if at least
    min_tokens output tokens came before it; an earlier one is an ordinary token. With min_tokens=4
    and a model that says nothing but EOS, there are 4 tokens of output and the fifth ends it. The
    end token is counted among the output tokens, but its text is shown only with
    include_stop_str_in_output.

    Args:
        eos_token_ids: of the model.
        detokenizer: None: no text.
    """

    def __init__(
        self,
        sequence: Sequence,
        *,
        eos_token_ids: frozenset[int],
        detokenizer: Detokenizer | None,
    ):
        sampling = sequence.request.sampling
        self.sequence = sequence
        self._detokenizer = detokenizer
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._end_ids = self._stop_token_ids | (
            frozenset() if sampling.ignore_eos else eos_token_ids
        )
        self._min_tokens = sampling.min_tokens
        self._shows_stop = sampling.include_stop_str_in_output

    def take(self, logprobs: tuple[TokenLogprob, ...], now: float) -> RequestOutput:
        """What the sequence's newest token adds; with a finish reason if it is the last one."""
        sequence = self.sequence
        token_id = sequence.token_ids[-1]
        reason: FinishReason | None = None
        stop: str | int | None = None
        if token_id in self._end_ids and sequence.num_output_tokens > self._min_tokens:
            reason = FinishReason.STOP
            stop = token_id if token_id in self._stop_token_ids else None
            text = self._finish_text((token_id,) if self._shows_stop else ())
        else:
            text = self._detokenizer.push((token_id,)) if self._detokenizer else ""
            if self._stopped_by is None and len(sequence.token_ids) >= sequence.max_total_tokens:
                reason = FinishReason.LENGTH
                text += self._finish_text(())
            if self._stopped_by is not None:
                reason, stop = FinishReason.STOP, self._stopped_by
        return RequestOutput(
            request_id=sequence.request.request_id,
            index=sequence.index,
            text=text,
            token_ids=(token_id,),
            logprobs=logprobs,
            finish_reason=reason,
            stop=stop,
            stats=None if reason is None else sequence.stats(now),
        )

    def end(
        self, reason: FinishReason, now: float, error: JaxInferError | None = None
    ) -> RequestOutput:
        """The last output of a choice that ends without a new token.

        Text that was held back is released, except after an error.
        """
        return RequestOutput(
            request_id=self.sequence.request.request_id,
            index=self.sequence.index,
            text="" if reason is FinishReason.ERROR else self._finish_text(()),
            token_ids=(),
            logprobs=(),
            finish_reason=reason,
            stats=self.sequence.stats(now),
            error=error,
        )

    @property
    def _stopped_by(self) -> str | None:
        return self._detokenizer.stopped_by if self._detokenizer else None

    def _finish_text(self, token_ids: tuple[int, ...]) -> str:
        return self._detokenizer.finish(token_ids) if self._detokenizer else ""

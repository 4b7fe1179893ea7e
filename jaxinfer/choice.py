"""One choice of a request from its first token to its end: its text, and when it ends.

Host only: no JAX. The tokens themselves are the Sequence's; here they become text and a finish
reason.
"""

from __future__ import annotations

from jaxinfer.detokenizer import Detokenizer
from jaxinfer.errors import JaxInferError
from jaxinfer.outputs import RequestOutput, TokenLogprob, Truncation
from jaxinfer.scheduling.batch import StepResult
from jaxinfer.scheduling.request import FinishReason
from jaxinfer.scheduling.sequence import Sequence
from jaxinfer.text_cap import TextCap
from jaxinfer.versions import ModelVersion


class Choice:
    """Reads the tokens of a sequence as they come.

    An end token (EOS, unless ignore_eos, or one of stop_token_ids) ends the choice if at least
    min_tokens output tokens came before it; an earlier one is an ordinary token. With min_tokens=4
    and a model that says nothing but EOS, there are 4 tokens of output and the fifth ends it. The
    end token is counted among the output tokens, but its text is shown only with
    include_stop_str_in_output.

    Where output_cap ends it, its text may end before its last tokens (text_cap.py); they are
    counted, and have their logprobs.

    A grammar ends the choice with `stop` as soon as nothing may follow, also by an end token that
    ignore_eos or min_tokens would pass over.

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
        self.num_logprobs = sampling.logprobs
        self.num_taken = 0  # tokens: those of the sequence that were made outputs
        self._request_id, self._index = sequence.request.request_id, sequence.index
        self._detokenizer = detokenizer
        self._eos_token_ids = eos_token_ids
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._end_ids = self._stop_token_ids | (
            frozenset() if sampling.ignore_eos else eos_token_ids
        )
        self._min_tokens = sampling.min_tokens
        self._shows_stop = sampling.include_stop_str_in_output
        self._max_output = sampling.binding_cap
        self._cap: TextCap | None = None
        if detokenizer is not None and self._max_output and sampling.truncate == "sentence":
            self._cap = TextCap(self._max_output)

    @classmethod
    def of(cls, sequence: Sequence, found: ModelVersion) -> Choice:
        """`found`: the version of the sequence."""
        detokenizer = None
        if found.tokenizer is not None:
            request, sampling = sequence.request, sequence.request.sampling
            detokenizer = Detokenizer(
                found.tokenizer,
                prompt_ids=request.token_ids,
                skip_special_tokens=sampling.skip_special_tokens,
                stop=sampling.stop,
                include_stop_str_in_output=sampling.include_stop_str_in_output,
                min_tokens=sampling.min_tokens,
                kept_special_ids=sampling.kept_special_ids,
            )
        return cls(sequence, eos_token_ids=found.eos_token_ids, detokenizer=detokenizer)

    def logprobs_of(self, result: StepResult, row: int) -> tuple[TokenLogprob, ...]:
        """Of the token that was sampled in this row, as far as they were asked for."""
        num_top = self.num_logprobs
        if num_top is None:
            return ()
        top: tuple[tuple[int, float], ...] = ()
        if num_top and result.top_ids is not None and result.top_logprobs is not None:
            ids, values = result.top_ids[row, :num_top], result.top_logprobs[row, :num_top]
            top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return (TokenLogprob(int(result.token_ids[row]), float(result.logprobs[row]), top),)

    def take(self, token_id: int, logprobs: tuple[TokenLogprob, ...], now: float) -> RequestOutput:
        """What `token_id`, the sequence's newest, adds; with a finish reason if it is the last.

        Raises: JaxInferError if the sequence's grammar does not get past it.
        """
        sequence, detokenizer = self.sequence, self._detokenizer
        self.num_taken += 1
        if token_id in self._end_ids and sequence.num_output_tokens > self._min_tokens:
            stop = token_id if token_id in self._stop_token_ids else None
            text = self._finish_text((token_id,) if self._shows_stop else ())
            return self._last(text, token_id, logprobs, now, FinishReason.STOP, stop)
        is_complete = self._follow_grammar(token_id)
        text, stopped_by = "", None
        is_shown = not (is_complete and token_id in self._eos_token_ids)
        if detokenizer is not None and is_shown:
            text, stopped_by = detokenizer.push(token_id), detokenizer.stopped_by
        if stopped_by is None:
            if not is_complete and len(sequence.token_ids) < sequence.max_total_tokens:
                self._prepare_next()
                if self._cap is not None:
                    text = self._cap.push(text, sequence.num_output_tokens)
                return RequestOutput(self._request_id, self._index, text, (token_id,), logprobs)
            if detokenizer is not None:
                text += detokenizer.finish()
                stopped_by = detokenizer.stopped_by
        if self._cap is not None:
            text = self._cap.push(text, sequence.num_output_tokens)
        if stopped_by is None and not is_complete:
            return self._cut(text, token_id, logprobs, now)
        text += self._released()
        return self._last(text, token_id, logprobs, now, FinishReason.STOP, stopped_by)

    def _cut(
        self, text: str, token_id: int, logprobs: tuple[TokenLogprob, ...], now: float
    ) -> RequestOutput:
        """The end at the last token that may come."""
        is_capped = self.sequence.num_output_tokens == self._max_output
        if not is_capped:
            text += self._released()
        output = self._last(text, token_id, logprobs, now, FinishReason.LENGTH, None)
        if is_capped and self._max_output is not None:
            rest, at = ("", "token") if self._cap is None else self._cap.cut()
            output.text += rest
            output.truncation = Truncation(self._max_output, at)
        return output

    def _follow_grammar(self, token_id: int) -> bool:
        """Whether the grammar is complete with this token."""
        constraint = self.sequence.constraint
        if constraint is None:
            return False
        constraint.take(token_id)
        return constraint.is_complete

    def _prepare_next(self) -> None:
        if self.sequence.constraint is not None:
            self.sequence.constraint.prepare()

    def _last(
        self,
        text: str,
        token_id: int,
        logprobs: tuple[TokenLogprob, ...],
        now: float,
        reason: FinishReason,
        stop: str | int | None,
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self._request_id,
            index=self._index,
            text=text,
            token_ids=(token_id,),
            logprobs=logprobs,
            finish_reason=reason,
            stop=stop,
            stats=self.sequence.stats(now),
        )

    def end(
        self, reason: FinishReason, now: float, error: JaxInferError | None = None
    ) -> RequestOutput:
        """The last output of a choice that ends without a new token.

        Text that was held back is released, except after an error.
        """
        return RequestOutput(
            request_id=self._request_id,
            index=self._index,
            text="" if reason is FinishReason.ERROR else self._finish_text(()),
            token_ids=(),
            logprobs=(),
            finish_reason=reason,
            stats=self.sequence.stats(now),
            error=error,
        )

    def _finish_text(self, token_ids: tuple[int, ...]) -> str:
        text = self._detokenizer.finish(token_ids) if self._detokenizer else ""
        return self._released() + text

    def _released(self) -> str:
        return "" if self._cap is None else self._cap.release()

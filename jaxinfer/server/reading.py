"""The outputs of a call's prompts as one answer's, and how it ended.

No HTTP. What a choice ended with badly becomes the error that its client is told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxinfer.errors import DeadlineExceeded, EngineFailure, JaxInferError
from jaxinfer.scheduling.request import FinishReason
from jaxinfer.server.request_record import note
from jaxinfer.server.writers import Writer

if TYPE_CHECKING:
    from jaxinfer.outputs import RequestOutput
    from jaxinfer.request_stream import RequestStream
    from jaxinfer.server.answered import Account


class Reading:
    """Outputs of a call's prompts, with the index of the choice in the whole answer.

    Args:
        on_tokens: told how many tokens have come.
    """

    def __init__(
        self,
        stream: RequestStream,
        writer: Writer,
        n: int,
        *,
        on_tokens: Callable[[int], None] = lambda _: None,
    ):
        self.writer = writer
        self._on_tokens = on_tokens
        self._account: Account | None = None
        self._stream = stream
        self._n = n
        self._failure: JaxInferError | None = None
        self._first_token_s: float | None = None  # of the choices that have ended
        self._ends: set[FinishReason] = set()

    @property
    def failure(self) -> JaxInferError | None:
        """What has ended a choice badly."""
        return self._failure

    @property
    def is_aborted(self) -> bool:
        """Whether a choice was ended before it was done, as its caller asked."""
        return FinishReason.ABORT in self._ends

    async def next(self, timeout_s: float | None) -> list[tuple[int, RequestOutput]] | None:
        """[] after `timeout_s` of silence, None at the end.

        Raises: what ended a choice badly, after the outputs that came before it.
        """
        if self._failure is not None:
            raise self._failure
        outputs = await self._read(timeout_s)
        if outputs is None:
            return None
        self._on_tokens(sum(len(output.token_ids) for output in outputs))
        good: list[tuple[int, RequestOutput]] = []
        for output in outputs:
            self._note_end(output)
            self._failure = failure_of(output)
            if self._failure is not None:
                break
            good.append((self._index(output), output))
        if self._failure is not None and not good:
            raise self._failure
        return good

    async def _read(self, timeout_s: float | None) -> tuple[RequestOutput, ...] | None:
        try:
            return await self._stream.read(timeout_s)
        except JaxInferError as error:
            self._failure = error
            if self._account is not None:
                self._account.fail(error)
            raise

    def tell(self, account: Account | None) -> None:
        """From here on, of every output; None: nobody listens."""
        self._account = account

    def close(self) -> None:
        """Nothing more is read: all has been, or something failed, or the client went away."""
        if self._account is not None and self._failure is None:
            self._account.leave()

    def note(self, arrival_s: float) -> None:
        """For the access log: what the call took and gave, and how it ended."""
        first_s = self._first_token_s
        note(
            id=self.writer.id,
            prompt_tokens=self.writer.tally.prompt,
            output_tokens=self.writer.tally.completion,
            ttft_s=None if first_s is None else first_s - arrival_s,
            finish="+".join(sorted(self._ends)) or FinishReason.ABORT.value,
        )

    def _note_end(self, output: RequestOutput) -> None:
        if self._account is not None:
            self._account.take(output)
        if output.finish_reason is not None:
            self._ends.add(output.finish_reason)
        if output.stats is not None and output.stats.first_token_s is not None:
            times = (self._first_token_s, output.stats.first_token_s)
            self._first_token_s = min(s for s in times if s is not None)

    def _index(self, output: RequestOutput) -> int:
        prompt = int(output.request_id.rpartition("-")[2])
        return prompt * self._n + output.index


def failure_of(output: RequestOutput) -> JaxInferError | None:
    """The error of a choice that ended neither by stop nor by length, nor as its caller asked."""
    reason = output.finish_reason
    if reason in (None, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT):
        return None
    if output.error is not None:
        return output.error
    if reason is FinishReason.TIMEOUT:
        return DeadlineExceeded("the request's time limit passed before it was finished")
    return EngineFailure(f"the request was ended by the engine ({reason})")

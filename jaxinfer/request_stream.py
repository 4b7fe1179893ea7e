"""What the requests of one caller have gained and nobody has read yet.

Host only: no JAX, no threads; everything here happens on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from jaxinfer.errors import JaxInferError
from jaxinfer.observer import Observer
from jaxinfer.outputs import RequestOutput, TokenLogprob
from jaxinfer.scheduling.request import Request

MAX_UNREAD_TOKENS = 256


class RequestStream:
    """The outputs of one or several requests, read by one task.

    Unread outputs of one choice are merged into one, so that at most sum(n) of them wait. Closing
    it, or losing the last reference to it, aborts what has not ended.

    Args:
        on_close, on_loss: told which requests have not ended.
        on_full: the same, when more than max_unread_tokens for each choice wait to be read.
        on_empty: the same, when they have been read after that.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        on_close: Callable[[Sequence[str]], None],
        on_loss: Callable[[Sequence[str]], None],
        on_full: Callable[[Sequence[str]], None] | None = None,
        on_empty: Callable[[Sequence[str]], None] | None = None,
        max_unread_tokens: int = MAX_UNREAD_TOKENS,
        observer: Observer | None = None,
    ):
        self._arrival_s = {r.request_id: r.arrival_s for r in requests}
        self._version = {r.request_id: r.version or "" for r in requests}
        self._choices_left = {r.request_id: r.sampling.n for r in requests}
        self._to_accept = set(self._choices_left)
        self._on_close = on_close
        self._on_loss = on_loss
        self._on_full, self._on_empty = on_full, on_empty
        self._max_unread_tokens = max_unread_tokens * sum(self._choices_left.values())
        self._num_unread_tokens = 0
        self._is_paused = False
        self._observer = observer
        self._unread: dict[tuple[str, int], _Gain] = {}
        self._last_token_s: dict[tuple[str, int], float] = {}
        self._error: JaxInferError | None = None
        self._is_closed = False
        self._changed = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    async def accepted(self) -> None:
        """Returns when the engine has taken every request. Raises what it refused one with."""
        while self._to_accept and not self._is_closed and self._error is None:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error

    async def read(self, timeout_s: float | None = None) -> tuple[RequestOutput, ...] | None:
        """Everything that came since the last call; waits for something to come.

        Returns: () after `timeout_s` of silence, None at the end or when closed.
        Raises: the JaxInferError that ended the stream, after all outputs before it.
        """
        if not self._has_news and not await self._wait_for_news(timeout_s):
            return ()
        if self._unread and not self._is_closed:
            gains, self._unread = self._unread, {}
            self._note_read()
            return tuple(gain.output() for gain in gains.values())
        if self._error is not None:
            raise self._error
        return None

    def _note_read(self) -> None:
        self._num_unread_tokens = 0
        if self._is_paused and self._on_empty is not None:
            self._is_paused = False
            self._on_empty(tuple(self._choices_left))

    async def _wait_for_news(self, timeout_s: float | None) -> bool:
        """Returns: whether there are any. A timer is cheaper than a task that waits."""
        timer = None
        is_over = False

        def end() -> None:
            nonlocal is_over
            is_over = True
            self._changed.set()

        if timeout_s is not None:
            timer = asyncio.get_running_loop().call_later(timeout_s, end)
        try:
            while not (self._has_news or is_over):
                self._changed.clear()
                await self._changed.wait()
        finally:
            if timer is not None:
                timer.cancel()
        return self._has_news

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        try:
            while (outputs := await self.read()) is not None:
                for output in outputs:
                    yield output
        finally:
            self.close()

    def close(self) -> None:
        """Aborts what has not ended and wakes the reader. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._unread.clear()
        self._changed.set()
        if self._choices_left:
            self._on_close(tuple(self._choices_left))

    def __del__(self) -> None:
        if not self._is_closed and self._choices_left:
            self._on_loss(tuple(self._choices_left))

    # ---- for AsyncEngine

    def accept(self, request_id: str) -> None:
        self._to_accept.discard(request_id)
        self._changed.set()

    def fail(self, error: JaxInferError) -> None:
        """The reader gets `error` when it has read what came before."""
        self._error = self._error or error
        self._changed.set()

    def push(self, output: RequestOutput, now_s: float) -> bool:
        """Takes an output. Returns whether its request has now ended."""
        key = (output.request_id, output.index)
        self._to_accept.discard(output.request_id)
        self._observe(key, len(output.token_ids), now_s)
        gain = self._unread.get(key)
        if gain is None:
            self._unread[key] = _Gain(output)
        else:
            gain.add(output)
        self._changed.set()
        if output.finish_reason is None:
            self._note_unread(len(output.token_ids))
            return False
        self._last_token_s.pop(key, None)
        self._choices_left[output.request_id] -= 1
        if self._choices_left[output.request_id]:
            return False
        del self._choices_left[output.request_id]
        return True

    def _note_unread(self, num_tokens: int) -> None:
        self._num_unread_tokens += num_tokens
        is_full = self._num_unread_tokens > self._max_unread_tokens
        if is_full and not self._is_paused and self._on_full is not None:
            self._is_paused = True
            self._on_full(tuple(self._choices_left))

    def _observe(self, key: tuple[str, int], num_tokens: int, now_s: float) -> None:
        if not num_tokens or self._observer is None:
            return
        last_s = self._last_token_s.get(key)
        self._last_token_s[key] = now_s
        if last_s is not None:
            self._observer.on_gap(now_s - last_s, num_tokens, self._version[key[0]])
        elif key[1] == 0:
            ttft_s = now_s - self._arrival_s[key[0]]
            self._observer.on_first_token(ttft_s, self._version[key[0]])

    @property
    def _has_news(self) -> bool:
        return bool(
            self._unread or self._error is not None or self._is_closed or not self._choices_left
        )


class _Gain:
    """Unread outputs of one choice, merged."""

    __slots__ = ("_last", "_logprobs", "_texts", "_token_ids")

    def __init__(self, first: RequestOutput):
        self._last = first
        self._texts: list[str] | None = None  # None: only `_last` so far
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def add(self, output: RequestOutput) -> None:
        if self._texts is None:
            self._texts = [self._last.text]
            self._token_ids.extend(self._last.token_ids)
            self._logprobs.extend(self._last.logprobs)
        self._texts.append(output.text)
        self._token_ids.extend(output.token_ids)
        self._logprobs.extend(output.logprobs)
        self._last = output

    def output(self) -> RequestOutput:
        if self._texts is None:
            return self._last
        last = self._last
        return RequestOutput(
            request_id=last.request_id,
            index=last.index,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=last.finish_reason,
            stop=last.stop,
            stats=last.stats,
            error=last.error,
            truncation=last.truncation,
        )

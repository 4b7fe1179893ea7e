"""How long an idle engine waits for company before it begins with what has come.

Host only, pure: time is an argument. Only arrivals at an idle engine are gathered, so that requests
that come nearly together share one prefill step instead of the first going alone. A running engine
never waits: what arrives meanwhile is in its next step anyway (vLLM does not gather at all).
"""

from __future__ import annotations

from jaxinfer.scheduling.request import Request


class BatchWindow:
    """One window at a time.

    Args:
        wait_s: at most so long after the first arrival; 0: never wait.
        max_tokens, max_seqs: what fills a step, so that waiting longer brings nothing.
    """

    def __init__(self, wait_s: float = 0.0, *, max_tokens: int = 1, max_seqs: int = 1):
        self._wait_s = wait_s
        self._max_tokens, self._max_seqs = max_tokens, max_seqs
        self._num_tokens = self._num_seqs = 0
        self._until_s: float | None = None  # None: nothing has arrived

    def open(self) -> None:
        """The engine is idle; whatever arrives first begins a window."""
        self._num_tokens = self._num_seqs = 0
        self._until_s = None

    def add(self, request: Request, now_s: float) -> None:
        """A request has arrived."""
        self._num_tokens += len(request.token_ids)
        self._num_seqs += request.sampling.n
        if self._until_s is None:
            self._until_s = now_s + self._wait_s

    def left_s(self, now_s: float) -> float:
        """How much longer to wait for others; 0: begin."""
        is_full = self._num_tokens >= self._max_tokens or self._num_seqs >= self._max_seqs
        if is_full or self._until_s is None:
            return 0.0
        return max(self._until_s - now_s, 0.0)

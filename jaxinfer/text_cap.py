"""The end of a text that a cap on its tokens cuts: at the end of a sentence, if one is near.

Host only: no JAX, no tokens: text comes in as it becomes safe to show. Nothing is held until the
cap is near. In the window before it the text behind the last end of a sentence is held back, and
dropped if the cap comes first; so a stream and a whole reply read the same.

    #  tokens | ...................... opens_at |<-------- window -------->| cap
    #  text   | shown                           | to the last end | held   |
"""

from __future__ import annotations

from typing import Literal

from jaxinfer.sentence_end import SentenceEnds

CutAt = Literal["sentence", "line", "token"]
WINDOW_TOKENS = 64  # before the cap, or half of the cap if that is less


class TextCap:
    """Shows the text of one choice.

    With no end of a sentence in the window, the text ends with the last whole line of a code block
    that the cap cuts (nothing closes the block: the fence would be no text of the model, and a
    reader closes an open block at the end of the text), else wherever the cap comes.

    Args:
        max_output_tokens: the cap.
    """

    def __init__(self, max_output_tokens: int):
        self._opens_at = max_output_tokens - min(WINDOW_TOKENS, max_output_tokens // 2)
        self._ends = SentenceEnds()
        self._before: list[str] = []  # not yet looked at
        self._start = -1  # characters before the window; -1: it is not open
        self._num_shown = 0
        self._held = ""

    def push(self, text: str, num_output_tokens: int) -> str:
        """Adds what token number `num_output_tokens`, counted from 1, made final.

        Returns: what may be shown.
        """
        if num_output_tokens <= self._opens_at:
            self._before.append(text)
            return text
        if self._start < 0:
            self._open()
        self._ends.feed(text)
        self._held += text
        return self._show(self._certain())

    def release(self) -> str:
        """What was held; for a text that ends in another way."""
        held, self._held = self._held, ""
        return held

    def cut(self) -> tuple[str, CutAt]:
        """The last text before the cap, and how it ends."""
        if self._start < 0:
            self._open()
        ends = self._ends
        ends.finish()
        if ends.sentence >= self._start:
            return self._show(ends.sentence), "sentence"
        if ends.line >= self._start:
            return self._show(ends.line), "line"
        return self.release(), "token"

    def _open(self) -> None:
        text = "".join(self._before)
        self._before.clear()
        self._ends.feed(text)
        self._start = self._num_shown = len(text)

    def _certain(self) -> int:
        """Characters that the cap cannot drop."""
        start, ends = self._start, self._ends
        if ends.sentence >= start:
            return ends.sentence
        if ends.line >= start:
            return ends.line
        end = self._num_shown + len(self._held)
        return min((place for place in ends.possible if place >= start), default=end)

    def _show(self, end: int) -> str:
        num_new = end - self._num_shown
        text, self._held = self._held[:num_new], self._held[num_new:]
        self._num_shown = end
        return text

"""What a parser gives: content and parts of calls, in the order in which the model said them.

Pure: no text is judged here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class CallDelta:
    """A call begins (with id and name, no arguments yet), or its arguments go on."""

    index: int  # of the call in the answer
    arguments: str = ""  # JSON text, as the model wrote it
    id: str | None = None
    name: str | None = None


Piece = str | CallDelta  # str: content


class Ledger:
    """Collects pieces; what belongs together and comes together is one piece.

    Args:
        new_id: of a call.
        max_calls: later calls are left out; None: none is.
    """

    def __init__(self, new_id: Callable[[], str], max_calls: int | None):
        self._new_id = new_id
        self._max_calls = max_calls
        self._pieces: list[Piece] = []
        self._parts: list[str] = []  # of the newest content or arguments
        self._part_of: int | None = None  # the call that they belong to; None: content
        self.has_said = False  # content
        self.num_begun = 0
        self.num_ended = 0

    def say(self, text: str) -> None:
        """Content."""
        if text:
            self.has_said = True
            self._add(None, text)

    def begin(self, name: str) -> None:
        """A call, whose arguments follow."""
        self._close()
        if not self._is_left_out(self.num_begun):
            self._pieces.append(CallDelta(self.num_begun, id=self._new_id(), name=name))
        self.num_begun += 1

    def argue(self, text: str) -> None:
        """Arguments of the newest call."""
        if not self._is_left_out(self.num_begun - 1):
            self._add(self.num_begun - 1, text)

    def end(self) -> None:
        """The newest call is whole."""
        self.num_ended += 1

    def take(self) -> list[Piece]:
        """The pieces since the last time."""
        self._close()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _add(self, call: int | None, text: str) -> None:
        if self._part_of != call:
            self._close()
        self._part_of = call
        self._parts.append(text)

    def _close(self) -> None:
        if self._parts:
            text = "".join(self._parts)
            piece = text if self._part_of is None else CallDelta(self._part_of, text)
            self._pieces.append(piece)
            self._parts.clear()

    def _is_left_out(self, call: int) -> bool:
        return self._max_calls is not None and call >= self._max_calls

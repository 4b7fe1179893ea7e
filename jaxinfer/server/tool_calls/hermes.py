"""<tool_call>{"name": "f", "arguments": {…}}</tool_call>, one or more: Hermes 2 Pro, Qwen2.5,
Qwen3 and what was trained after them.

Pure. The closing mark may be missing: models leave it out at the end.
"""

from __future__ import annotations

from jaxinfer.server.tool_calls.json_call import BLANKS, CallObject, Verdict
from jaxinfer.server.tool_calls.parser import Section, ToolParser
from jaxinfer.server.tool_calls.pieces import Ledger

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    opening = OPEN
    marks = (OPEN, CLOSE)

    def _open(self, mark: str) -> Section:
        return _Call(self._ledger)


class _Call:
    """Blanks, one object, the closing mark, blanks."""

    def __init__(self, ledger: Ledger):
        self._object = CallObject(ledger)
        self._has_begun = False
        self._closing = ""  # of CLOSE, so far

    @property
    def is_whole(self) -> bool:
        return self._object.is_whole

    def take(self, char: str) -> Verdict:
        if self._object.is_whole:
            return self._close(char)
        if not self._has_begun and char in BLANKS:
            return Verdict.MORE
        self._has_begun = True
        return self._object.take(char)

    def _close(self, char: str) -> Verdict:
        is_closed = self._closing == CLOSE
        if char in BLANKS and (is_closed or not self._closing):
            return Verdict.MORE
        if is_closed:
            return Verdict.DONE
        if not CLOSE.startswith(self._closing + char):
            return Verdict.BAD if self._closing else Verdict.DONE
        self._closing += char
        return Verdict.SETTLED if self._closing == CLOSE else Verdict.MORE

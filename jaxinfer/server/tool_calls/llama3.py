"""{"name": "f", "parameters": {…}} as the whole answer, or behind <|python_tag|>: Llama 3.1 to 3.3.

Pure. Without the tag only a function that was offered counts, since an answer may be JSON that is
no call. Several calls are separated by "; " or blanks.
"""

from __future__ import annotations

from jaxinfer.server.tool_calls.call_objects import CallObjects
from jaxinfer.server.tool_calls.json_call import BLANKS, Verdict
from jaxinfer.server.tool_calls.parser import Section, ToolParser

TAG = "<|python_tag|>"


class Llama3Parser(ToolParser):
    opening = TAG
    marks = (TAG,)
    _is_at_start = True

    def _starts_section(self, text: str) -> bool:
        begins = self._is_at_start and text.lstrip().startswith("{")
        self._is_at_start = self._is_at_start and not text.strip()
        return begins

    def _open(self, mark: str) -> Section:
        return _Calls(self._ledger, None if mark else self._names)


class _Calls(CallObjects):
    """Objects, separated by a semicolon or blanks."""

    def _between(self, char: str) -> Verdict:
        if char in BLANKS:
            return Verdict.MORE
        if self._expects_object:
            return Verdict.BAD
        self._expects_object = char == ";"
        return Verdict.MORE if char == ";" else Verdict.DONE

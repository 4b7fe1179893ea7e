"""{"name": "f", "parameters": {…}} as the whole answer, or behind <|python_tag|>: Llama 3.1 to 3.3.

Pure. Without the tag only a function that was offered counts, since an answer may be JSON that is
no call. Several calls are separated by "; " or blanks.
"""

from __future__ import annotations

from jaxinfer.server.tool_calls.json_call import BLANKS, CallObject, Verdict
from jaxinfer.server.tool_calls.parser import Section, ToolParser
from jaxinfer.server.tool_calls.pieces import Ledger

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


class _Calls:
    """Objects, separated by a semicolon or blanks."""

    def __init__(self, ledger: Ledger, names: frozenset[str] | None):
        self._ledger = ledger
        self._names = names
        self._object: CallObject | None = None
        self._num_whole = 0
        self._expects_object = True

    @property
    def is_whole(self) -> bool:
        return self._num_whole > 0 and self._object is None

    def take(self, char: str) -> Verdict:
        if self._object is None:
            if char != "{":
                return self._between(char)
            self._object, self._expects_object = CallObject(self._ledger, self._names), False
        verdict = self._object.take(char)
        if verdict is not Verdict.BAD and self._object.is_whole:
            self._object = None
            self._num_whole += 1
        return verdict

    def _between(self, char: str) -> Verdict:
        if char in BLANKS:
            return Verdict.MORE
        if self._expects_object:
            return Verdict.BAD
        self._expects_object = char == ";"
        return Verdict.MORE if char == ";" else Verdict.DONE

"""[TOOL_CALLS] [{"name": "f", "arguments": {…}}, …]: Mistral 7B v0.3, Nemo, Small 2409; and
[TOOL_CALLS]f[ARGS]{…} for each call, also with [CALL_ID]… or without [ARGS]: the later ones.

Pure. Which of the two it is shows in the first character.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Sequence
from typing import Any

from jaxinfer.server.tool_calls.call_objects import CallObjects
from jaxinfer.server.tool_calls.json_call import BLANKS, MAX_NAME, JsonText, Verdict
from jaxinfer.server.tool_calls.parser import Section, ToolParser
from jaxinfer.server.tool_calls.pieces import Ledger

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
ID_LENGTH = 9
_HEAD = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*", re.ASCII)
_HEAD_START = re.compile(r"[\w.-]+(?:\[[\w\[\]]*)?\s*", re.ASCII)


def new_id() -> str:
    """Nine letters and digits, as the templates demand."""
    return uuid.uuid4().hex[:ID_LENGTH]


def with_short_ids(messages: Sequence[Any]) -> list[Any]:
    """Messages whose ids of calls are such ids: one made elsewhere is replaced, everywhere alike.

    What is malformed stays, for others to refuse.
    """
    return [_with_short_ids(m) if isinstance(m, dict) else m for m in messages]


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    changed = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short(message["tool_call_id"])
    if isinstance(message.get("tool_calls"), list):
        changed["tool_calls"] = [
            {**call, "id": _short(call["id"])}
            if isinstance(call, dict) and isinstance(call.get("id"), str)
            else call
            for call in message["tool_calls"]
        ]
    return changed


def _short(call_id: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9]{9}", call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:ID_LENGTH]


class MistralParser(ToolParser):
    opening = CALLS
    marks = (CALLS, ARGS, CALL_ID)

    def _open(self, mark: str) -> Section:
        return _Calls(self._ledger)


class _Calls:
    """Blanks, then a list or a name."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._section: Section | None = None

    @property
    def is_whole(self) -> bool:
        return self._section is not None and self._section.is_whole

    def take(self, char: str) -> Verdict:
        if self._section is not None:
            return self._section.take(char)
        if char in BLANKS:
            return Verdict.MORE
        if char == "[":
            self._section = _List(self._ledger)
            return Verdict.MORE
        self._section = _Named(self._ledger)
        return self._section.take(char)


class _List(CallObjects):
    """What follows the bracket: objects and commas, a bracket, blanks."""

    _is_closed = False

    def _begins_object(self, char: str) -> bool:
        return super()._begins_object(char) and self._expects_object

    def _between(self, char: str) -> Verdict:
        if char in BLANKS:
            return Verdict.MORE
        if self._is_closed:
            return Verdict.DONE
        if self._expects_object or char not in ",]":
            return Verdict.BAD
        self._expects_object, self._is_closed = char == ",", char == "]"
        return Verdict.SETTLED if self._is_closed else Verdict.MORE


class _Named:
    """A name and marks, the arguments, blanks."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._head = ""
        self._arguments: JsonText | None = None

    @property
    def is_whole(self) -> bool:
        return self._arguments is not None and self._arguments.is_whole

    def take(self, char: str) -> Verdict:
        if self._arguments is None:
            if char != "{":
                return self._name(char)
            head = _HEAD.fullmatch(self._head)
            if head is None:
                return Verdict.BAD
            self._ledger.begin(head[1])
            self._arguments = JsonText()
        if self._arguments.is_whole:
            return Verdict.MORE if char in BLANKS else Verdict.DONE
        if not self._arguments.take(char):
            return Verdict.BAD
        self._ledger.argue(char)
        if self._arguments.is_whole:
            self._ledger.end()
        return Verdict.SETTLED

    def _name(self, char: str) -> Verdict:
        self._head += char
        fits = len(self._head) <= MAX_NAME and _HEAD_START.fullmatch(self._head)
        return Verdict.MORE if fits else Verdict.BAD

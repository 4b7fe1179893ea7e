"""JSON as it comes, one character at a time: is it still JSON, and which call does it make.

Pure. Strict as RFC 8259 is: whatever is accepted here is accepted by every reader of the arguments.
"""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Literal

from jaxinfer.server.tool_calls.pieces import Ledger

BLANKS = " \t\n\r"
MAX_NAME = 256  # characters
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_CALL_KEYS = ARGUMENT_KEYS | {"name", "type", "id"}
_MAX_SCALAR = 64  # characters of a number: none that means something is longer
_WORDS = ("true", "false", "null")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_START = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:(?<=[0-9])[eE][+-]?[0-9]*)?)?")

State = Literal["value", "item", "key", "first key", "colon", "after", "string", "scalar"]


class Verdict(Enum):
    """Of one character."""

    MORE = "taken; nothing is decided"
    SETTLED = "taken; all so far is part of calls"
    DONE = "not taken; what came before is whole"
    BAD = "not taken; it does not fit"


class JsonText:
    """One JSON object."""

    def __init__(self) -> None:
        self.state: State = "value"
        self._open: list[str] = []  # brackets that are to be closed
        self._string: list[str] = []  # the raw text of the string at hand
        self._escape: str | None = None  # what follows a backslash, so far
        self._is_key = False
        self._scalar = ""

    @property
    def depth(self) -> int:
        return len(self._open)

    @property
    def is_whole(self) -> bool:
        return not self._open and self.state == "after"

    @property
    def string(self) -> str:
        """The last string, read."""
        return json.loads(f'"{"".join(self._string)}"')

    def take(self, char: str) -> bool:
        """Whether `char` may follow; once it may not, the text is of no more use."""
        if self.state == "string":
            return self._in_string(char)
        if self.state == "scalar":
            if char not in ",]}" and char not in BLANKS:
                return self._in_scalar(char)
            if self._scalar not in _WORDS and not _NUMBER.fullmatch(self._scalar):
                return False
            self.state = "after"
        return char in BLANKS or self._between(char)

    def _between(self, char: str) -> bool:
        if char == '"' and self.state != "after" and self.state != "colon":
            self._is_key = self.state in ("key", "first key")
            self._string, self.state = [], "string"
            return bool(self._open)
        match self.state:
            case "value" | "item":
                return self._begins(char)
            case "colon":
                self.state = "value"
                return char == ":"
            case "after" if char == "," and self._open:
                self.state = "key" if self._open[-1] == "}" else "value"
                return True
            case "after" | "first key":
                return self._closes(char)
            case _:
                return False

    def _begins(self, char: str) -> bool:
        if char == "{":
            self._open.append("}")
            self.state = "first key"
            return True
        if char == "[" and self._open:
            self._open.append("]")
            self.state = "item"
            return True
        if char == "]" and self.state == "item":
            return self._closes(char)
        self._scalar, self.state = "", "scalar"
        return bool(self._open) and self._in_scalar(char)

    def _closes(self, char: str) -> bool:
        self.state = "after"
        return bool(self._open) and self._open.pop() == char

    def _in_scalar(self, char: str) -> bool:
        self._scalar += char
        if len(self._scalar) > _MAX_SCALAR:
            return False
        is_word = any(word.startswith(self._scalar) for word in _WORDS)
        return is_word or _NUMBER_START.fullmatch(self._scalar) is not None

    def _in_string(self, char: str) -> bool:
        if self._escape is not None:
            return self._in_escape(char)
        if char == '"':
            self.state = "colon" if self._is_key else "after"
            return True
        if char == "\\":
            self._escape = ""
        self._note(char)
        return char >= " "

    def _in_escape(self, char: str) -> bool:
        self._note(char)
        self._escape = f"{self._escape}{char}"
        if self._escape in '"\\/bfnrt':
            self._escape = None
            return True
        is_hex = self._escape[0] == "u" and all(
            c in "0123456789abcdefABCDEF" for c in self._escape[1:]
        )
        if len(self._escape) == 5:
            self._escape = None
        return is_hex

    def _note(self, char: str) -> None:
        if len(self._open) == 1:  # deeper ones are not asked for
            self._string.append(char)


class CallObject:
    """{"name": "f", "arguments": {…}}, or "parameters", in any order; other keys mean nothing.
    With `names` it is not known whether this is a call at all: a key that no call has, or a name
    that is none of them, is BAD at once.

    The call begins in the ledger as soon as its name and the first character of its arguments are
    there; the arguments follow as they come.

    Args:
        names: of functions that may be called; None: any.
    """

    def __init__(self, ledger: Ledger, names: frozenset[str] | None = None):
        self._ledger = ledger
        self._names = names
        self._json = JsonText()
        self._key = ""
        self._name: str | None = None
        self._unsaid: list[str] = []  # arguments that came before the name
        self._has_arguments = False
        self._is_in_arguments = False
        self._has_begun = False

    @property
    def is_whole(self) -> bool:
        return self._json.is_whole

    def take(self, char: str) -> Verdict:
        """MORE, SETTLED or BAD; `is_whole` when the object has closed."""
        state, depth = self._json.state, self._json.depth
        is_value = depth == 1 and state == "value" and char not in BLANKS
        if (is_value and not self._may_begin(char)) or not self._json.take(char):
            return Verdict.BAD
        if is_value and self._key in ARGUMENT_KEYS:
            self._is_in_arguments = self._has_arguments = True
        if self._is_in_arguments:
            self._is_in_arguments = self._json.depth > 1
            self._unsaid.append(char)
            return self._argue()
        if depth == 1 and state == "string" and self._json.state != "string":
            return self._read_string()
        if self._json.is_whole:
            return self._end()
        return Verdict.MORE

    def _may_begin(self, char: str) -> bool:
        if self._key == "name":
            return char == '"' and self._name is None
        if self._key in ARGUMENT_KEYS:
            return char == "{" and not self._has_arguments
        return True

    def _read_string(self) -> Verdict:
        if self._json.state == "colon":
            self._key = self._json.string
            is_meant = self._names is None or self._key in _CALL_KEYS
            return Verdict.MORE if is_meant else Verdict.BAD
        if self._key != "name":
            return Verdict.MORE
        self._name = self._json.string
        is_known = self._names is None or self._name in self._names
        is_name = self._name.isprintable() and 0 < len(self._name) <= MAX_NAME
        if not (is_known and is_name):
            return Verdict.BAD
        return self._argue()

    def _argue(self) -> Verdict:
        if self._name is None or not self._has_arguments:
            return Verdict.MORE
        if not self._has_begun:
            self._has_begun = True
            self._ledger.begin(self._name)
        self._ledger.argue("".join(self._unsaid))
        self._unsaid.clear()
        return Verdict.SETTLED

    def _end(self) -> Verdict:
        if not self._has_begun:
            return Verdict.BAD
        self._ledger.end()
        return Verdict.SETTLED

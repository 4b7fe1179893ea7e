"""The way of every parser: content until a mark, a section behind it, content again.

Pure. The pieces joined are the same for any split of the text into pushes. Held back is only what
may be the beginning of a mark (blanks before one belong to it) and, inside a section, what is no
call yet. A section that turns out to be none is content, character for character; once a call has
begun it stays begun, and only what does not fit any more is content.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import ClassVar, Protocol

from jaxinfer.server.tool_calls.json_call import Verdict
from jaxinfer.server.tool_calls.pieces import Ledger, Piece


class Section(Protocol):
    """What follows an opening mark."""

    def take(self, char: str) -> Verdict: ...

    @property
    def is_whole(self) -> bool:
        """Whether the text may end here: calls are there, and none is half."""
        ...


class ToolParser(ABC):
    """Reads the text of one choice.

    Args:
        names: of the functions that may be called.
        hidden: those of `marks` that are control tokens here; no client sees them.
        new_id: of a call.
        max_calls: later calls are left out; None: none is.
    """

    opening: ClassVar[str]  # the mark before calls
    marks: ClassVar[tuple[str, ...]]  # all that the format has

    def __init__(
        self,
        *,
        names: Collection[str],
        hidden: Collection[str],
        new_id: Callable[[], str],
        max_calls: int | None = None,
    ):
        self._names = frozenset(names)
        self._hidden = frozenset(hidden)
        self._sought = (self.opening, *(self._hidden - {self.opening}))
        self._ledger = Ledger(new_id, max_calls)
        self._section: Section | None = None
        self._lead = ("", "")  # blanks and mark that opened the section, while it is no call
        self._held = ""  # outside a section: what may begin a mark
        self._taken: list[str] = []  # inside: what is no part of a call (yet)

    def push(self, text: str) -> list[Piece]:
        """What `text` adds."""
        self._feed(text)
        return self._ledger.take()

    def finish(self) -> list[Piece]:
        """The text has ended: what was held, except marks after a whole call."""
        while self._section is not None:
            is_whole = self._section.is_whole
            left = self._give_back()
            if not is_whole:
                self._feed(left)
        self._ledger.say(self._held)
        self._held = ""
        return self._ledger.take()

    @property
    def has_whole_calls(self) -> bool:
        """At least one call was made, and none is half."""
        return 0 < self._ledger.num_begun == self._ledger.num_ended

    @abstractmethod
    def _open(self, mark: str) -> Section:
        """The section behind `mark`."""

    def _starts_section(self, text: str) -> bool:
        """Whether the whole text, beginning with `text`, opens a section without a mark."""
        return False

    def _feed(self, text: str) -> None:
        while text:
            text = self._outside(text) if self._section is None else self._inside(text)

    def _outside(self, text: str) -> str:
        """Returns: what is left for the section that opens."""
        text, self._held = self._held + text, ""
        if self._starts_section(text):
            self._begin("", "")
            return text
        place, mark = self._find(text)
        before = text[:place]
        if not mark:
            keep = len(before.rstrip())
            self._ledger.say(before[:keep])
            self._held = text[keep:]
            return ""
        rest = text[place + len(mark) :]
        if mark != self.opening:
            self._ledger.say(before)
            return rest
        content = before.rstrip()
        self._ledger.say(content)
        self._begin(before[len(content) :], mark)
        return rest

    def _begin(self, blanks: str, mark: str) -> None:
        self._lead, self._section = (blanks, mark), self._open(mark)

    def _find(self, text: str) -> tuple[int, str]:
        """The first mark and its place; without one, "" and where one may have begun."""
        found = [(text.find(mark), mark) for mark in self._sought]
        whole = min(((place, mark) for place, mark in found if place >= 0), default=None)
        if whole is not None:
            return whole
        longest = max(map(len, self._sought)) - 1
        for place in range(max(0, len(text) - longest), len(text)):
            if any(mark.startswith(text[place:]) for mark in self._sought):
                return place, ""
        return len(text), ""

    def _inside(self, text: str) -> str:
        """Returns: what follows the section."""
        section = self._section
        assert section is not None
        for place, char in enumerate(text):
            verdict = section.take(char)
            if verdict is Verdict.MORE:
                self._taken.append(char)
            elif verdict is Verdict.SETTLED:
                self._taken.clear()
                self._lead = ("", "")
            elif verdict is Verdict.DONE:
                blanks = self._give_back()
                return (blanks if self._ledger.has_said else "") + text[place:]
            else:
                return self._give_back() + text[place:]
        return ""

    def _give_back(self) -> str:
        """Closes the section. Returns: what was taken and is no part of a call."""
        blanks, mark = self._lead
        self._ledger.say(blanks if mark in self._hidden else blanks + mark)
        taken = "".join(self._taken)
        self._section, self._lead = None, ("", "")
        self._taken.clear()
        return taken

"""Several calls one behind the other, each a JSON object. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxinfer.server.tool_calls.json_call import CallObject, Verdict
from jaxinfer.server.tool_calls.pieces import Ledger


class CallObjects(ABC):
    """A Section of them; what stands between two is the format's.

    Args:
        names: the functions that count; None: any.
    """

    def __init__(self, ledger: Ledger, names: frozenset[str] | None = None):
        self._ledger, self._names = ledger, names
        self._object: CallObject | None = None  # the one that is being read
        self._num_whole = 0
        self._expects_object = True

    @property
    def is_whole(self) -> bool:
        return self._num_whole > 0 and self._object is None

    def take(self, char: str) -> Verdict:
        if self._object is None:
            if not self._begins_object(char):
                return self._between(char)
            self._object, self._expects_object = CallObject(self._ledger, self._names), False
        verdict = self._object.take(char)
        if verdict is not Verdict.BAD and self._object.is_whole:
            self._object = None
            self._num_whole += 1
        return verdict

    def _begins_object(self, char: str) -> bool:
        return char == "{"

    @abstractmethod
    def _between(self, char: str) -> Verdict: ...

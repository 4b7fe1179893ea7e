"""The calls that are being answered, by the names under which their callers may end them.

No engine: what ends a call is a callback. Everything here happens on one event loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence

from starlette.datastructures import Headers
from starlette.types import Scope

from jaxinfer.server.edge import KEY_DIGEST

MAX_NAME = 128  # characters


class OpenCall:
    """One call, from its parsed body to its last byte."""

    def __init__(self, owner: str):
        self.owner = owner
        self._is_aborted = False
        self._callback: Callable[[], None] | None = None

    def on_abort(self, callback: Callable[[], None]) -> None:
        """`callback` is called once the call is to end; at once if it is so already."""
        self._callback = callback
        if self._is_aborted:
            callback()

    def abort(self) -> bool:
        """Returns: whether this is the first time."""
        is_first, self._is_aborted = not self._is_aborted, True
        if is_first and self._callback is not None:
            self._callback()
        return is_first


class OpenCalls:
    """Who is being answered. Several calls may bear one name (a client's own, sent again)."""

    def __init__(self) -> None:
        self._by_name: dict[str, list[OpenCall]] = {}

    def __len__(self) -> int:
        """Names that are in use."""
        return len(self._by_name)

    @contextlib.contextmanager
    def open(self, names: Sequence[str], owner: str) -> Generator[OpenCall]:
        """A call that is known by `names` inside the block.

        Args:
            owner: of the key that it came with; only it may end the call.
        """
        call = OpenCall(owner)
        for name in names:
            self._by_name.setdefault(name, []).append(call)
        try:
            yield call
        finally:
            for name in names:
                calls = self._by_name[name]
                calls.remove(call)
                if not calls:
                    del self._by_name[name]

    def abort(self, name: str, owner: str | None) -> int:
        """Ends the calls of this name and owner (None: of any).

        Returns: how many; 0 for a name that is not known, or another owner's.
        """
        known = list(self._by_name.get(name, ()))
        return sum(call.abort() for call in known if owner is None or call.owner == owner)


def names_of(scope: Scope) -> tuple[str, ...]:
    """The x-request-id that the client sent, if it can be a name."""
    name = Headers(scope=scope).get("x-request-id", "")
    return (name,) if 0 < len(name) <= MAX_NAME else ()


def owner_of(scope: Scope) -> str:
    """The digest of the key that a call came with; "" where no key was needed."""
    return scope.get("state", {}).get(KEY_DIGEST, "")

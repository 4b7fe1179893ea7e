"""What the event loop asks of the engine thread, and what of it waits while the engine is held.

Host only: no JAX, no asyncio of its own. `send` and `wake` belong to the event loop, the rest to
the engine thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxinfer.scheduling.request import Request

if TYPE_CHECKING:
    import asyncio

    from jaxinfer.engine import Engine


@dataclass(frozen=True, slots=True)
class Submit:
    """A request begins."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """It ends."""

    request_id: str
    tells_reader: bool = False  # else the stream is closed, and nobody reads


@dataclass(frozen=True, slots=True)
class Pause:
    """It stands still: its reader is slow."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Resume:
    """It goes on."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Change:
    """Something is done between two steps."""

    change: Callable[[Engine], Any]
    done: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class Hold:
    """All that lives ends, then nothing is done until it is over."""

    is_still: asyncio.Future[None]
    is_over: threading.Event


Errand = Submit | Abort | Pause | Resume | Change
Message = Errand | Hold


class Inbox:
    """Messages in the order of their sending. What a hold has kept waiting comes first after it."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._wakeup = threading.Event()
        self._hold: Hold | None = None
        self._aside: deque[Message] = deque()  # what waits for its end
        self._ids_aside: set[str] = set()

    def send(self, *messages: Message) -> None:
        """Wakes who waits."""
        self._messages.extend(messages)
        self._wakeup.set()

    def wake(self) -> None:
        """There is something to look at that is no message."""
        self._wakeup.set()

    @property
    def hold(self) -> Hold | None:
        """That has begun and is not over."""
        return self._hold

    @property
    def is_empty(self) -> bool:
        """Whether nothing is there, but for what waits aside."""
        return not self._messages

    def wait(self, timeout_s: float) -> None:
        """Until something comes, or has come since the last call."""
        self._wakeup.wait(timeout_s)
        self._wakeup.clear()

    def take(self) -> Iterator[Errand]:
        """All that is there, and what comes meanwhile. With a `Hold` among it a hold begins."""
        while self._messages:
            message = self._messages.popleft()
            if self._hold is not None and self._has_to_wait(message):
                self._aside.append(message)
            elif isinstance(message, Hold):
                self._hold = message
            else:
                yield message

    def end_hold(self) -> None:
        """What has waited is there again."""
        self._hold = None
        self._messages.extendleft(reversed(self._aside))
        self._aside.clear()
        self._ids_aside.clear()
        self._wakeup.set()  # whatever has been taken as the sign of the end

    def left(self) -> list[Message]:
        """What nobody takes any more, after the engine thread has ended."""
        return [*self._aside, *self._messages]

    def _has_to_wait(self, message: Message) -> bool:
        """For the end of the hold: what is new, and what is about something new."""
        if isinstance(message, Submit):
            self._ids_aside.add(message.request.request_id)
            return True
        return isinstance(message, Change | Hold) or message.request_id in self._ids_aside

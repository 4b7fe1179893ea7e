"""Two works of a start side by side, on threads: the first error ends the other, too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

First = TypeVar("First")
Second = TypeVar("Second")


class _Ended(Exception):
    """Of a work that was ended because of the other."""


class Together:
    """Runs two functions at once. They call `check` every now and then."""

    def __init__(self) -> None:
        self._has_failed = threading.Event()

    def check(self, *_: object) -> None:
        """Ends the work that calls it, by an exception, when the other has failed."""
        if self._has_failed.is_set():
            raise _Ended

    def run(self, first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
        """Returns: both results. Raises: what one of them raised, when both have ended."""
        with ThreadPoolExecutor(2, thread_name_prefix="start") as pool:
            one, two = pool.submit(first), pool.submit(second)
            try:
                wait((one, two), return_when=FIRST_EXCEPTION)
            finally:  # also of an interrupt from the keyboard
                if not (_is_good(one) and _is_good(two)):
                    self._has_failed.set()
        errors = [error for error in (one.exception(), two.exception()) if error is not None]
        for error in errors:
            if not isinstance(error, _Ended):
                raise error
        return one.result(), two.result()


def _is_good(future: Future[object]) -> bool:
    return future.done() and future.exception() is None

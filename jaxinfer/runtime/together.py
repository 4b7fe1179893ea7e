"""Two works of a start side by side, on threads: the first error ends the other, too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

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
            futures: list[Future[Any]] = [one, two]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:  # also of an interrupt from the keyboard
                if not all(map(_is_good, futures)):
                    self._has_failed.set()
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None and not isinstance(error, _Ended):
                raise error
        return one.result(), two.result()


def _is_good(future: Future[Any]) -> bool:
    return future.done() and future.exception() is None

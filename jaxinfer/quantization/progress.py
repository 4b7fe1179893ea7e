"""Bars on stderr, where that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def bar(name: str, total: int, *, is_shown: bool) -> Generator[Callable[[], None]]:
    """Yields what is to be called after each part."""
    with tqdm(total=total, desc=name, disable=None if is_shown else True) as shown:

        def advance() -> None:
            shown.update(1)

        yield advance

"""Work of minutes, on daemon threads that can be left alone.

No HTTP and no JAX. Everything but the work belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class LongWork:
    """A signal while a compiler or a download is at work must not wait for it, so these threads are
    none of an executor, which would join them.
    """

    def __init__(self) -> None:
        self._at_work: set[object] = set()

    @property
    def is_busy(self) -> bool:
        """Whether a thread is at work, though nobody may wait for it any more."""
        return bool(self._at_work)

    async def run(
        self,
        name: str,
        work: Callable[[], Result],
        *,
        unwanted: Callable[[Result], None] = lambda result: None,
    ) -> Result:
        """Runs `work` on a thread of its own.

        Args:
            name: of the thread.
            unwanted: told what came of it when nobody waits any more; on a thread, too.
        Raises: what it raises; what is no Exception as a RuntimeError.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()

        def leave(result: Result) -> None:
            self._start(name, lambda: unwanted(result))

        def settle(result: Result) -> None:
            if done.done():
                leave(result)
            else:
                done.set_result(result)

        def fail(error: Exception) -> None:
            if not done.done():
                done.set_exception(error)

        self._start(name, work, settle=settle, fail=fail)
        try:
            return await done
        except asyncio.CancelledError:
            if not done.cancelled() and done.exception() is None:  # both at once
                leave(done.result())
            raise

    def _start(
        self,
        name: str,
        work: Callable[[], Result],
        *,
        settle: Callable[[Result], None] = lambda result: None,
        fail: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """`settle` or `fail` is called on the event loop, when the thread counts no more."""
        loop = asyncio.get_running_loop()
        me = object()
        self._at_work.add(me)

        def tell(function: Callable[..., None], value: object) -> None:
            self._at_work.discard(me)
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(function, value)

        def body() -> None:
            try:
                result = work()
            except BaseException as raised:
                is_plain = isinstance(raised, Exception)
                tell(fail, raised if is_plain else RuntimeError(repr(raised)))
            else:
                tell(settle, result)

        threading.Thread(target=body, name=name, daemon=True).start()

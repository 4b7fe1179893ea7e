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
            unwanted: told what came of it when nobody waits any more.
        Raises: what it raises; what is no Exception as a RuntimeError.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()

        def tell(finish: Callable[[], None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(finish)

        me = object()
        self._at_work.add(me)

        def at_work() -> Result:
            try:
                return work()
            finally:
                self._at_work.discard(me)

        def body() -> None:
            try:
                result = at_work()
            except BaseException as raised:
                error = raised if isinstance(raised, Exception) else RuntimeError(repr(raised))
                tell(lambda: None if done.done() else done.set_exception(error))
            else:
                tell(lambda: unwanted(result) if done.done() else done.set_result(result))

        threading.Thread(target=body, name=name, daemon=True).start()
        try:
            return await done
        except asyncio.CancelledError:
            if not done.cancelled() and done.exception() is None:  # both at once
                unwanted(done.result())
            raise

"""One engine on a thread of its own, driven from asyncio.

Host only: no JAX, no HTTP. The engine thread is the only one that touches the `Engine`; requests
and aborts reach it through an inbox, outputs come back in one `call_soon_threadsafe` per step. What
a reader has not taken yet is merged, one entry per choice, so that a slow reader holds no more than
its own text (idea: vLLM's RequestOutputCollector); and one that has too much of it is paused.

    event loop:     submit, close -> inbox            RequestStream.read <- _deliver
    engine thread:  inbox -> Engine.submit/abort -> Engine.step -> call_soon_threadsafe(_deliver)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from jaxinfer.batch_window import BatchWindow
from jaxinfer.engine_inbox import Abort, Change, Hold, Inbox, Pause, Resume, Submit
from jaxinfer.errors import EngineFailure, JaxInferError, Unavailable
from jaxinfer.observer import Observer
from jaxinfer.request_stream import MAX_UNREAD_TOKENS, RequestStream
from jaxinfer.scheduling.request import Request
from jaxinfer.stats import PoolStats, StepStats, Verdict

if TYPE_CHECKING:
    from jaxinfer.engine import Engine
    from jaxinfer.outputs import EngineStep, RequestOutput

log = logging.getLogger(__name__)

IDLE_TURN_S = 1.0  # an idle thread looks this often, should a wake-up be missed
CHANGE_WITHIN_S = 30.0
RETRY_AFTER_S = 5.0  # told to those who come while the engine drains or after it died
Result = TypeVar("Result")


class AsyncEngine:
    """Submits to, reads from and ends one `Engine`. All methods belong to the event loop that
    called `start`.

    Args:
        engine: used by the engine thread only, from `start` on.
        observer: told what happened.
        max_unread_tokens: for each choice of a stream; with more of them its requests are paused,
            until all are read.
        window: gathers what arrives while the engine is idle; None: no waiting.
        on_verdict: told, on the event loop, of each step: that it was read, or that it failed.
        clock: seconds; the one that `engine` uses.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        observer: Observer | None = None,
        max_unread_tokens: int = MAX_UNREAD_TOKENS,
        window: BatchWindow | None = None,
        on_verdict: Callable[[Verdict], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._engine = engine
        self._observer = observer
        self._max_unread_tokens = max_unread_tokens
        self._window = window or BatchWindow()
        self._on_verdict = on_verdict
        self.clock = clock
        self._inbox = Inbox()
        self._held: Hold | None = None  # as the event loop knows it
        self._stopping = False
        self._draining = False
        self._failure: BaseException | None = None
        self._streams: dict[str, weakref.ref[RequestStream]] = {}  # a lost stream must die
        self._drained = asyncio.Event()
        self._busy_since_s: float | None = None  # None: it waits for work
        self._pool = engine.pool_stats()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the engine thread; call it on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, *requests: Request) -> RequestStream:
        """Hands the requests of one caller over; they end together when their stream is closed.

        Returns: the stream of their outputs. What `Engine.submit` refuses is raised by its
            `accepted` or first `read`.
        Raises: Unavailable while draining or when the engine has died.
        """
        self._check_open()
        for request in requests:
            if request.request_id in self._streams:
                raise ValueError(f"request id {request.request_id!r} is in use")
        stream = RequestStream(
            requests,
            on_close=self._abort,
            on_loss=self._abort_soon,
            on_full=self._pause,
            on_empty=self._resume,
            max_unread_tokens=self._max_unread_tokens,
            observer=None if any(r.is_shadow for r in requests) else self._observer,
        )
        for request in requests:
            self._streams[request.request_id] = weakref.ref(stream)
        self._inbox.send(*map(Submit, requests))
        return stream

    def abort(self, request_id: str) -> None:
        """Ends the stream of this request and all that was submitted with it; unknown ids are
        ignored.
        """
        stream = self._stream(request_id)
        if stream is not None:
            stream.close()

    async def change(self, change: Callable[[Engine], Result]) -> Result:
        """Runs `change` on the engine thread, between two steps; it must be quick.

        Returns: what it returns. Raises: what it raises; Unavailable while draining, or when the
            engine has died or takes CHANGE_WITHIN_S.
        """
        self._check_open()
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._inbox.send(Change(change, done))
        try:
            return await asyncio.wait_for(done, CHANGE_WITHIN_S)
        except TimeoutError:
            raise Unavailable(
                f"the engine did not answer in {CHANGE_WITHIN_S:g} s", retry_after_s=RETRY_AFTER_S
            ) from None

    async def hold(self, within_s: float) -> Engine:
        """Lets what lives end, then stands still until `release`. Nobody is refused meanwhile: new
        requests and changes wait, and their deadlines run on. For one caller at a time.

        Returns: the engine, which is the caller's alone: no sequence lives, no step is under way.
        Raises: Unavailable as `change`, and if requests still live after `within_s`; then all goes
            on as before.
        """
        self._check_open()
        assert self._held is None, "it is held already"
        held = self._held = Hold(asyncio.get_running_loop().create_future(), threading.Event())
        self._inbox.send(held)
        try:
            await asyncio.wait_for(held.is_still, within_s)
        except TimeoutError:
            self.release()
            raise Unavailable(
                f"requests have not ended within {within_s:g} s", retry_after_s=RETRY_AFTER_S
            ) from None
        except BaseException:
            self.release()
            raise
        return self._engine

    def release(self) -> None:
        """Goes on after `hold`, with all that has waited; does nothing if it is not held."""
        if self._held is not None:
            self._held.is_over.set()
            self._held = None
            self._inbox.wake()

    async def flush_cache(self) -> int:
        """See Engine.flush_cache. Raises: as `change`."""
        return await self.change(lambda engine: engine.flush_cache())

    def end(self, *request_ids: str) -> None:
        """Ends requests; their reader gets what they had, and `abort` as the finish reason.
        Unknown ids are ignored.
        """
        open_ids = (i for i in request_ids if i in self._streams)
        self._inbox.send(*(Abort(request_id, tells_reader=True) for request_id in open_ids))

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return self._engine.vocab_size

    @property
    def pool_stats(self) -> PoolStats:
        """As of the end of the last step."""
        return self._pool

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._failure is None

    @property
    def seconds_in_turn(self) -> float:
        """Since the engine thread began the turn that it is in. Large: a step hangs. 0.0: it waits
        for work.
        """
        since_s = self._busy_since_s
        return 0.0 if since_s is None else self.clock() - since_s

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for the open ones; after `timeout_s` aborts what is left.

        Returns: whether all ended by themselves.
        """
        self._draining = True
        if self._streams:
            self._drained.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), timeout_s)
        left = self._open_streams()
        for stream in left:
            stream.fail(Unavailable("the server shuts down", retry_after_s=RETRY_AFTER_S))
            stream.close()
        return not left

    async def close(self) -> None:
        """Ends the engine thread after its current step; open streams get Unavailable."""
        await self.drain(0.0)
        self._stopping = True
        self.release()
        self._inbox.wake()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, 30.0)
        if not self._thread.is_alive():
            error = Unavailable("the server shuts down", retry_after_s=RETRY_AFTER_S)
            self._fail_changes(error)

    def _check_open(self) -> None:
        if self._failure is not None or not self._thread.is_alive():
            raise Unavailable("the engine has stopped; see the server's log", retry_after_s=60.0)
        if self._draining:
            raise Unavailable("the server shuts down", retry_after_s=RETRY_AFTER_S)

    def _abort(self, request_ids: Sequence[str]) -> None:
        """From a stream that was closed before its end."""
        for request_id in request_ids:
            if self._streams.pop(request_id, None) is not None:
                self._inbox.send(Abort(request_id))
        self._note_drained()

    def _abort_soon(self, request_ids: Sequence[str]) -> None:
        """From a stream that nobody refers to any more; the collector may run on any thread."""
        self._call(self._abort, request_ids)

    def _pause(self, request_ids: Sequence[str]) -> None:
        """From a stream with too much unread."""
        self._inbox.send(*map(Pause, request_ids))

    def _resume(self, request_ids: Sequence[str]) -> None:
        """From a paused stream that has been read."""
        self._inbox.send(*map(Resume, request_ids))

    def _stream(self, request_id: str) -> RequestStream | None:
        reference = self._streams.get(request_id)
        return None if reference is None else reference()

    def _open_streams(self) -> set[RequestStream]:
        return {s for s in map(self._stream, list(self._streams)) if s is not None}

    def _note_drained(self) -> None:
        if not self._streams:
            self._drained.set()

    # ---- on the engine thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                try:
                    self._turn()
                except EngineFailure:  # it could not recover
                    raise
                except Exception as error:  # a fault of ours outside of a step
                    self._engine.recover(error)
        except BaseException as error:  # whatever it was, nobody may wait for ever
            log.exception("the engine thread died")
            self._failure = error
            self._call(self._fail_all, error)

    def _turn(self) -> None:
        if self._inbox.hold is not None:
            self._keep_holding(self._inbox.hold)
            if self._stopping:
                return
        is_idle = not self._engine.has_work()
        if is_idle:
            self._busy_since_s = None
            self._window.open()
            self._inbox.wait(IDLE_TURN_S)
        self._busy_since_s = self.clock()
        self._take_inbox()
        if is_idle:
            self._gather()
        if self._engine.has_work() or self._engine.has_requests:  # deadlines of the paused run on
            self._step()

    def _keep_holding(self, hold: Hold) -> None:
        """Stands still as soon as nothing lives, and until the end of it."""
        if not (hold.is_over.is_set() or self._engine.has_requests):
            while not self._engine.is_still:
                self._step()
            self._busy_since_s = None
            self._pool = self._engine.pool_stats()
            self._call(_fulfil, hold.is_still, None)
            hold.is_over.wait()
        if hold.is_over.is_set():
            self._inbox.end_hold()

    def _gather(self) -> None:
        """Waits for company of what came first, unless it has been aborted; takes aborts at once.

        A deadline of milliseconds may pass meanwhile, as it may in any step.
        """
        while self._engine.has_work() and not self._stopping:
            left_s = self._window.left_s(self.clock())
            if not left_s:
                break
            self._inbox.wait(left_s)
            self._take_inbox()

    def _take_inbox(self) -> None:
        accepted: list[str] = []
        refused: list[tuple[str, JaxInferError]] = []
        changed = not self._inbox.is_empty
        try:
            for message in self._inbox.take():
                if not isinstance(message, Submit):
                    self._take(message)
                    continue
                error = self._submit(message.request)
                if error is None:
                    accepted.append(message.request.request_id)
                else:
                    refused.append((message.request.request_id, error))
        finally:
            if changed:
                self._call(self._answer, accepted, refused)
        if changed:
            self._pool = self._engine.pool_stats()

    def _take(self, message: Abort | Pause | Resume | Change) -> None:
        if isinstance(message, Change):
            self._change(message)
        elif isinstance(message, Pause):
            self._engine.pause(message.request_id)
        elif isinstance(message, Resume):
            self._engine.resume(message.request_id)
        else:
            outputs = self._engine.abort(message.request_id)
            self._observe_ends(outputs)
            if message.tells_reader:
                self._pool = self._engine.pool_stats()
                self._call(self._deliver, outputs, self.clock())

    def _change(self, message: Change) -> None:
        """What it raises is its caller's."""
        try:
            result = message.change(self._engine)
        except Exception as error:
            self._call(_fail, message.done, error)
        else:
            self._call(_fulfil, message.done, result)

    def _submit(self, request: Request) -> JaxInferError | None:
        """Returns: why the engine refuses it. One odd request must not end the thread."""
        try:
            self._engine.submit(request)
            self._window.add(request, self.clock())
        except JaxInferError as error:
            return error
        except Exception as error:
            log.exception("request %s could not be submitted", request.request_id)
            return EngineFailure(f"submission failed: {type(error).__name__}: {error}")
        return None

    def _step(self) -> None:
        step = self._engine.step()
        try:
            self._pool = self._engine.pool_stats()
        finally:  # whatever happens, nobody waits for what is there
            self._observe(step)
            self._observe_ends(step.outputs)
            if self._on_verdict is not None and (step.stats is not None or step.failed_versions):
                self._call(self._judge, step.stats, step.failed_versions)
            if step.outputs:
                self._call(self._deliver, step.outputs, self.clock())

    def _observe(self, step: EngineStep) -> None:
        observer = self._observer
        if observer is None:
            return
        try:
            if step.failed_versions:
                observer.on_retry(step.num_retried)
            if step.rebuild_s is not None:
                observer.on_rebuild(step.rebuild_s)
            if step.stats is not None:
                observer.on_step(step.stats, self._pool)
        except Exception:  # a fault of the observer's is none of the engine
            log.exception("a step could not be noted")

    def _observe_ends(self, outputs: Sequence[RequestOutput]) -> None:
        if self._observer is None:
            return
        for output in outputs:
            stats, reason = output.stats, output.finish_reason
            if reason is not None and stats is not None and not stats.is_shadow:
                try:
                    self._observer.on_finish(stats, reason)
                except Exception:
                    log.exception("the end of %s could not be noted", output.request_id)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        if self._loop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop was closed before the engine
            self._loop.call_soon_threadsafe(function, *args)

    # ---- back on the event loop

    def _answer(self, accepted: list[str], refused: list[tuple[str, JaxInferError]]) -> None:
        for request_id in accepted:
            stream = self._stream(request_id)
            if stream is not None:
                stream.accept(request_id)
        for request_id, error in refused:
            stream = self._stream(request_id)
            if stream is not None:
                del self._streams[request_id]
                stream.fail(error)
                stream.close()
        self._note_drained()

    def _deliver(self, outputs: tuple[RequestOutput, ...], now_s: float) -> None:
        for output in outputs:
            stream = self._stream(output.request_id)
            if stream is not None and stream.push(output, now_s):
                del self._streams[output.request_id]
        self._note_drained()

    def _judge(self, stats: StepStats | None, failed_versions: tuple[str, ...]) -> None:
        """What was read in a turn comes before what failed."""
        assert self._on_verdict is not None
        if stats is not None:
            self._on_verdict(Verdict(stats.version, stats))
        for version in failed_versions:
            self._on_verdict(Verdict(version, None))

    def _fail_all(self, error: BaseException) -> None:
        failure = EngineFailure(f"the engine stopped: {type(error).__name__}: {error}")
        for stream in self._open_streams():
            stream.fail(failure)
        self._streams.clear()
        self._note_drained()
        if self._held is not None:
            _fail(self._held.is_still, failure)
        self._fail_changes(failure)

    def _fail_changes(self, error: JaxInferError) -> None:
        """Those that nobody makes any more."""
        for message in self._inbox.left():
            if isinstance(message, Change):
                _fail(message.done, error)


def _fulfil(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():  # nobody waits any more
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)

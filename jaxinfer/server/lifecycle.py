"""From a bound port to a clean exit: loading -> ready -> draining.

The port is open before the model is there, so that a loading server answers 503 with a reason. The
model is built on a thread by a function that serve.py passes in; nothing here knows JAX.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from contextvars import Context
from types import FrameType
from typing import TYPE_CHECKING, TextIO

import uvicorn

from jaxinfer.server.app import create_app
from jaxinfer.server.bound_port import bind
from jaxinfer.server.build_contract import Build, Built
from jaxinfer.server.connection import protocol
from jaxinfer.server.growth_alarm import GrowthAlarm
from jaxinfer.server.long_work import LongWork
from jaxinfer.server.memory_watch import MemoryWatch
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.rollout_wiring import make_rollouts
from jaxinfer.server.serve_model import ModelServing
from jaxinfer.server.settings import ServeSettings
from jaxinfer.server.shadow_file import ShadowFile
from jaxinfer.server.startup import (
    EXIT_LOAD_ERROR,
    EXIT_OK,
    Voice,
    class_lines,
    exit_code_of,
    exposure,
    one_line,
    ready_lines,
    route_line,
)
from jaxinfer.server.state import ServerState
from jaxinfer.server.status_line import StatusLine

if TYPE_CHECKING:
    from jaxinfer.async_engine import AsyncEngine

log = logging.getLogger(__name__)

STATUS_EVERY_S = 10.0
WATCH_EVERY_S = 1.0
KEEP_ALIVE_S = 65  # longer than clients and balancers wait, so that they close first
FLUSH_S = 2.0  # at least, after the last stream has ended, for the last bytes to leave


def serve(
    settings: ServeSettings, build: Build, *, intro: str = "", out: TextIO = sys.stderr
) -> int:
    """Serves until a signal.

    Args:
        intro: said first, such as the resolved configuration.
    Returns: the exit code: 0 clean, 1 load error, 2 bad configuration.
    """
    voice = Voice(out, as_log=settings.log_format == "json")
    if intro:
        voice.say(intro)
    try:
        listener = bind(settings.host, settings.port)
    except (OSError, UnicodeError) as error:
        voice.complain(f"cannot listen on {settings.host}:{settings.port}: {error}")
        return EXIT_LOAD_ERROR
    with listener:
        return _Serving(settings, build, listener, voice).run()


class _UvicornServer(uvicorn.Server):
    """Hands signals over instead of closing the port at once; a second one ends the process."""

    def __init__(self, config: uvicorn.Config, on_signal: Callable[[], None]):
        super().__init__(config)
        self._on_signal = on_signal
        self._is_signalled = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._is_signalled:
            os._exit(128 + sig)
        self._is_signalled = True
        self._on_signal()


class _Serving:
    """One run of the server."""

    def __init__(
        self, settings: ServeSettings, build: Build, listener: socket.socket, voice: Voice
    ):
        self._settings = settings
        self._build = build
        self._listener = listener
        self._say = voice.say
        self._complain = voice.complain
        self._start_s = time.monotonic()
        self._exit_code = EXIT_OK
        self._work = LongWork()
        label = next(iter(settings.served_model_names), settings.engine.source.model)
        self._metrics = Metrics(label)
        self._state = ServerState(
            settings.limits,
            self._metrics,
            api_keys=settings.api_keys,
            classes=settings.classes,
            num_seats=settings.engine.scheduler.max_num_seqs,
        )
        self._engine: AsyncEngine | None = None
        path = settings.shadow
        self._shadow_file = None if path is None else ShadowFile(path, settings.shadow_max_bytes)

    def run(self) -> int:
        config = uvicorn.Config(
            create_app(self._state, self._settings.edge),
            http=protocol(self._settings.limits),
            log_config=None,
            lifespan="off",
            ws="none",
            access_log=False,
            server_header=False,
            root_path=self._settings.root_path,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(FLUSH_S),
        )
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(self._run(config))
        rollouts = self._state.rollouts
        if self._work.is_busy or (rollouts is not None and rollouts.is_busy):
            # A compiler at work cannot be interrupted, and must not meet a dying interpreter.
            os._exit(self._exit_code)
        return self._exit_code

    async def _run(self, config: uvicorn.Config) -> None:
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()

        def on_signal() -> None:
            # It may have come amid a request, whose context is not ours.
            loop.call_soon_threadsafe(
                lambda: tasks.add(loop.create_task(self._drain(server))), context=Context()
            )

        server = _UvicornServer(config, on_signal)
        loading = loop.create_task(self._load(server))
        status = loop.create_task(self._report_status())
        watch = loop.create_task(self._watch_steps())
        try:
            await server.serve(sockets=[self._listener])
        finally:
            loading.cancel()
            status.cancel()
            watch.cancel()
            if self._engine is not None:
                await self._engine.close()
            if self._state.rollouts is not None:
                await self._state.rollouts.close()
            if self._shadow_file is not None:
                await asyncio.to_thread(self._shadow_file.close)
            await self._state.close()

    async def _load(self, server: uvicorn.Server) -> None:
        self._say(f"listening on {self._url()}")
        address = self._listener.getsockname()[0]
        warning = exposure(address, has_keys=bool(self._settings.api_keys))
        if warning is not None:
            self._say(warning)
        try:
            built = await self._work.run("build", lambda: self._build(self._note_progress))
            self._become_ready(built)
        except Exception as error:
            log.debug("loading failed", exc_info=error)
            self._complain(one_line(error))
            self._exit_code = exit_code_of(error)
            server.should_exit = True

    def _note_progress(self, text: str) -> None:
        """On the build's thread."""
        self._state.progress = text
        self._say(f"{text} ...")

    def _become_ready(self, built: Built) -> None:
        settings = self._settings
        serving = ModelServing(
            settings.served_model_names or (built.model_name,),
            tool_call_parser=settings.tool_call_parser,
            scheduler=settings.engine.scheduler,
            batch_wait_s=settings.batch_wait_ms / 1000,
            on_verdict=self._state.note_step,
        )
        self._engine = serving.engine(built.engine, self._metrics)
        self._engine.start()
        served = serving.model(
            self._engine,
            built.tokenizer,
            version=built.version,
            root=settings.engine.source.model,
            max_model_len=built.max_model_len,
            vocab_size=built.engine.vocab_size,
            generation_config=built.generation_config,
            weights_bytes=built.memory_bytes.get("weights", 0),
        )
        seconds = time.monotonic() - self._start_s
        engine = self._engine
        self._metrics.on_loaded(
            version=built.version,
            cache_config={
                "page_size": settings.engine.cache.page_size,
                "num_pages": engine.pool_stats.pages_total,
                "enable_prefix_caching": settings.engine.cache.enable_prefix_caching,
            },
            memory_source=lambda: built.memory_bytes,
            startup_s={**built.summary.get("seconds", {}), "total": seconds},
            pool_source=lambda: self._state.pool_stats,
            compile_source=built.compile_events,
        )
        _spare_what_stays()
        for line in ready_lines(built.summary, seconds):
            self._say(line)
        self._say(f"tool calls: {served.tool_format.name if served.tool_format else 'none'}")
        for line in class_lines(settings.classes, settings.limits.max_queued_requests):
            self._say(line)
        self._say(route_line())
        self._state.become_ready(served)
        self._allow_rollouts(built, serving)
        self._say(f"READY {self._url()} serves {', '.join(served.names)}")

    def _allow_rollouts(self, built: Built, serving: ModelServing) -> None:
        rollouts = self._state.rollouts = make_rollouts(
            self._state, self._settings, built, serving, self._metrics, self._shadow_file
        )
        rollouts.start()

    async def _drain(self, server: uvicorn.Server) -> None:
        timeout_s = self._settings.shutdown_timeout_s
        self._state.begin_drain(timeout_s)
        if self._state.rollouts is not None:
            self._state.rollouts.stop()
        if self._engine is not None:
            self._say(f"draining: {self._state.num_open} open requests, up to {timeout_s:g} s")
            if not await self._state.drain_engines(timeout_s):
                self._say("the shutdown timeout passed; the open requests were ended")
            deadline_s = max(self._state.drain_until_s or 0.0, time.monotonic() + FLUSH_S)
            while self._state.admission.num_open and time.monotonic() < deadline_s:
                await asyncio.sleep(0.01)
        server.should_exit = True

    async def _watch_steps(self) -> None:
        """A step that hangs is noted though nobody asks."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            self._state.breaker.look(self._state.step_s)

    async def _report_status(self) -> None:
        status = StatusLine(self._metrics, time.monotonic())
        growth = GrowthAlarm(self._memory_watch(), self._state)
        while True:
            await asyncio.sleep(STATUS_EVERY_S)
            growth.sample()
            pool = self._state.pool_stats
            if pool is not None:
                line = status.line(pool, time.monotonic())
                if line is not None:
                    log.info(line)

    def _memory_watch(self) -> MemoryWatch:
        return MemoryWatch(
            window_s=self._settings.memory_watch_window_s,
            min_rise_bytes=self._settings.memory_watch_rise_bytes,
        )

    def _url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _spare_what_stays() -> None:
    """What was made so far lives as long as the server. A full garbage collection would look at all
    of it again (150,000 objects, 0.1 to 0.25 s) while every stream stands still.
    """
    gc.collect()
    gc.freeze()

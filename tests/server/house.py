"""A whole server on a loopback port: the real engine, tokenizer and app around a scripted runner.

The runner counts: after "a" comes "b", after "z" "a"; after "3" come "2", "1", "0" and then the end
token. So every text can be worked out by hand. Tokens are single bytes. `House.say` gives it a text
to say instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.batch_window import BatchWindow
from jaxinfer.config import SchedulerConfig
from jaxinfer.engine import Engine
from jaxinfer.guidance import Guidance
from jaxinfer.request_stream import MAX_UNREAD_TOKENS
from jaxinfer.scheduling.batch import Batch, StepResult
from jaxinfer.scheduling.buckets import Buckets
from jaxinfer.scheduling.page_pool import PagePool
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.server.app import create_app
from jaxinfer.server.connection import protocol
from jaxinfer.server.edge import Edge
from jaxinfer.server.lifecycle import bind
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.priority_classes import PriorityClasses
from jaxinfer.server.served_model import ServedModel
from jaxinfer.server.state import Limits, ServerState
from jaxinfer.server.tool_calls.formats import format_for
from jaxinfer.tokenizer import Tokenizer
from tests.fakes import next_admitted

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('tools are not for this model') }}{% endif %}"
    "<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if not add_generation_prompt %}.{% endif %}"
)
EOS = "<|end|>"
MODEL = "letters"
MAX_MODEL_LEN = 256


def letter_tokenizer(template: str = TEMPLATE, marks: Sequence[str] = ()) -> Tokenizer:
    """One token per byte, an end token, and `marks` as further control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in (EOS, *marks)]
    )
    eos_id = backend.token_to_id(EOS)
    assert eos_id is not None
    return Tokenizer(
        backend,
        chat_template=template,
        bos_token=None,
        eos_token=EOS,
        add_bos=False,
        eos_token_ids=[eos_id],
    )


class CountingRunner:
    """A `Runner`. `step_s` slows it, `fail_with` makes steps fail, `gate` holds them, `script` is
    what every sequence says (None: it counts).
    """

    def __init__(self, tokenizer: Tokenizer):
        self.step_s = 0.0
        self.fail_with: BaseException | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.num_steps = 0
        self.script: list[int] | None = None
        self.script_begins = 0  # tokens of the prompt that is answered by it
        self.num_rebuilds = 0
        self.dropped: list[str] = []  # versions
        self._newest: dict[int, int] = {}  # seat -> the last token drawn there
        self._blanks = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)  # not said in a grammar
        for token_id in tokenizer.encode(" \t\r\n"):
            self._blanks[token_id // 32] |= np.array(1 << token_id % 32, np.uint32).view(np.int32)
        self._next = {i: self._rule(tokenizer, i) for i in range(tokenizer.vocab_size)}

    def dispatch(self, batch: Batch) -> Batch:
        return batch

    def collect(self, pending: Batch) -> StepResult:
        self.gate.wait()
        time.sleep(self.step_s)
        self.num_steps += 1
        if self.fail_with is not None:
            raise self.fail_with
        last = self._sampled(pending)
        token_ids = np.array([self._next[i] for i in last], np.int32)
        penalties = pending.sampling.penalties
        if penalties is not None and penalties.mask is not None:
            for row, mask in enumerate(penalties.mask[: len(last)]):
                terse = mask & ~self._blanks
                token_ids[row] = next_admitted(terse if terse.any() else mask, int(token_ids[row]))
        seats = pending.sampling.seats[: len(last)].tolist()
        if self.script is not None:
            positions = pending.sampling.positions[: len(last)].tolist()
            token_ids = np.array(list(map(self.scripted, positions)), np.int32)
        self._newest |= dict(zip(seats, token_ids.tolist(), strict=True))
        top_ids = (token_ids[:, None] + np.arange(20, dtype=np.int32)) % len(self._next)
        top_logprobs = np.tile(-0.5 - np.arange(20, dtype=np.float32), (len(last), 1))
        return StepResult(token_ids, np.full(len(last), -0.5, np.float32), top_ids, top_logprobs)

    def scripted(self, position: int) -> int:
        """Draws that nobody reads come before the script, in a prompt's parts, and behind it."""
        assert self.script is not None
        place = position - self.script_begins
        return self.script[place] if 0 <= place < len(self.script) else self.script[-1]

    def rebuild(self) -> None:
        self.num_rebuilds += 1
        self._newest.clear()

    def drop_version(self, version: str) -> None:
        self.dropped.append(version)

    def _sampled(self, batch: Batch) -> list[int]:
        """The tokens that are followed by drawn ones."""
        at = batch.sample_at[: batch.num_sampled]
        pairs = zip(batch.token_ids[at].tolist(), batch.from_seat[at].tolist(), strict=True)
        return [token_id if seat < 0 else self._newest[seat] for token_id, seat in pairs]

    @staticmethod
    def _rule(tokenizer: Tokenizer, token_id: int) -> int:
        text = tokenizer.token_text(token_id)
        if text == "0":
            return min(tokenizer.eos_token_ids)
        if len(text) == 1 and text in "123456789":
            return tokenizer.encode(str(int(text) - 1))[0]
        if len(text) == 1 and "a" <= text < "z":
            return tokenizer.encode(chr(ord(text) + 1))[0]
        return tokenizer.encode("a")[0]


@dataclass
class House:
    """A running server and what is behind it."""

    url: str
    state: ServerState
    engine: AsyncEngine
    runner: CountingRunner
    core: Engine
    loop: asyncio.AbstractEventLoop
    tokenizer: Tokenizer
    client: httpx.Client = field(default_factory=httpx.Client)

    @property
    def scheduler(self) -> Scheduler:
        """Another one after a rebuild."""
        return self.core._scheduler

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return self.client.post(self.url + path, json=body, timeout=20, **kwargs)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.client.get(self.url + path, timeout=20, **kwargs)

    def complete(self, prompt: Any = "a", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})

    def chat(self, content: Any = "a", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", {"model": MODEL, "messages": messages, **fields})

    def say(self, text: str | None) -> None:
        """Whoever asks gets `text` and the end token, one at a time; None: the runner counts
        again.
        """
        end = min(self.tokenizer.eos_token_ids)
        self.runner.script = None if text is None else [*self.tokenizer.encode(text), end]

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = self.get("/metrics").text.splitlines()
        found = [line for line in lines if line.split("{")[0] == f"jaxinfer:{name}"]
        assert found, f"no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def wait_until(self, condition: Any, seconds: float = 5.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.005)

    def wait_until_idle(self, seconds: float = 5.0) -> None:
        """Nothing runs or waits, and every page is free or cached."""
        self.wait_until(
            lambda: (
                self.engine.num_open == 0
                and self.state.admission.num_open == 0
                and self.engine.pool_stats.num_running == 0
                and self.engine.pool_stats.num_waiting == 0
                and self.engine.pool_stats.pages_used == 0
            ),
            seconds,
        )
        self.scheduler.check_integrity()


def make_engine(
    *,
    num_pages: int = 64,
    max_num_seqs: int = 8,
    max_model_len: int = MAX_MODEL_LEN,
    max_retries: int = 2,
    template: str = TEMPLATE,
    marks: Sequence[str] = (),
) -> tuple[Engine, CountingRunner, Scheduler, Tokenizer]:
    """Pages of 8 tokens; prompts of up to max_model_len."""
    tokenizer = letter_tokenizer(template, marks)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_model_len=max_model_len,
        max_retries=max_retries,
    )
    buckets = Buckets.for_limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_model_len=max_model_len,
        page_size=8,
    )
    runner = CountingRunner(tokenizer)
    engine = Engine(
        runner=runner,
        make_scheduler=lambda: Scheduler(config, PagePool(num_pages, 8), buckets),
        tokenizer=tokenizer,
        version="v1",
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        random_seed=lambda: 1,
    )
    return engine, runner, engine._scheduler, tokenizer


class _PromptServer(uvicorn.Server):
    """Looks every few milliseconds whether it should end, instead of every 100."""

    async def main_loop(self) -> None:
        while not self.should_exit:
            await asyncio.sleep(0.005)


@contextlib.contextmanager
def open_house(
    *,
    limits: Limits | None = None,
    api_keys: tuple[str, ...] = (),
    edge: Edge | None = None,
    classes: PriorityClasses | None = None,
    window: BatchWindow | None = None,
    names: tuple[str, ...] = (MODEL,),
    defaults: dict[str, Any] | None = None,
    is_ready: bool = True,
    tokenizer: Any = None,
    guidance: Guidance | None = None,
    send_buffer: int | None = None,
    max_unread_tokens: int = MAX_UNREAD_TOKENS,
    **engine_options: Any,
) -> Generator[House]:
    """Serves until the block ends, then checks that nothing was left behind."""
    core, runner, _, own_tokenizer = make_engine(**engine_options)
    metrics = Metrics(names[0])
    num_seats: int = engine_options.get("max_num_seqs", 8)
    state = ServerState(
        limits or Limits(), metrics, api_keys=api_keys, classes=classes, num_seats=num_seats
    )
    listener = bind("127.0.0.1", 0)
    if send_buffer is not None:  # bytes; accepted connections inherit it
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    started: list[tuple[AsyncEngine, asyncio.AbstractEventLoop]] = []
    server = _PromptServer(
        uvicorn.Config(
            create_app(state, edge),
            http=protocol(state.limits),
            log_config=None,
            lifespan="off",
            ws="none",
            access_log=False,
        )
    )

    submit = core.submit

    def noted(request: Request) -> None:
        runner.script_begins = len(request.token_ids)
        submit(request)

    core.submit = noted  # type: ignore[method-assign]

    async def run() -> None:
        engine = AsyncEngine(
            core,
            observer=metrics,
            on_verdict=state.note_step,
            max_unread_tokens=max_unread_tokens,
            window=window,
        )
        engine.start()
        pool = ThreadPoolExecutor(2)
        served = ServedModel(
            engine=engine,
            tokenizer=tokenizer or own_tokenizer,
            names=names,
            root="tests/letters",
            max_model_len=engine_options.get("max_model_len", MAX_MODEL_LEN),
            version="v1",
            defaults=defaults or {},
            pool=pool,
            tool_format=format_for("auto", engine_options.get("template", TEMPLATE)),
            guidance=guidance or Guidance(own_tokenizer, own_tokenizer.vocab_size),
        )
        if is_ready:
            metrics.on_loaded(
                version="v1",
                cache_config={"page_size": 8},
                memory_bytes={"weights": 1000},
                startup_s={"load": 0.5},
                pool_source=lambda: engine.pool_stats,
                compile_source=lambda: {"startup": 1, "serving": 0},
            )
            state.become_ready(served)
        started.append((engine, asyncio.get_running_loop()))
        try:
            await server.serve(sockets=[listener])
        finally:
            runner.gate.set()
            await engine.close()
            served.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    while not (server.started and started):
        assert thread.is_alive()
        time.sleep(0.002)
    engine, loop = started[0]
    host, port = listener.getsockname()[:2]
    url = f"http://{host}:{port}"
    house = House(url, state, engine, runner, core, loop, own_tokenizer)
    try:
        yield house
    finally:
        house.client.close()
        server.should_exit = True
        runner.gate.set()
        thread.join(10)
        assert not thread.is_alive(), "the server did not end"

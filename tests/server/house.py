"""A whole server on a loopback port: the real engine, tokenizer and app around a scripted runner.

The runner counts: after "a" comes "b", after "z" "a"; after "3" come "2", "1", "0" and then the end
token. So every text can be worked out by hand. Tokens are single bytes. `House.say` gives it a text
to say instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

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
from jaxinfer.server.bound_port import bind
from jaxinfer.server.connection import protocol
from jaxinfer.server.edge import Edge
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.priority_classes import PriorityClasses
from jaxinfer.server.served_model import ServedModel
from jaxinfer.server.state import Limits, ServerState
from jaxinfer.server.tool_calls.formats import format_for
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.versions import ModelVersion
from tests.fakes import next_admitted

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('tools are not for this model') }}{% endif %}"
    "<{{ m.role[0] }}>{{ m.content }}{% endfor %}{% if not add_generation_prompt %}.{% endif %}"
)
EOS = "<|end|>"
MODEL = "letters"
MAX_MODEL_LEN = 256
Result = TypeVar("Result")


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

    Of single versions: `shifts` says how many letters are left out between two (none, where it is
    not there), `failing` what their steps fail with, `not_numbers` whose logits are none.
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
        self.shifts: dict[str, int] = {}
        self.failing: dict[str, BaseException] = {}
        self.not_numbers: set[str] = set()
        self._ends = tokenizer.eos_token_ids
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
        if pending.version in self.failing:
            raise self.failing[pending.version]
        last = self._sampled(pending)
        shift = self.shifts.get(pending.version, 0)
        token_ids = np.array([self._follower(i, shift) for i in last], np.int32)
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
        logprob = np.nan if pending.version in self.not_numbers else -0.5
        logprobs = np.full(len(last), logprob, np.float32)
        return StepResult(token_ids, logprobs, top_ids, top_logprobs)

    def _follower(self, token_id: int, shift: int) -> int:
        """An end is never left out."""
        token_id = self._next[token_id]
        for _ in range(shift):
            token_id = token_id if token_id in self._ends else self._next[token_id]
        return token_id

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
    runners: dict[str, CountingRunner] = field(default_factory=dict[str, CountingRunner])
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

    def on_loop(self, work: Callable[[], Result]) -> Result:
        """Runs it where the server's state lives."""

        async def run() -> Result:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def add_version(self, name: str, *, shift: int = 1, share: float | None = None) -> ServedModel:
        """Another version in the same engine, which leaves `shift` letters out between two.

        Args:
            share: it is tried out on so many of the calls; None: only who names it gets it.
        """
        found = ModelVersion(name, self.tokenizer, self.tokenizer.eos_token_ids)
        self.runner.shifts[name] = shift
        adding = self.engine.change(lambda engine: engine.add_version(found))
        asyncio.run_coroutine_threadsafe(adding, self.loop).result(10)
        assert self.state.model is not None
        model = dataclasses.replace(self.state.model, version=name, root=f"tests/{name}")
        return self._take_in(model, share)

    def add_engine(
        self,
        name: str,
        *,
        shift: int = 1,
        share: float | None = None,
        marks: Sequence[str] = ("<|more|>",),
        **options: Any,
    ) -> ServedModel:
        """Another version with an engine and a runner of its own, and further control tokens.

        Args: shift, share: as of `add_version`. options: of make_engine.
        """
        core, runner, _, tokenizer = make_engine(version=name, marks=marks, **options)
        runner.shifts[name] = shift
        self.runners[name] = runner

        def start() -> ServedModel:
            engine = AsyncEngine(
                core,
                observer=self.state.metrics.for_engine(),
                on_verdict=self.state.note_step,
            )
            engine.start()
            assert self.state.model is not None
            return dataclasses.replace(
                self.state.model,
                engine=engine,
                tokenizer=tokenizer,
                version=name,
                root=f"tests/{name}",
                guidance=Guidance(tokenizer, tokenizer.vocab_size),
            )

        return self._take_in(self.on_loop(start), share)

    def _take_in(self, model: ServedModel, share: float | None) -> ServedModel:
        def take_in() -> None:
            self.state.versions.add(model)
            if share is not None:
                self.state.versions.try_out(model.version, share)

        self.on_loop(take_in)
        return model

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
                self.state.admission.num_open == 0
                and all(map(is_idle, {self.engine, *self.state.engines}))
            ),
            seconds,
        )
        self.scheduler.check_integrity()


def is_idle(engine: AsyncEngine) -> bool:
    """Nothing runs or waits, and every page is free or cached."""
    pool = engine.pool_stats
    return not (engine.num_open or pool.num_running or pool.num_waiting or pool.pages_used)


def make_engine(
    *,
    version: str = "v1",
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
        version=version,
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
    others: dict[str, CountingRunner] = {}  # of further engines
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
            weights_bytes=1000,
            defaults=defaults or {},
            pool=pool,
            tool_format=format_for("auto", engine_options.get("template", TEMPLATE)),
            guidance=guidance or Guidance(own_tokenizer, own_tokenizer.vocab_size),
        )
        if is_ready:
            metrics.on_loaded(
                version="v1",
                cache_config={"page_size": 8},
                memory_source=lambda: {"weights": 1000},
                startup_s={"load": 0.5},
                pool_source=lambda: state.pool_stats,
                compile_source=lambda: {"startup": 1, "serving": 0},
            )
            state.become_ready(served)
        started.append((engine, asyncio.get_running_loop()))
        try:
            await server.serve(sockets=[listener])
        finally:
            for one in (runner, *others.values()):
                one.gate.set()
            await state.close()
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
    house = House(url, state, engine, runner, core, loop, own_tokenizer, others)
    try:
        yield house
    finally:
        house.client.close()
        server.should_exit = True
        runner.gate.set()
        thread.join(10)
        assert not thread.is_alive(), "the server did not end"

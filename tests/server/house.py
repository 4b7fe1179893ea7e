"""A whole server on a loopback port: the real engine, tokenizer and app around a scripted runner.

The runner counts: after "a" comes "b", after "z" "a"; after "3" come "2", "1", "0" and then the end
token. So every text can be worked out by hand. Tokens are single bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers

from jaxinfer.async_engine import AsyncEngine
from jaxinfer.config import SchedulerConfig
from jaxinfer.engine import Engine
from jaxinfer.guidance import Guidance
from jaxinfer.scheduling.batch import Batch, StepResult
from jaxinfer.scheduling.buckets import Buckets
from jaxinfer.scheduling.page_pool import PagePool
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.server.app import create_app
from jaxinfer.server.lifecycle import bind
from jaxinfer.server.metrics import Metrics
from jaxinfer.server.state import Limits, ServedModel, ServerState
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


def letter_tokenizer() -> Tokenizer:
    """One token per byte, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(EOS, special=True, normalized=False)])
    eos_id = backend.token_to_id(EOS)
    assert eos_id is not None
    return Tokenizer(
        backend,
        chat_template=TEMPLATE,
        bos_token=None,
        eos_token=EOS,
        add_bos=False,
        eos_token_ids=[eos_id],
    )


class CountingRunner:
    """A `Runner`. `step_s` slows it, `fail_with` makes steps fail, `gate` holds them."""

    def __init__(self, tokenizer: Tokenizer):
        self.step_s = 0.0
        self.fail_with: BaseException | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.num_steps = 0
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
        self._newest |= dict(zip(seats, token_ids.tolist(), strict=True))
        top_ids = (token_ids[:, None] + np.arange(20, dtype=np.int32)) % len(self._next)
        top_logprobs = np.tile(-0.5 - np.arange(20, dtype=np.float32), (len(last), 1))
        return StepResult(token_ids, np.full(len(last), -0.5, np.float32), top_ids, top_logprobs)

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
    scheduler: Scheduler
    loop: asyncio.AbstractEventLoop
    client: httpx.Client = field(default_factory=httpx.Client)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return self.client.post(self.url + path, json=body, timeout=20, **kwargs)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.client.get(self.url + path, timeout=20, **kwargs)

    def complete(self, prompt: Any = "a", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})

    def chat(self, content: Any = "a", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", {"model": MODEL, "messages": messages, **fields})

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
    *, num_pages: int = 64, max_num_seqs: int = 8
) -> tuple[Engine, CountingRunner, Scheduler, Tokenizer]:
    """Pages of 8 tokens; prompts of up to MAX_MODEL_LEN."""
    tokenizer = letter_tokenizer()
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=64, max_model_len=MAX_MODEL_LEN
    )
    buckets = Buckets.for_limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_model_len=MAX_MODEL_LEN,
        page_size=8,
    )
    scheduler = Scheduler(config, PagePool(num_pages, 8), buckets)
    runner = CountingRunner(tokenizer)
    engine = Engine(
        runner=runner,
        scheduler=scheduler,
        tokenizer=tokenizer,
        version="v1",
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        random_seed=lambda: 1,
    )
    return engine, runner, scheduler, tokenizer


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
    names: tuple[str, ...] = (MODEL,),
    defaults: dict[str, Any] | None = None,
    is_ready: bool = True,
    tokenizer: Any = None,
    guidance: Guidance | None = None,
    send_buffer: int | None = None,
    **engine_options: Any,
) -> Generator[House]:
    """Serves until the block ends, then checks that nothing was left behind."""
    core, runner, scheduler, own_tokenizer = make_engine(**engine_options)
    metrics = Metrics(names[0])
    state = ServerState(limits or Limits(), metrics, api_keys=api_keys)
    listener = bind("127.0.0.1", 0)
    if send_buffer is not None:  # bytes; accepted connections inherit it
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    started: list[tuple[AsyncEngine, asyncio.AbstractEventLoop]] = []
    server = _PromptServer(
        uvicorn.Config(create_app(state), log_config=None, lifespan="off", ws="none")
    )

    async def run() -> None:
        engine = AsyncEngine(core, observer=metrics)
        engine.start()
        pool = ThreadPoolExecutor(2)
        served = ServedModel(
            engine=engine,
            tokenizer=tokenizer or own_tokenizer,
            names=names,
            root="tests/letters",
            max_model_len=MAX_MODEL_LEN,
            version="v1",
            defaults=defaults or {},
            pool=pool,
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
    house = House(f"http://{host}:{port}", state, engine, runner, scheduler, loop)
    try:
        yield house
    finally:
        house.client.close()
        server.should_exit = True
        runner.gate.set()
        thread.join(10)
        assert not thread.is_alive(), "the server did not end"

"""Stand-ins without JAX: a runner whose next token can be computed by hand, and a tokenizer.

    engine = make_engine(FakeRunner(num_pages=32))
    engine.submit(Request("a", (5, 7), SamplingParams(max_tokens=3, temperature=0)))
    run_all(engine)["a", 0].token_ids  # [21, 85, 22]

`greedy_continuation((5, 7), 3)` says what comes out: the next token after a context t_0..t_{n-1} is
(1*t_0 + 2*t_1 + ... + n*t_{n-1} + n) mod VOCAB_SIZE, so every token and its place matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxinfer.config import SamplingParams, SchedulerConfig
from jaxinfer.engine import Engine, RequestOutput, TokenLogprob
from jaxinfer.errors import EngineFailure, JaxInferError
from jaxinfer.scheduling.batch import Batch, PenaltyBatch, StepResult
from jaxinfer.scheduling.buckets import WIDE_BLOCKS_AT_ONCE, Buckets
from jaxinfer.scheduling.page_pool import PagePool, page_digest
from jaxinfer.scheduling.request import FinishReason, Request
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.stats import RequestStats

VOCAB_SIZE = 101
EOS = 100
NUM_TOP = 20


def next_token(context: Sequence[int]) -> int:
    """What the fake model says after `context`."""
    weights = np.arange(1, len(context) + 1)
    return int((np.dot(weights, np.asarray(context, np.int64)) + len(context)) % VOCAB_SIZE)


def greedy_continuation(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The next `num_tokens` tokens, end tokens like any others."""
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(next_token(context))
    return context[len(prompt) :]


class FakeRunner:
    """A device that remembers which token was written where, and believes nothing else.

    Tokens and positions are written into its own pages through the page table; a sampled row's
    context is read back from there. A wrong, stale or uncomputed page therefore gives another
    token, and an entry in `faults`. Each batch is checked as a device cannot (`batch_faults`).

    With temperature > 0 a row's seed and position are added to the token. So is what its penalties
    and logit bias make of the tokens that they count (`shift_by_penalties`), which must be those of
    its context. Where a mask does not admit the token, the next one that it admits is said.

    Args:
        scripts: prompt -> the tokens that come after it, in place of the formula, while they last.
        poison: a context with one of these tokens gives NaN.
        fail_at: steps, counted from 0, whose dispatch raises EngineFailure.
        fail_collect_at: the same for collect.
        on_step: called with each batch before it runs; may sleep or raise.
        versions: of the weights that it has, and what each adds to every token; None: any, nothing.
    """

    def __init__(
        self,
        num_pages: int = 64,
        page_size: int = 8,
        *,
        scripts: dict[tuple[int, ...], Sequence[int]] | None = None,
        poison: frozenset[int] = frozenset(),
        fail_at: frozenset[int] = frozenset(),
        fail_collect_at: frozenset[int] = frozenset(),
        on_step: Callable[[Batch], None] | None = None,
        versions: Mapping[str, int] | None = None,
    ):
        self.num_pages, self.page_size = num_pages, page_size
        self.scripts = dict(scripts or {})
        self.poison, self.fail_at, self.fail_collect_at = poison, fail_at, fail_collect_at
        self.on_step = on_step
        self.batches: list[Batch] = []
        self.faults: list[str] = []
        self.num_rebuilds = 0
        self.dropped: list[str] = []  # versions
        self.versions = dict(versions or {})
        self._is_any_known = versions is None
        self._unread: dict[int, str] = {}  # step -> version
        self._newest: dict[int, int] = {}  # seat -> the last token drawn there
        self._tokens = np.full((num_pages, page_size), -1, np.int64)
        self._positions = np.full((num_pages, page_size), -1, np.int64)
        self._writers = np.full((num_pages, page_size), "", object)  # versions

    def dispatch(self, batch: Batch) -> Any:
        step = len(self.batches)
        self.batches.append(batch)
        if self.on_step is not None:
            self.on_step(batch)
        if step in self.fail_at:
            raise EngineFailure(f"step {step} was made to fail")
        self.faults += batch_faults(batch)
        if not self._is_any_known and batch.version not in self.versions:
            self.faults.append(f"a batch of {batch.version}; there is {sorted(self.versions)}")
        self._unread[step] = batch.version
        self._write(batch)
        return step, self._sample(batch)

    def collect(self, pending: Any) -> StepResult:
        step, result = pending
        self._unread.pop(step, None)
        if step in self.fail_collect_at:
            raise EngineFailure(f"step {step} was made to fail when it was read")
        return result

    def rebuild(self) -> None:
        self.num_rebuilds += 1
        self._newest.clear()
        self._unread.clear()
        self._tokens.fill(-1)
        self._positions.fill(-1)

    def drop_version(self, version: str) -> None:
        self.dropped.append(version)
        if version in self._unread.values():
            self.faults.append(f"{version} was dropped under a step")
        if self.versions.pop(version, None) is None and not self._is_any_known:
            self.faults.append(f"{version} was dropped, and was not there")

    def _sample(self, batch: Batch) -> StepResult:
        contexts = [self._context(batch, row) for row in range(batch.num_sampled)]
        sampling = batch.sampling
        token_ids, logprobs = np.zeros(len(contexts), np.int32), np.zeros(len(contexts), np.float32)
        for row, context in enumerate(contexts):
            token_ids[row] = self._draw(context, batch, row)
            is_poisoned = not self.poison.isdisjoint(context)
            logprobs[row] = np.nan if is_poisoned else -0.5 - token_ids[row] / 1024
            self._newest[int(sampling.seats[row])] = int(token_ids[row])
        if sampling.variant not in ("full", "penalized"):
            return StepResult(token_ids, logprobs, None, None)
        places = np.arange(NUM_TOP)
        top_ids = ((token_ids[:, None] + places) % VOCAB_SIZE).astype(np.int32)
        return StepResult(
            token_ids, logprobs, top_ids, logprobs[:, None] - places.astype(np.float32)
        )

    def _token_ids(self, batch: Batch) -> np.ndarray:
        """The input of a step: from the host, or what was drawn last in a seat."""
        token_ids = batch.token_ids.copy()
        for at in np.flatnonzero(batch.from_seat >= 0):
            seat = int(batch.from_seat[at])
            if seat not in self._newest:
                self.faults.append(f"nothing was drawn in seat {seat}")
            token_ids[at] = self._newest.get(seat, -1)
        return token_ids

    def _write(self, batch: Batch) -> None:
        real = np.flatnonzero(batch.positions >= 0)
        positions = batch.positions[real]
        pages = self._pages(batch.page_table[batch.rows[real], positions // self.page_size])
        slots = positions % self.page_size
        if len(set(zip(pages.tolist(), slots.tolist(), strict=True))) != len(real):
            self.faults.append("two tokens of a step were written to one place")
        self._tokens[pages, slots] = self._token_ids(batch)[real]
        self._positions[pages, slots] = positions
        self._writers[pages, slots] = batch.version

    def _pages(self, pages: np.ndarray) -> np.ndarray:
        """Clamped to the pool, as a device does without a word; here it is a fault."""
        inside = np.clip(pages, 0, self.num_pages - 1)
        if (inside != pages).any():
            self.faults.append(f"pages {pages.tolist()} of {self.num_pages}")
        return inside

    def _context(self, batch: Batch, row: int) -> list[int]:
        at = int(batch.sample_at[row])
        num_tokens = int(batch.positions[at]) + 1
        if batch.sampling.positions[row] != num_tokens:
            self.faults.append(f"draw {batch.sampling.positions[row]} of {num_tokens} tokens")
        places = np.arange(num_tokens)
        pages = self._pages(batch.page_table[batch.rows[at], places // self.page_size])
        found = self._positions[pages, places % self.page_size]
        if (found != places).any():
            self.faults.append(f"positions {found.tolist()} where 0..{num_tokens - 1} belong")
        writers = set(self._writers[pages, places % self.page_size])
        if writers != {batch.version}:
            self.faults.append(f"{batch.version} reads what {sorted(writers)} wrote")
        return self._tokens[pages, places % self.page_size].tolist()

    def _draw(self, context: list[int], batch: Batch, row: int) -> int:
        token_id = self._wanted(context, batch.sampling, row)
        token_id = (token_id + self.versions.get(batch.version, 0)) % VOCAB_SIZE
        penalties = batch.sampling.penalties
        if penalties is None or penalties.mask is None:
            return token_id
        return next_admitted(penalties.mask[row], token_id)

    def _wanted(self, context: list[int], sampling: Any, row: int) -> int:
        for prompt, script in self.scripts.items():
            place = len(context) - len(prompt)
            if tuple(context[: len(prompt)]) == prompt and 0 <= place < len(script):
                return script[place]
        token_id = next_token(context)
        if sampling.temperature[row] > 0:
            low, high = (int(half) for half in sampling.seeds[row])
            token_id += (low ^ high) * (2 * int(sampling.positions[row]) + 1) % 8191
        if sampling.penalties is not None:
            token_id += self._shift(context, sampling.penalties, row)
        return token_id % VOCAB_SIZE

    def _shift(self, context: list[int], penalties: PenaltyBatch, row: int) -> int:
        known = penalties.history[row, : int(penalties.num_known[row])].tolist()
        seat = int(penalties.from_seat[row])
        if seat >= 0:
            known.append(self._newest.get(seat, -1))
        if known and known != context:
            self.faults.append(f"penalties count {known} where the context is {context}")
        pairs = zip(penalties.bias_ids[row].tolist(), penalties.bias[row].tolist(), strict=True)
        return shift_by_penalties(
            known,
            int(penalties.num_prompt[row]),
            SamplingParams(
                presence_penalty=float(penalties.presence[row]),
                frequency_penalty=float(penalties.frequency[row]),
                repetition_penalty=float(penalties.repetition[row]),
                logit_bias=tuple((token_id, bias) for token_id, bias in pairs if token_id >= 0),
            ),
        )


def next_admitted(mask: np.ndarray, token_id: int) -> int:
    """`token_id` or the next one, round the vocabulary, whose bit is set; -1: none is."""
    admitted = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    if not len(admitted):
        return -1
    return int(admitted[np.searchsorted(admitted, token_id) % len(admitted)])


def shift_by_penalties(
    token_ids: Sequence[int], num_prompt_tokens: int, sampling: SamplingParams
) -> int:
    """What the fake model adds to a token: every parameter and every token counted matters."""
    output = token_ids[num_prompt_tokens:]
    shift = 8 * sampling.presence_penalty * len(set(output))
    shift += 16 * sampling.frequency_penalty * (len(output) + sum(output))
    if sampling.repetition_penalty != 1.0:
        shift += 8 * sampling.repetition_penalty * (len(set(token_ids)) + sum(token_ids))
    shift += sum(token_id * bias for token_id, bias in sampling.bias_pairs)
    return round(shift)


def batch_faults(batch: Batch) -> list[str]:
    """What is wrong with a batch, whatever it means."""
    faults: list[str] = []
    num_tokens, num_sampled = batch.num_tokens, batch.num_sampled

    def expect(is_true: Any, what: str) -> None:
        if not is_true:
            faults.append(f"{batch.kind} step of {batch.num_seqs} sequences: {what}")

    axis = (batch.token_ids, batch.from_seat, batch.positions, batch.rows)
    rest = (batch.page_table, batch.sample_at, batch.sampling.seats)
    expect(all(a.dtype == np.int32 for a in (*axis, *rest)), "not int32")
    expect(all(a.shape == (batch.bucket,) for a in axis), "token axis is not the bucket")
    expect((batch.from_seat[num_tokens:] == -1).all(), "padding comes from a seat")
    seats = batch.sampling.seats
    expect(len(set(seats[:num_sampled].tolist())) == num_sampled, "two draws for one seat")
    expect((seats[num_sampled:] == len(batch.sample_at)).all(), "padding is drawn for a seat")
    expect((batch.positions[:num_tokens] >= 0).all(), "a real token has no position")
    expect((batch.positions[num_tokens:] == -1).all(), "padding has a position")
    expect(len(set(batch.rows[:num_tokens].tolist())) == batch.num_seqs, "rows are not num_seqs")
    expect((batch.page_table[batch.num_seqs :] == 0).all(), "page table of a padding row")
    sampled = batch.sample_at[:num_sampled].tolist()
    expect(len(set(sampled)) == num_sampled, "a token is sampled twice")
    expect(all(at < num_tokens for at in sampled), "a padding token is sampled")
    expect((batch.sample_at[num_sampled:] == 0).all(), "padding of sample_at")
    expect(num_sampled <= len(batch.sampling.temperature), "sampling is too short")
    expect((batch.sampling.temperature[num_sampled:] == 0).all(), "padding is not greedy")
    faults.extend(_penalty_faults(batch))
    if batch.kind == "decode":
        expect(batch.blocks is None, "blocks in a decode step")
        expect(num_tokens == batch.num_seqs == num_sampled, "not one token per row")
        expect(sampled == list(range(num_sampled)), "decode samples its first rows")
        expect((np.diff(batch.positions[:num_tokens]) >= 0).all(), "context lengths do not rise")
    else:
        faults.extend(_block_faults(batch))
    return faults


def _penalty_faults(batch: Batch) -> list[str]:
    sampling, penalties, number = batch.sampling, batch.sampling.penalties, batch.num_sampled
    if penalties is None:
        return ["penalized without penalties"] if sampling.variant == "penalized" else []
    known, prompt, seats = penalties.num_known, penalties.num_prompt, penalties.from_seat
    integers = (penalties.history, known, prompt, seats, penalties.bias_ids)
    presence, frequency = penalties.presence, penalties.frequency
    reals = (penalties.repetition, presence, frequency, penalties.bias)
    is_counted = (penalties.repetition != 1) | (presence != 0) | (frequency != 0)
    is_biased = (penalties.bias_ids >= 0).any(axis=1)
    mask = np.full((len(known), 1), -1, np.int32) if penalties.mask is None else penalties.mask
    is_masked = (mask != -1).any(axis=1)
    expected = {
        "variant": sampling.variant == "penalized",
        "int32": all(a.dtype == np.int32 for a in integers),
        "float32": all(a.dtype == np.float32 for a in reals),
        "rows": all(len(a) == len(sampling.temperature) for a in (*integers, *reals, mask)),
        "padding": not (is_counted | is_biased | is_masked)[number:].any(),
        "use": (is_counted | is_biased).any() or penalties.mask is not None,
        "mask": mask.dtype == np.int32 and mask.any(axis=1).all(),
        "tokens where they are counted": ((known > 0) == is_counted).all(),
        "prompt": ((prompt > 0) == is_counted).all() and (prompt <= known).all(),
        "seat": ((seats == -1) | ((seats == sampling.seats) & is_counted)).all(),
        "width": known.max() < penalties.history.shape[1] and penalties.history.shape[1] % 128 == 0,
    }
    return [f"penalties: {what}" for what, is_good in expected.items() if not is_good]


def _block_faults(batch: Batch) -> list[str]:
    blocks, bucket = batch.blocks, batch.bucket
    if blocks is None:
        return ["a prefill step without blocks"]
    narrow = blocks.narrow[: int(blocks.num_narrow)].tolist()
    wide = [
        [i for i in block if i != bucket] for block in blocks.wide[: int(blocks.num_wide)].tolist()
    ]
    faults: list[str] = []
    tokens = sorted(narrow + [i for block in wide for i in block])
    if tokens != list(range(batch.num_tokens)):
        faults.append(f"blocks hold tokens {tokens}, not each of {batch.num_tokens} once")
        return faults
    if (blocks.narrow[len(narrow) :] != bucket).any() or (blocks.wide[len(wide) :] != bucket).any():
        faults.append("block padding is not the bucket")
    if blocks.wide.shape[0] % WIDE_BLOCKS_AT_ONCE:
        faults.append(f"wide blocks of shape {blocks.wide.shape}")
    for block in wide:
        same_row = len(set(batch.rows[block].tolist())) == 1
        if not same_row or (np.diff(batch.positions[block]) != 1).any():
            faults.append(f"a wide block holds {block}")
    for last in (batch.positions[narrow], batch.positions[[block[-1] for block in wide]]):
        if (np.diff(last) < 0).any():
            faults.append(f"blocks end at {last.tolist()}")
    return faults


class FakeTokenizer:
    """Token i is one printable character: 'a' is 0, and so on; EOS is special and has no text.

    What `Detokenizer` reads of a Tokenizer, and `encode`, `decode` for tests of servers.
    """

    vocab_size = VOCAB_SIZE
    eos_token_ids = frozenset({EOS})
    special_token_ids = frozenset({EOS})
    bos_token_id = None
    has_chat_template = False

    def __init__(self) -> None:
        self.whole_texts = {i: chr(ord("a") + i) for i in range(EOS)} | {EOS: None}

    def spelled(self, token_id: int, *, is_first: bool = False) -> bytes | None:
        return b"<eos>" if token_id == EOS else chr(ord("a") + token_id).encode()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [(ord(character) - ord("a")) % EOS for character in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if i != EOS or not skip_special_tokens]
        return b"".join(self.spelled(i) or b"" for i in kept).decode()


class FakeClock:
    """Stands still until it is told otherwise."""

    def __init__(self, now: float = 0.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


def make_engine(
    runner: FakeRunner | None = None,
    *,
    tokenizer: Any = None,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 256,
    enable_prefix_caching: bool = True,
    eos_token_ids: Sequence[int] = (EOS,),
    clock: Callable[[], float] | None = None,
    random_seed: Callable[[], int] = lambda: 12345,
    digest: Callable[[bytes, bytes], bytes] = page_digest,
    version: str = "v1",
    max_retries: int = 2,
) -> Engine:
    """An engine on a FakeRunner, with its pool; tokenizer None: token ids only."""
    runner = runner or FakeRunner()
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        max_retries=max_retries,
    )
    buckets = Buckets.for_limits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        page_size=runner.page_size,
    )

    def make_scheduler() -> Scheduler:
        pool = PagePool(runner.num_pages, runner.page_size, enable_prefix_caching, digest=digest)
        return Scheduler(config, pool, buckets)

    return Engine(
        runner=runner,
        make_scheduler=make_scheduler,
        tokenizer=tokenizer,
        version=version,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=eos_token_ids,
        clock=clock or FakeClock(),
        random_seed=random_seed,
    )


@dataclass
class Answer:
    """All outputs of one choice, joined."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    stats: RequestStats | None = None
    error: JaxInferError | None = None

    def add(self, output: RequestOutput) -> None:
        assert self.finish_reason is None, "an output after the last"
        self.token_ids += output.token_ids
        self.text += output.text
        self.logprobs += output.logprobs
        self.finish_reason, self.stop = output.finish_reason, output.stop
        self.stats, self.error = output.stats, output.error


class Answers(dict[tuple[str, int], Answer]):
    """(request_id, choice) -> Answer."""

    def add(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            self.setdefault((output.request_id, output.index), Answer()).add(output)


def run_all(engine: Engine, requests: Sequence[Request] = (), *, max_steps: int = 2000) -> Answers:
    """Submits, then steps until nothing is left to do."""
    for request in requests:
        engine.submit(request)
    answers = Answers()
    for _ in range(max_steps):
        if not engine.has_work():
            return answers
        answers.add(engine.step().outputs)
    raise AssertionError(f"still busy after {max_steps} steps")

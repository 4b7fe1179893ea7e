"""The loop that drives a model: schedule, dispatch, collect, update, detokenize.

Host only: no JAX. The device is behind the `Runner` protocol; time is an injected clock. An Engine
belongs to one thread. A step that fails takes only its own sequences with it.

    call of step():   n                              n+1
    host              schedule n, dispatch n,        schedule n+1, dispatch n+1,
                      read n-1: update, detokenize   read n: update, detokenize
    device            ... n-1 |        n             ...        |       n+1

So the device has the next step before the host reads the last one, and does not wait for it. A
sequence that turns out to have ended is in one step more than it needed; its row there is dropped.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from jaxinfer.choice import Choice
from jaxinfer.detokenizer import Detokenizer
from jaxinfer.errors import (
    DeadlineExceeded,
    EngineFailure,
    InvalidRequest,
    JaxInferError,
    PoolLost,
)
from jaxinfer.outputs import EngineStep, RequestOutput, TokenLogprob
from jaxinfer.request_rules import RequestRules
from jaxinfer.scheduling.batch import Batch, StepResult
from jaxinfer.scheduling.request import FinishReason, Request
from jaxinfer.scheduling.scheduled import Scheduled
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.scheduling.sequence import Sequence
from jaxinfer.stats import PoolStats, StepStats
from jaxinfer.tokenizer import Tokenizer

__all__ = ["Engine", "EngineStep", "RequestOutput", "Runner", "TokenLogprob"]

MAX_UNDER_WAY = 2  # steps: one runs, one is behind it
_log = logging.getLogger(__name__)


class Runner(Protocol):
    """The device half as the engine sees it.

    Steps run in the order of their dispatch, each on what the one before it has left: pages, and
    the newest token of each seat. They are collected in that order, one call behind.
    """

    def dispatch(self, batch: Batch) -> Any:
        """Starts a step; the answer is given to `collect`."""
        ...

    def collect(self, pending: Any) -> StepResult:
        """Waits for the step and fetches what it sampled. Raises EngineFailure."""
        ...


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was dispatched and not read."""

    scheduled: Scheduled
    pending: Any  # what the runner gave for it
    started_s: float


class Engine:
    """One model and its requests.

    Args:
        tokenizer: None: outputs have token ids and no text.
        version: of the weights, which every sequence keeps to its end.
        vocab_size: ids of prompts and stop tokens must be below it.
        eos_token_ids: that end an answer.
        clock: monotonic seconds, the same as of Request.arrival_s and deadline_s.
        random_seed: 64 bits for each request that names no seed.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        version: str,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        random_seed: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.version = version
        self.vocab_size = vocab_size
        self._runner = runner
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._rules = RequestRules(vocab_size, scheduler.limit, tokenizer is not None)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._clock = clock
        self._random_seed = random_seed
        self._flights: deque[_Flight] = deque()  # oldest first
        self._late: tuple[RequestOutput, ...] = ()  # of a call of `step` that raised
        self._last_read_s = -math.inf
        self._choices: dict[Sequence, Choice] = {}
        self._num_live: dict[str, int] = {}  # choices of each request

    @property
    def max_total_tokens(self) -> int:
        """Prompt and output tokens of the longest request."""
        return self._scheduler.limit.max_total_tokens

    def submit(self, request: Request) -> None:
        """Queues a request: as many sequences as it has choices, or none if it is refused.

        Raises: InvalidRequest naming the field; ContextLengthExceeded if it can never fit.
        """
        if request.request_id in self._num_live:
            raise InvalidRequest(
                f"request_id {request.request_id!r} is in use; choose another", param="request_id"
            )
        self._rules.check(request)
        sampling = request.sampling
        seed = self._random_seed() if sampling.seed is None else sampling.seed
        choices: dict[Sequence, Choice] = {}
        for index in range(sampling.n):
            sequence = Sequence(request, index=index, seed=seed, version=self.version)
            choices[sequence] = Choice(
                sequence,
                eos_token_ids=self._eos_token_ids,
                detokenizer=self._detokenizer(request),
            )
        for sequence in choices:  # nothing is queued before all of it could be made
            self._scheduler.submit(sequence)
        self._choices |= choices
        self._num_live[request.request_id] = sampling.n

    def abort(self, request_id: str) -> tuple[RequestOutput, ...]:
        """Ends the choices of a request that still live; their pages are free when this returns.

        Returns: their last outputs, which no step repeats; none for an id that is not known.
        """
        now = self._clock()
        aborted = self._scheduler.abort(request_id)
        return tuple(self._end(sequence, FinishReason.ABORT, now) for sequence in aborted)

    def abort_all(self, error: JaxInferError) -> tuple[RequestOutput, ...]:
        """Ends everything with `error`; returns the last outputs."""
        return self._fail(list(self._choices), error)

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def pool_stats(self) -> PoolStats:
        return self._scheduler.stats()

    def step(self) -> EngineStep:
        """Dispatches the next step for whatever can run, and reads the one before it.

        Also ends what has passed its deadline. Raises nothing for a step that fails: its sequences
        end with EngineFailure. Only PoolLost ends the engine.

        Returns: the outputs of the step that was read; its stats, None if there was none, or if all
            that was in it had ended before.
        """
        now = self._clock()
        outputs, self._late = self._late + self._expire(now), ()
        try:
            outputs, stats = self._step(now, outputs)
        except PoolLost:
            self._flights.clear()
            self._scheduler.discard_all()
            raise
        except BaseException:  # Ctrl-C while the device works
            self._late = outputs + self._late
            raise
        return EngineStep(outputs, stats)

    def _step(
        self, now: float, outputs: tuple[RequestOutput, ...]
    ) -> tuple[tuple[RequestOutput, ...], StepStats | None]:
        num_unread = len(self._flights)
        failed: tuple[Scheduled, Exception] | None = None
        if num_unread < MAX_UNDER_WAY:  # else the last call was broken off
            failed = self._dispatch(now)
        stats: StepStats | None = None
        if num_unread:
            more, stats = self._collect()
            outputs += more
        if failed is not None:  # what the last step gave them comes first
            outputs += self._drop(*failed)
        return outputs, stats

    def _dispatch(self, now: float) -> tuple[Scheduled, Exception] | None:
        """Starts the next step. Returns: the step and why, if it could not be started."""
        scheduled = self._scheduler.schedule(now)
        if scheduled is None:
            return None
        try:
            pending = self._runner.dispatch(scheduled.batch)
        except PoolLost:
            raise
        except Exception as error:
            return scheduled, error
        except BaseException:
            self._late += self._drop(scheduled, EngineFailure("the step was broken off"))
            raise
        self._flights.append(_Flight(scheduled, pending, now))
        return None

    def _collect(self) -> tuple[tuple[RequestOutput, ...], StepStats | None]:
        """Waits for the oldest step, and turns each sampled token into an output."""
        flight = self._flights[0]
        scheduled = flight.scheduled
        try:
            result = self._runner.collect(flight.pending)  # may be broken off, and called again
        except PoolLost:
            raise
        except Exception as error:
            self._flights.popleft()
            return self._drop(scheduled, error), None
        self._flights.popleft()
        now = self._clock()
        broken = self._scheduler.update(scheduled, result, now)
        has_ended = not any(sequence in self._choices for sequence in scheduled.sequences)
        outputs, num_sampled = self._outputs(scheduled, result, broken, now)
        duration_s = now - max(flight.started_s, self._last_read_s)
        self._last_read_s = now
        if has_ended:  # it may have waited for somebody to read it
            return (), None
        return tuple(outputs), _step_stats(scheduled.batch, num_sampled, duration_s)

    def _outputs(
        self, scheduled: Scheduled, result: StepResult, broken: list[Sequence], now: float
    ) -> tuple[list[RequestOutput], int]:
        """One for each choice that still lives; and how many these are."""
        outputs: list[RequestOutput] = []
        num_ended = 0
        choices, token_ids = map(self._choices.get, scheduled.sampled), result.token_ids.tolist()
        for row, (choice, token_id) in enumerate(zip(choices, token_ids, strict=True)):
            if choice is None:  # it ended while the step was under way
                num_ended += 1
                continue
            if broken and choice.sequence in broken:
                error = EngineFailure("the logits were not numbers; the weights may be damaged")
                outputs += self._fail([choice.sequence], error)
                continue
            logprobs = () if choice.num_logprobs is None else _logprobs(choice, result, row)
            try:
                output = choice.take(token_id, logprobs, now)
            except JaxInferError as error:  # of a grammar: this choice cannot go on
                outputs += self._fail([choice.sequence], error)
                continue
            except Exception as error:  # of the tokenizer: a fault of this text, not of the others
                _log.exception("token %d could not be read", token_id)
                outputs += self._fail([choice.sequence], _failure(error))
                continue
            if output.finish_reason is not None:
                self._scheduler.finish(choice.sequence)
                self._forget(choice.sequence)
            outputs.append(output)
        return outputs, len(scheduled.sampled) - num_ended

    def _drop(self, scheduled: Scheduled, error: Exception) -> tuple[RequestOutput, ...]:
        """Ends what was in a step that failed."""
        _log.error("a step of %d sequences failed", len(scheduled.sequences), exc_info=error)
        self._scheduler.discard(scheduled)
        return self._fail([s for s in scheduled.sequences if s in self._choices], _failure(error))

    def _expire(self, now: float) -> tuple[RequestOutput, ...]:
        return tuple(
            self._end(sequence, FinishReason.TIMEOUT, now, _too_late(sequence, now))
            for sequence in self._scheduler.expire(now)
        )

    def _fail(self, sequences: list[Sequence], error: JaxInferError) -> tuple[RequestOutput, ...]:
        now = self._clock()
        for sequence in sequences:
            self._scheduler.finish(sequence, is_failed=True)
        return tuple(self._end(sequence, FinishReason.ERROR, now, error) for sequence in sequences)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now: float,
        error: JaxInferError | None = None,
    ) -> RequestOutput:
        return self._forget(sequence).end(reason, now, error)

    def _forget(self, sequence: Sequence) -> Choice:
        request_id = sequence.request.request_id
        self._num_live[request_id] -= 1
        if not self._num_live[request_id]:
            del self._num_live[request_id]
        return self._choices.pop(sequence)

    def _detokenizer(self, request: Request) -> Detokenizer | None:
        if self._tokenizer is None:
            return None
        sampling = request.sampling
        return Detokenizer(
            self._tokenizer,
            prompt_ids=request.token_ids,
            skip_special_tokens=sampling.skip_special_tokens,
            stop=sampling.stop,
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )


def _logprobs(choice: Choice, result: StepResult, row: int) -> tuple[TokenLogprob, ...]:
    num_top = choice.num_logprobs
    top: tuple[tuple[int, float], ...] = ()
    if num_top and result.top_ids is not None and result.top_logprobs is not None:
        ids, values = result.top_ids[row, :num_top], result.top_logprobs[row, :num_top]
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return (TokenLogprob(int(result.token_ids[row]), float(result.logprobs[row]), top),)


def _step_stats(batch: Batch, num_sampled: int, duration_s: float) -> StepStats:
    return StepStats(
        kind=batch.kind,
        num_seqs=batch.num_seqs,
        num_tokens=batch.num_tokens,
        num_padded_tokens=batch.bucket,
        num_sampled=num_sampled,
        duration_s=duration_s,
    )


def _failure(error: Exception) -> JaxInferError:
    if isinstance(error, EngineFailure):
        return error
    failure = EngineFailure(f"a step failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _too_late(sequence: Sequence, now: float) -> DeadlineExceeded:
    waited = now - sequence.request.arrival_s
    return DeadlineExceeded(
        f"the request ended at its deadline, after {waited:.1f} s and "
        f"{sequence.num_output_tokens} tokens; give it more time or ask for fewer tokens"
    )

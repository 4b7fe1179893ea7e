"""The loop that drives a model: schedule, dispatch, collect, update, detokenize.

Host only: no JAX. The device is behind the `Runner` protocol; time is an injected clock. An Engine
belongs to one thread.

A step that fails is tried again: its sequences go on behind the tokens that have been read, and
nobody can tell from their outputs. Where the KV pool is lost, or our own code fails, scheduler and
pages are made anew and everybody goes on like that.

    call of step():   n                              n+1
    host              schedule n, dispatch n,        schedule n+1, dispatch n+1,
                      read n-1: update, detokenize   read n: update, detokenize
    device            ... n-1 |        n             ...        |       n+1

So the device has the next step before the host reads the last one, and does not wait for it. A
sequence that turns out to have ended is in one step more than it needed; its row there is dropped.

Where a step takes long, that buys nothing (the host's milliseconds are a few percent of it) and
costs who comes meanwhile a whole step of waiting. Then a call dispatches a step and reads it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from jaxinfer.choice import Choice
from jaxinfer.ending_errors import not_started, step_failure, too_late, words_of
from jaxinfer.errors import (
    EngineFailure,
    InvalidRequest,
    JaxInferError,
    NotNumbers,
    PoolLost,
)
from jaxinfer.flights import Flight, Flights
from jaxinfer.outputs import EngineStep, RequestOutput, TokenLogprob
from jaxinfer.request_rules import RequestRules
from jaxinfer.scheduling.batch import Batch, StepResult
from jaxinfer.scheduling.page_pool import PagePool
from jaxinfer.scheduling.request import FinishReason, Request
from jaxinfer.scheduling.scheduler import Scheduler
from jaxinfer.scheduling.sequence import Sequence
from jaxinfer.stats import PoolStats, StepStats
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.untold import Untold
from jaxinfer.versions import ModelVersion, Versions

__all__ = ["Engine", "EngineStep", "RequestOutput", "Runner", "TokenLogprob"]

MAX_UNDER_WAY = 2  # steps: one runs, one is behind it
LONG_STEP_S = 0.05  # nothing is dispatched behind a step while they take longer
MAX_REBUILDS = 5  # in a row, without a step that was read, beside the retries of a sequence
Result = TypeVar("Result")
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

    def rebuild(self) -> None:
        """Makes pages and seats anew; what they held and the steps under way are dropped first."""
        ...

    def drop_version(self, version: str) -> None:
        """Frees the parameters of a version that no step under way computes with."""
        ...


class Engine:
    """One model and its requests.

    Args:
        make_scheduler: makes a new one with a new pool; called again whenever they are lost.
        tokenizer: None: outputs have token ids and no text.
        version: of the weights, current at first; every sequence keeps its version to its end.
        vocab_size: ids of prompts and stop tokens must be below it.
        eos_token_ids: that end an answer.
        clock: monotonic seconds, the same as of Request.arrival_s and deadline_s.
        random_seed: 64 bits for each request that names no seed.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        make_scheduler: Callable[[], Scheduler],
        tokenizer: Tokenizer | None,
        version: str,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        random_seed: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.vocab_size = vocab_size
        self._versions = Versions(ModelVersion(version, tokenizer, frozenset(eos_token_ids)))
        self._shares: dict[str, float] = {}  # of the steps, by version; of others it is 1
        self._runner = runner
        self._make_scheduler = make_scheduler
        self._scheduler = make_scheduler()
        self._rules = RequestRules(vocab_size, self._scheduler.limit, tokenizer is not None)
        self._clock = clock
        self._random_seed = random_seed
        self._flights = Flights()
        self._untold = Untold()
        self._num_rebuilds = 0  # since a step was read
        self._last_read_s = -math.inf
        self._last_step_s = 0.0
        self._choices: dict[Sequence, Choice] = {}
        self._num_live: dict[str, int] = {}  # choices of each request

    @property
    def max_total_tokens(self) -> int:
        """Prompt and output tokens of the longest request."""
        return self._scheduler.limit.max_total_tokens

    @property
    def version(self) -> str:
        """The weights of requests that name none."""
        return self._versions.current

    @property
    def versions(self) -> tuple[str, ...]:
        """All that are there, retired ones too."""
        return self._versions.names

    def takes_version(self, version: str) -> bool:
        """Whether requests may name it: it is there and not retired."""
        return self._versions.takes(version)

    def add_version(self, found: ModelVersion) -> None:
        """Takes requests of another version, whose parameters the runner has.

        Raises: ValueError if it is there.
        """
        self._versions.add(found)

    def take_back_version(self, found: ModelVersion) -> None:
        """Takes requests again of one that was dropped and has not ended.

        Raises: ValueError for another.
        """
        self._versions.take_back(found)

    def serve_version(self, version: str) -> None:
        """Makes it the one of requests that name none. Raises: InvalidRequest if not there."""
        self._versions.become_current(version)

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Gives versions that have work steps in proportion to these, in place of those before.

        Of what is not named it is 1. The bound of version_turns.py holds for the smallest share. A
        share is forgotten with its version.

        Raises: ValueError for a share below 0, or that is not a finite number.
        """
        self._scheduler.set_shares(shares)
        self._shares = dict(shares)

    def drop_version(self, version: str) -> None:
        """Takes no more requests of it; its parameters are freed when its last one has ended,
        which may be now. Unknown ones are ignored. Raises: ValueError for the current one.
        """
        self._versions.retire(version)
        self._let_go()

    def submit(self, request: Request) -> None:
        """Queues a request: as many sequences as it has choices, or none if it is refused.

        Raises: InvalidRequest naming the field; ContextLengthExceeded if it can never fit.
        """
        if request.request_id in self._num_live:
            raise InvalidRequest(
                f"request_id {request.request_id!r} is in use; choose another", param="request_id"
            )
        self._rules.check(request)
        found = self._versions.choose(request.version)
        sampling = request.sampling
        seed = self._random_seed() if sampling.seed is None else sampling.seed
        choices: dict[Sequence, Choice] = {}
        for index in range(sampling.n):
            sequence = Sequence(request, index=index, seed=seed, version=found.name)
            choices[sequence] = Choice.of(sequence, found)
        try:
            for sequence in choices:  # nothing is queued before all of it could be made
                self._scheduler.submit(sequence)
        except Exception:
            self._scheduler.abort(request.request_id)
            raise
        for sequence in choices:
            self._versions.begin(sequence.version)
        self._choices |= choices
        self._num_live[request.request_id] = sampling.n

    def abort(self, request_id: str) -> tuple[RequestOutput, ...]:
        """Ends the choices of a request that still live; their pages are free when this returns.

        Returns: their last outputs, which no step repeats; none for an id that is not known.
        """
        now = self._clock()
        aborted = self._surely(lambda: self._scheduler.abort(request_id))
        outputs = tuple(self._end(sequence, FinishReason.ABORT, now) for sequence in aborted)
        self._let_go()  # no step may follow
        return outputs

    def pause(self, request_id: str) -> None:
        """Keeps a request from running until it is resumed; unknown ids are ignored.

        Its pages are free when this returns; its deadline runs on.
        """
        self._surely(lambda: self._scheduler.pause(request_id))

    def resume(self, request_id: str) -> None:
        """Lets a paused request go on, with the tokens that it would have had."""
        self._surely(lambda: self._scheduler.resume(request_id))

    def _surely(self, change: Callable[[], Result]) -> Result:
        """Once more with a new scheduler if it meets a fault of ours."""
        try:
            return change()
        except Exception as error:
            self.recover(error)
            return change()

    def abort_all(self, error: JaxInferError) -> tuple[RequestOutput, ...]:
        """Ends everything with `error`; returns the last outputs."""
        outputs = self._fail(list(self._choices), error)
        self._let_go()
        return outputs

    def close(self) -> None:
        """Lets go of the steps under way, unread. It must not step any more."""
        self._flights.clear()

    def flush_cache(self) -> int:
        """Forgets cached pages; those of live sequences stay, and can be found.

        Returns: how many pages are free now that were cached.
        """
        return self._scheduler.pool.evict_all()

    def has_work(self) -> bool:
        """Whether `step` has something to do or to tell; not for those that are paused."""
        has_to_let_go = self._versions.has_retired and bool(self._flights)
        return bool(self._untold.outputs) or has_to_let_go or self._scheduler.has_work()

    @property
    def has_requests(self) -> bool:
        """Whether any lives, though all may be paused."""
        return bool(self._choices)

    @property
    def is_still(self) -> bool:
        """Whether nothing lives, no step is under way, and all has been told."""
        return not (self._choices or self._flights or self._untold.outputs)

    @property
    def pool(self) -> PagePool:
        """The pages of now: another pool after a rebuild."""
        return self._scheduler.pool

    def pool_stats(self) -> PoolStats:
        return self._scheduler.stats()

    def step(self) -> EngineStep:
        """Dispatches the next step for whatever can run, and reads the one before it.

        Also ends what has passed its deadline. A step that fails, a lost pool and a fault of our
        own code are told in the answer: who was in it goes on later, or ends with EngineFailure
        when it has no try left.

        Returns: the outputs of the step that was read; its stats, None if there was none, or if all
            that was in it had ended before.
        Raises: as `recover`.
        """
        stats: StepStats | None = None
        try:
            stats = self._step(self._clock())
        except Exception as error:
            self.recover(error)
        self._let_go()
        return self._untold.tell(stats)

    def _let_go(self) -> None:
        """Frees retired versions that nobody needs any more."""
        if self._versions.has_retired:
            for version in self._versions.let_go(self._flights.versions):
                self._runner.drop_version(version)
                if self._shares.pop(version, None) is not None:
                    self._scheduler.set_shares(self._shares)

    def recover(self, error: Exception) -> None:
        """Makes scheduler and pages anew after PoolLost, or a fault of our own code.

        Whoever lives goes on behind the tokens that it has handed out. For those that may be to
        blame it was a failed try.

        Raises: EngineFailure, and everybody still lives, if that fails, or if it has happened too
            often without a step that was read in between.
        """
        started_s = self._clock()
        _log.error("scheduler and KV pool are made anew", exc_info=error)
        blamed = self._blamed(error)
        versions = dict.fromkeys(s.version for s in blamed) or {self.version: None}
        hopeless = self._scheduler.blame(blamed)
        self._flights.clear()
        before, self._scheduler = self._scheduler, self._make_scheduler()
        self._scheduler.set_shares(self._shares)
        for sequence, choice in self._choices.items():
            sequence.begin_again(choice.num_taken)
        self._scheduler.take_over(self._choices, before)
        self._num_rebuilds += 1
        self._untold.note_failure(versions, len(blamed) - len(hopeless))
        if self._num_rebuilds > MAX_REBUILDS + self._scheduler.max_retries:
            raise EngineFailure(
                f"the engine failed {self._num_rebuilds} times and no step could be read in "
                f"between: {type(error).__name__}: {error}"
            ) from error
        try:
            self._runner.rebuild()
        except Exception as failure:
            raise EngineFailure(f"the KV pool could not be made anew: {failure}") from failure
        self._untold.outputs += self._fail(hopeless, step_failure(error, hopeless))
        self._untold.note_rebuild(self._clock() - started_s)
        self._let_go()

    def _blamed(self, error: Exception) -> list[Sequence]:
        """Who may have caused it: the one that runs alone, if one does; else whoever was in a step
        that took the pool along; of another fault we know nothing.
        """
        trial = self._scheduler.trial
        if trial is not None:
            return [trial]
        if not isinstance(error, PoolLost):
            return list(self._choices)
        return [s for s in self._flights.sequences if s in self._choices]

    def _step(self, now: float) -> StepStats | None:
        self._expire(now)
        num_unread = len(self._flights)
        was_broken_off = num_unread == MAX_UNDER_WAY or self._flights.newest_has_failed  # last call
        is_long = self._last_step_s > LONG_STEP_S
        if not was_broken_off and not (is_long and num_unread):
            self._dispatch(now)
        stats = self._collect() if num_unread or (is_long and self._flights) else None
        if self._flights.oldest_has_failed:
            self._collect()
        return stats

    def _dispatch(self, now: float) -> None:
        """Starts the next step."""
        scheduled = self._scheduler.schedule(now)
        if scheduled is None:
            return
        pending, error = None, None
        try:
            pending = self._runner.dispatch(scheduled.batch)
        except PoolLost as lost:
            self._flights.add(Flight(scheduled, None, now, lost))
            raise
        except Exception as failure:  # told when it is its turn to be read
            error = failure
        except BaseException:  # Ctrl-C
            error = EngineFailure("the step was broken off")
            self._flights.add(Flight(scheduled, None, now, error))
            raise
        self._flights.add(Flight(scheduled, pending, now, error))

    def _collect(self) -> StepStats | None:
        """Waits for the oldest step, and turns each sampled token into an output."""
        flight = self._flights.oldest
        scheduled = flight.scheduled
        try:
            if flight.error is not None:
                raise flight.error
            result = self._runner.collect(flight.pending)  # may be broken off, and called again
        except PoolLost:
            raise
        except Exception as error:
            self._flights.pop()
            self._retry(flight, error)
            return None
        self._flights.pop()
        now = self._clock()
        broken = self._scheduler.update(scheduled, result, now)
        living = (s for s in scheduled.sequences if s in self._choices and s not in flight.lost)
        has_ended = next(living, None) is None
        num_sampled = self._take(flight, result, broken, now)
        duration_s = now - max(flight.started_s, self._last_read_s)
        self._last_read_s = now
        if has_ended:  # it may have waited for somebody to read it
            return None
        self._num_rebuilds, self._last_step_s = 0, duration_s
        return _step_stats(scheduled.batch, num_sampled, duration_s)

    def _take(self, flight: Flight, result: StepResult, broken: list[Sequence], now: float) -> int:
        """An output for each choice that still lives; returns how many these are."""
        outputs, lost, num_taken = self._untold.outputs, flight.lost, 0
        sampled, token_ids = flight.scheduled.sampled, result.token_ids.tolist()
        for row, (choice, token_id) in enumerate(
            zip(map(self._choices.get, sampled), token_ids, strict=True)
        ):
            if choice is None or (lost and choice.sequence in lost):
                continue  # it has ended, or begun again, while the step was under way
            num_taken += 1
            if broken and choice.sequence in broken:
                error = NotNumbers("the logits were not numbers; the weights may be damaged")
                outputs += self._fail([choice.sequence], error)
                continue
            try:
                output = choice.take(token_id, choice.logprobs_of(result, row), now)
            except JaxInferError as error:  # of a grammar: this choice cannot go on
                outputs += self._fail([choice.sequence], error)
                continue
            except Exception as error:  # of the tokenizer: a fault of this text, not of the others
                _log.exception("token %d could not be read", token_id)
                failure = EngineFailure(f"a token could not be read: {words_of(error)}")
                failure.__cause__ = error
                outputs += self._fail([choice.sequence], failure)
                continue
            outputs.append(output)
            if output.finish_reason is not None:
                self._forget(choice.sequence)
                self._scheduler.finish(choice.sequence)
        return num_taken

    def _retry(self, flight: Flight, error: Exception) -> None:
        """Lets those begin again that were in a step that failed."""
        scheduled = flight.scheduled
        _log.error("a step of %d sequences failed", len(scheduled.sequences), exc_info=error)
        self._scheduler.discard(scheduled)
        living = [s for s in scheduled.sequences if s in self._choices and s not in flight.lost]
        hopeless = self._scheduler.retry(living)
        self._flights.lose(living)  # what they draw there comes of what failed
        if living:  # else it came of one that failed, or nobody waits for it
            self._untold.note_failure((scheduled.batch.version,), len(living) - len(hopeless))
        self._untold.outputs += self._fail(hopeless, step_failure(error, hopeless))

    def _expire(self, now: float) -> None:
        errors: dict[Sequence, JaxInferError] = {}
        errors |= {s: too_late(s, now) for s in self._scheduler.expire(now)}
        errors |= {s: not_started(s, now) for s in self._scheduler.expire_queued(now)}
        for sequence, error in errors.items():
            self._untold.outputs.append(self._end(sequence, FinishReason.TIMEOUT, now, error))

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
        self._versions.end(sequence.version)
        return self._choices.pop(sequence)


def _step_stats(batch: Batch, num_sampled: int, duration_s: float) -> StepStats:
    return StepStats(
        kind=batch.kind,
        num_seqs=batch.num_seqs,
        num_tokens=batch.num_tokens,
        num_padded_tokens=batch.bucket,
        num_sampled=num_sampled,
        duration_s=duration_s,
        version=batch.version,
    )

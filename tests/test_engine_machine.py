"""The engine under any order of submissions, steps, pauses, aborts, failures and changes of the
weights, in too small a pool.

Whatever survives says what the version that it began with says alone, with the cache off; when all
is done no page is in use, and of the versions only what nobody dropped is there.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxinfer.config import SamplingParams
from jaxinfer.constraint import Mask
from jaxinfer.engine import MAX_REBUILDS
from jaxinfer.errors import EngineFailure, InvalidRequest, Overloaded, PoolLost
from jaxinfer.scheduling.batch import Batch
from jaxinfer.scheduling.page_pool import page_digest
from jaxinfer.scheduling.request import FinishReason, Request
from jaxinfer.versions import ModelVersion
from tests.fakes import (
    EOS,
    VOCAB_SIZE,
    Answers,
    FakeClock,
    FakeRunner,
    FakeTokenizer,
    make_engine,
    run_all,
)

SIZE = 4
DIGESTS = {"real": page_digest, "constant": lambda parent, tokens: b"same"}
VERSIONS = {"v1": 0, "v2": 1, "v3": 7}  # what each adds to every token
GOOD_ENDS = {FinishReason.STOP, FinishReason.LENGTH}
SAMPLING = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.8]),
        "top_k": st.sampled_from([0, 5]),
        "seed": st.integers(0, 2),
        "n": st.sampled_from([1, 1, 1, 3]),
        "max_tokens": st.sampled_from([1, 3, 12, 12, 30]),
        "logprobs": st.sampled_from([None, None, 2]),
        "min_tokens": st.sampled_from([0, 1]),
        "stop": st.sampled_from([(), ("ab",), ("b",)]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, -0.25]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.5]),
        "logit_bias": st.sampled_from([(), (), {3: 1.0, 90: -2.0}]),
    }
)
PROMPT = st.builds(
    lambda start, length, last: (*range(start, start + length), last),
    st.sampled_from([0, 0, 50]),
    st.sampled_from([0, 3, 4, 9, 17]),
    st.integers(0, 2),
)


class Third:
    """A grammar of `length` tokens. Which third of them may come next depends on all before."""

    def __init__(self, length: int, seen: int = 0):
        self._left, self._seen = length, seen
        self.prepare()

    @property
    def is_complete(self) -> bool:
        return self._left == 0

    def copy(self) -> Third:
        return Third(self._left, self._seen)

    def take(self, token_id: int) -> None:
        assert self._admits[token_id], f"token {token_id} is not admitted"
        self._left, self._seen = self._left - 1, (31 * self._seen + token_id + 1) % 1009

    def prepare(self) -> None:
        self._admits = (np.arange(VOCAB_SIZE) + self._seen) % 3 == 0

    def mask(self, *, may_end: bool) -> Mask:
        bits = np.zeros(-(-VOCAB_SIZE // 32) * 32, np.bool_)
        bits[:VOCAB_SIZE] = self._admits
        bits[EOS] &= may_end
        return np.packbits(bits, bitorder="little").view(np.int32)


@functools.cache
def solo(
    prompt: tuple[int, ...], sampling: SamplingParams, length: int = 0, version: str = "v1"
) -> Answers:
    """The answers of a request alone, in a pool with room, nothing cached."""
    engine = make_engine(
        FakeRunner(num_pages=128, page_size=SIZE, versions=VERSIONS),
        tokenizer=FakeTokenizer(),
        max_num_batched_tokens=128,
        enable_prefix_caching=False,
        version=version,
    )
    return run_all(engine, [Request("solo", prompt, sampling, constraint=grammar(length))])


def grammar(length: int) -> Third | None:
    return Third(length) if length else None


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        num_pages=st.integers(14, 24),
        max_num_seqs=st.integers(1, 6),
        budget=st.sampled_from([16, 20, 64]),
        enable_prefix_caching=st.booleans(),
        max_retries=st.sampled_from([0, 1, 2, 2]),
        digest=st.sampled_from(sorted(DIGESTS)),
        has_two=st.booleans(),
    )
    def make(self, num_pages: int, budget: int, digest: str, has_two: bool, **config: Any) -> None:
        self.runner = FakeRunner(num_pages, SIZE, on_step=self.lose, versions={"v1": 0})
        self.is_losing = False
        self.clock = FakeClock()
        self.engine = make_engine(
            self.runner,
            tokenizer=FakeTokenizer(),
            max_num_batched_tokens=budget,
            max_model_len=64,
            clock=self.clock,
            digest=DIGESTS[digest],
            **config,
        )
        self.requests: dict[str, Request] = {}
        self.lengths: dict[str, int] = {}  # of their grammars; 0: none
        self.version_of: dict[str, str] = {}
        self.kept = {"v1"}  # that take requests
        self.retired: set[str] = set()  # that are dropped, and somebody needs
        if has_two:
            self.add_a_version("v2")
        self.answers = Answers()
        self.aborted: set[str] = set()

    @rule(
        prompt=PROMPT,
        sampling=SAMPLING,
        priority=st.integers(-1, 1),
        patience_s=st.sampled_from([None, None, None, 25.0]),
        queue_s=st.sampled_from([None, None, None, 4.0]),
        length=st.sampled_from([0, 0, 5, 20]),
        version=st.sampled_from([None, "v1", "v2", "v2", "v3"]),
    )
    def submit(
        self,
        prompt: tuple[int, ...],
        sampling: dict[str, Any],
        priority: int,
        patience_s: float | None,
        queue_s: float | None,
        length: int,
        version: str | None,
    ) -> None:
        name = str(len(self.requests))
        request = Request(
            name,
            prompt,
            SamplingParams(**sampling),
            arrival_s=self.clock.now,
            priority=priority,
            deadline_s=None if patience_s is None else self.clock.now + patience_s,
            queue_deadline_s=None if queue_s is None else self.clock.now + queue_s,
            constraint=grammar(length),
            version=version,
        )
        if version is not None and version not in self.kept:
            with pytest.raises(InvalidRequest, match="takes no requests"):
                self.engine.submit(request)
            return
        self.engine.submit(request)
        self.version_of[name] = version or self.engine.version
        self.requests[name], self.lengths[name] = request, length

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.clock.now += 1.0
            had_work, num_started = self.engine.has_work(), len(self.runner.batches)
            num_unread = len(self.engine._flights)
            step = self.engine.step()
            self.answers.add(step.outputs)
            if had_work:
                has_started = len(self.runner.batches) > num_started
                has_read = len(self.engine._flights) < num_unread + has_started
                assert step.outputs or has_started or has_read or step.failed_versions

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.aborted.add(name)
        self.answers.add(self.engine.abort(name))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), is_resumed=st.booleans())
    def pause_or_resume(self, data: st.DataObject, is_resumed: bool) -> None:
        change = self.engine.resume if is_resumed else self.engine.pause
        change(data.draw(st.sampled_from(sorted(self.requests))))

    @rule()
    def fail_the_next_step(self) -> None:
        self.runner.fail_at |= {len(self.runner.batches)}

    @rule()
    def fail_when_the_next_step_is_read(self) -> None:
        self.runner.fail_collect_at |= {len(self.runner.batches)}

    @precondition(lambda self: self.engine._num_rebuilds < MAX_REBUILDS - 1)
    @rule()
    def lose_the_pool_in_the_next_step(self) -> None:
        self.is_losing = True

    def lose(self, _: Batch) -> None:
        if self.is_losing:
            self.is_losing = False
            raise PoolLost("the device was made to fail")

    @precondition(lambda self: self.engine._num_rebuilds < MAX_REBUILDS - 1)
    @rule()
    def find_a_fault_of_our_own(self) -> None:
        """Between two steps, with whatever is under way."""
        self.engine.recover(ZeroDivisionError("by hand"))

    @rule(version=st.sampled_from(list(VERSIONS)))
    def add_a_version(self, version: str) -> None:
        """Or the same again, when it is gone."""
        tokenizer: Any = FakeTokenizer()
        found = ModelVersion(version, tokenizer, frozenset({EOS}))
        if version in self.engine.versions:
            with pytest.raises(ValueError, match="is there already"):
                self.engine.add_version(found)
            return
        self.runner.versions[version] = VERSIONS[version]
        self.engine.add_version(found)
        self.kept.add(version)

    @rule(version=st.sampled_from(list(VERSIONS)))
    def serve(self, version: str) -> None:
        if version in self.kept:
            self.engine.serve_version(version)
            return
        with pytest.raises(InvalidRequest, match="takes no requests"):
            self.engine.serve_version(version)

    @rule(version=st.sampled_from(list(VERSIONS)))
    def drop_a_version(self, version: str) -> None:
        if version == self.engine.version:
            with pytest.raises(ValueError, match="is current"):
                self.engine.drop_version(version)
            return
        self.retired |= {version} & self.kept
        self.kept.discard(version)
        self.engine.drop_version(version)

    @precondition(lambda self: self.kept != {self.engine.version})
    @rule(data=st.data())
    def drop_a_version_and_abort_its_requests(self, data: st.DataObject) -> None:
        others = self.kept - {self.engine.version}
        version = data.draw(st.sampled_from(sorted(others)))
        self.drop_a_version(version)
        for name, own in self.version_of.items():
            if own == version:
                self.aborted.add(name)
                self.answers.add(self.engine.abort(name))

    @rule(
        shares=st.dictionaries(st.sampled_from(list(VERSIONS)), st.sampled_from([0, 0.01, 0.5, 1]))
    )
    def share_the_steps(self, shares: dict[str, float]) -> None:
        self.engine.set_shares(shares)

    @invariant()
    def a_dropped_version_is_freed_when_nobody_needs_it_and_not_before(self) -> None:
        needed = {sequence.version for sequence in self.engine._choices}
        needed |= {flight.scheduled.batch.version for flight in self.engine._flights}
        self.retired &= needed
        there = set(self.engine.versions)
        assert there == set(self.runner.versions) == self.kept | self.retired
        assert there >= needed | {self.engine.version}

    @invariant()
    def pages_and_queues_agree(self) -> None:
        self.engine._scheduler.check_integrity()
        stats = self.engine.pool_stats()
        total = stats.pages_used + stats.pages_cached + stats.pages_free
        assert total == stats.pages_total == self.runner.num_pages

    @invariant()
    def the_runner_found_no_fault(self) -> None:
        assert self.runner.faults == []

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.runner.fail_at = self.runner.fail_collect_at = frozenset()
        self.is_losing = False
        for name in self.requests:
            self.engine.resume(name)
        for _ in range(4000):
            if not self.engine.has_work():
                break
            self.answers.add(self.engine.step().outputs)
        assert not self.engine.has_work()
        assert self.engine.pool_stats().pages_used == 0
        assert not self.engine._choices
        assert not self.engine._num_live
        for version in set(self.engine.versions) - {self.engine.version}:
            self.engine.drop_version(version)
        while self.engine.has_work():  # a step may be under way that nobody waits for
            assert self.engine.step().outputs == ()
        assert list(self.runner.versions) == [self.engine.version]
        self.the_runner_found_no_fault()
        for name, request in self.requests.items():
            for index in range(request.sampling.n):
                self.check(request, index, name in self.aborted)

    def check(self, request: Request, index: int, was_aborted: bool) -> None:
        """A whole answer is that of the solo run, a broken off one its beginning."""
        answer = self.answers[request.request_id, index]
        length = self.lengths[request.request_id]
        version = self.version_of[request.request_id]
        alone = solo(request.token_ids, request.sampling, length, version)["solo", index]
        assert answer.stats is None or answer.stats.version == version
        if answer.finish_reason in GOOD_ENDS:
            assert answer.token_ids == alone.token_ids
            assert answer.logprobs == alone.logprobs
            assert (answer.text, answer.stop) == (alone.text, alone.stop)
            assert answer.finish_reason is alone.finish_reason
            return
        assert answer.token_ids == alone.token_ids[: len(answer.token_ids)]
        assert answer.finish_reason is not FinishReason.ABORT or was_aborted
        if answer.finish_reason is FinishReason.TIMEOUT:
            is_queued = isinstance(answer.error, Overloaded)
            assert (request.queue_deadline_s if is_queued else request.deadline_s) is not None
            assert not (is_queued and answer.token_ids)
        if answer.finish_reason is FinishReason.ERROR:
            assert isinstance(answer.error, EngineFailure)
            assert answer.error.message.startswith("a step failed")


EngineMachine.TestCase.settings = settings(
    max_examples=250, stateful_step_count=30, deadline=None, derandomize=True
)
TestEngine = EngineMachine.TestCase


def test_the_small_pool_really_preempts_and_really_shares():
    """So that the machine above does not pass for want of trouble."""
    engine = make_engine(FakeRunner(num_pages=14, page_size=SIZE), max_model_len=64)
    sampling = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    requests = [Request(str(i), (*range(9), i % 3), sampling) for i in range(6)]
    answers = run_all(engine, requests)
    stats = engine.pool_stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_hit_tokens > 0
    for request in requests:
        alone = solo(request.token_ids, sampling)["solo", 0]
        assert answers[request.request_id, 0].token_ids == alone.token_ids

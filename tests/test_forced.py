"""Teacher forcing: the forced text comes out, with the log-probabilities that scoring gives it."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.errors import EngineFailure, InvalidRequest
from jaxinfer.forced import Forced, forced_sampling
from jaxinfer.offline import LLM
from jaxinfer.outputs import TokenLogprob
from jaxinfer.scheduling.request import FinishReason, Request
from tests.fakes import (
    EOS,
    VOCAB_SIZE,
    Answer,
    FakeRunner,
    FakeTokenizer,
    greedy_continuation,
    make_engine,
    run_all,
)
from tests.tiny_llm import tiny_llm

PROMPT = (5, 7)
TEXT = (9, EOS, 9, 31, 32, 0, EOS, 64)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory)


def forced(
    prompt: tuple[int, ...], text: tuple[int, ...], vocab_size: int = VOCAB_SIZE, name: str = "f"
) -> Request:
    constraint = Forced(text, vocab_size)
    return Request(name, prompt, forced_sampling(len(text)), constraint=constraint)


def answer_of(runner: FakeRunner, request: Request, *others: Request) -> Answer:
    engine = make_engine(runner, tokenizer=FakeTokenizer(), max_num_seqs=3)
    answers = run_all(engine, [request, *others])
    assert runner.faults == []
    assert engine.pool_stats().pages_used == 0
    return answers[request.request_id, 0]


def test_a_forced_text_comes_out_whole_end_tokens_inside_it_too():
    answer = answer_of(FakeRunner(), forced(PROMPT, TEXT))
    assert answer.token_ids == list(TEXT)
    assert answer.finish_reason is FinishReason.STOP
    assert [row.token_id for row in answer.logprobs] == list(TEXT)
    assert all(len(row.top) == 20 for row in answer.logprobs)


def test_a_forced_text_stays_apart_from_its_company_and_leaves_it_alone():
    free = Request("free", PROMPT, forced_sampling(6))
    other = forced(PROMPT, TEXT[::-1], name="other")
    assert answer_of(FakeRunner(), free, forced(PROMPT, TEXT), other).token_ids == (
        greedy_continuation(PROMPT, 6)
    )
    assert answer_of(FakeRunner(), forced(PROMPT, TEXT), free, other).token_ids == list(TEXT)


@pytest.mark.parametrize(
    "runner",
    [FakeRunner(fail_at=frozenset({2})), FakeRunner(fail_collect_at=frozenset({1, 3}))],
    ids=["dispatched", "read"],
)
def test_a_forced_text_goes_on_where_it_was_after_a_failed_step(runner: FakeRunner):
    answer = answer_of(runner, forced(PROMPT, TEXT))
    assert answer.token_ids == list(TEXT)
    assert answer.finish_reason is FinishReason.STOP


def test_it_admits_one_token_after_another_and_nothing_after_the_last():
    first = Forced((3, 40), 64)
    second = first.copy()
    first.take(3)
    assert second.mask(may_end=True).view(np.uint32).tolist() == [1 << 3, 0]
    assert first.mask(may_end=False).view(np.uint32).tolist() == [0, 1 << 8]
    with pytest.raises(EngineFailure, match="token 3 was drawn where token 40 was admitted"):
        first.take(3)
    first.take(40)
    assert first.is_complete
    assert not second.is_complete
    with pytest.raises(EngineFailure, match="nothing was admitted"):
        first.take(40)
    with pytest.raises(InvalidRequest, match="has ended"):
        first.prepare()


@pytest.mark.parametrize("text", [(), (64,), (-1, 3)])
def test_a_text_that_cannot_be_forced_is_refused(text: tuple[int, ...]):
    with pytest.raises(InvalidRequest, match="a text to force"):
        Forced(text, 64)


def rows_of(llm: LLM, request: Request) -> list[TokenLogprob]:
    return [row for output in llm._run([request]) for row in output.logprobs]


def test_forced_logprobs_are_those_of_scoring_bit_for_bit(llm: LLM):
    """A decode step's arithmetic is a prefill's (promise 1), and masks come after logprobs."""
    vocab_size = llm._built.engine.vocab_size
    ids = np.random.default_rng(0).integers(0, vocab_size, 40).tolist()
    ids[25] = min(llm.tokenizer.eos_token_ids)
    rows = rows_of(llm, forced(tuple(ids[:20]), tuple(ids[20:]), vocab_size))
    scored = llm.score([ids])[0][19:]
    assert [row.logprob for row in rows] == scored
    assert len(set(scored)) == 20
    for row in rows:
        assert len(row.top) == 20
        assert row.top == tuple(sorted(row.top, key=lambda pair: -pair[1]))
        assert dict(row.top).get(row.token_id, row.logprob) == row.logprob

"""generate, stream, chat and score, from a script's side."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import jaxinfer
from jaxinfer import offline
from jaxinfer.config import SamplingParams
from jaxinfer.errors import ConfigError, ContextLengthExceeded, EngineFailure, InvalidRequest
from jaxinfer.offline import LLM, Generation
from jaxinfer.outputs import RequestOutput
from jaxinfer.scheduling.request import FinishReason
from tests.models.reference_decoder import ReferenceDecoder
from tests.tiny import tiny_config, tiny_tensors
from tests.tiny_llm import pages_used, tiny_llm

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return tiny_llm(tmp_path_factory)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm: LLM):
    yield
    assert pages_used(llm) == 0
    assert not llm._engine.has_work()
    assert not llm._inboxes


@pytest.fixture(scope="module")
def reference() -> ReferenceDecoder:
    config = tiny_config()
    return ReferenceDecoder(config, tiny_tensors(config))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits - logits.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def ids_of(generations: list[Generation]) -> list[list[int]]:
    return [generation.token_ids for generation in generations]


def test_greedy_tokens_are_the_references(llm: LLM, reference: ReferenceDecoder):
    prompt = [5, 90, 17, 301, 44]
    context = list(prompt)
    for _ in range(8):
        context.append(int(reference.logits(context)[-1].argmax()))
    (got,) = llm.generate(prompt, ignore_eos=True, **GREEDY)
    assert got.token_ids == context[5:]
    assert got.prompt_token_ids == tuple(prompt)


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_a_text_a_list_of_ids_and_lists_of_both_are_prompts(llm: LLM, kind: Any):
    ids = llm.tokenizer.encode("the cat")
    (want,) = llm.generate("the cat", **GREEDY)
    assert want.token_ids
    assert ids_of(llm.generate(kind(ids), **GREEDY)) == [want.token_ids]
    assert ids_of(llm.generate(["the cat", kind(ids), "the cat"], **GREEDY)) == [want.token_ids] * 3


def test_answers_come_in_the_order_of_the_prompts(llm: LLM):
    """Long and short ones, more than can run at once."""
    prompts = [[i + 1] * (1 + 7 * i % 60) for i in range(20)]
    samplings = [SamplingParams(temperature=0.0, max_tokens=1 + i % 9) for i in range(20)]
    got = llm.generate(prompts, samplings)
    assert [g.prompt_token_ids for g in got] == [tuple(p) for p in prompts]
    for prompt, sampling, generation in zip(prompts, samplings, got, strict=True):
        assert llm.generate(prompt, sampling)[0].token_ids == generation.token_ids


def test_no_prompts_no_answers(llm: LLM):
    assert llm.generate([]) == []


def test_sampling_may_be_one_object(llm: LLM):
    assert ids_of(llm.generate("the", SamplingParams(**GREEDY))) == ids_of(
        llm.generate("the", **GREEDY)
    )


def test_choices_are_numbered_and_differ(llm: LLM):
    (got,) = llm.generate("the cat", n=4, seed=1, max_tokens=12)
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in got.choices}) == 4
    assert (got.text, got.token_ids) == (got.choices[0].text, got.choices[0].token_ids)
    (alone,) = llm.generate("the cat", seed=1, max_tokens=12)
    assert alone.token_ids == got.token_ids


def test_a_seed_gives_the_same_text_and_none_another(llm: LLM):
    texts = [llm.generate("a", seed=s, max_tokens=12)[0].text for s in (7, 7, 8, None, None)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 4


def test_text_is_the_tokens_decoded(llm: LLM):
    for generation in llm.generate(["the cat", "日本", "12345"], **GREEDY):
        assert generation.text == llm.tokenizer.decode(generation.token_ids)


def test_max_tokens_ends_with_length_and_statistics(llm: LLM):
    (choice,) = llm.generate([1, 2, 3], max_tokens=3, ignore_eos=True)[0].choices
    assert choice.finish_reason is FinishReason.LENGTH
    assert choice.stats is not None
    assert (choice.stats.num_prompt_tokens, choice.stats.num_output_tokens) == (3, 3)


def test_a_stop_string_cuts_the_text(llm: LLM):
    (free,) = llm.generate("the", temperature=0.0, max_tokens=20)
    start = len(free.text) // 2
    stop = free.text[start : start + 2]
    (cut,) = llm.generate("the", temperature=0.0, max_tokens=20, stop=stop)
    assert cut.choices[0].finish_reason is FinishReason.STOP
    assert cut.text == free.text[: free.text.index(stop)]
    (kept,) = llm.generate(
        "the", temperature=0.0, max_tokens=20, stop=[stop], include_stop_str_in_output=True
    )
    assert kept.text == cut.text + stop


def test_a_stop_token_ends_the_answer(llm: LLM):
    (free,) = llm.generate("the", temperature=0.0, max_tokens=20, ignore_eos=True)
    stop = free.token_ids[5]
    (cut,) = llm.generate("the", temperature=0.0, max_tokens=20, stop_token_ids=[stop])
    assert cut.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert cut.choices[0].finish_reason is FinishReason.STOP


def test_logprobs_come_when_asked_for(llm: LLM, reference: ReferenceDecoder):
    (plain,) = llm.generate([3, 4], **GREEDY)
    assert plain.choices[0].logprobs == []
    (got,) = llm.generate([3, 4], logprobs=3, **GREEDY)
    assert got.token_ids == plain.token_ids
    context = [3, 4]
    for token_id, entry in zip(got.token_ids, got.choices[0].logprobs, strict=True):
        want = log_softmax(reference.logits(context))[-1]
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(want[token_id], abs=1e-3)
        assert [i for i, _ in entry.top] == np.argsort(-want)[:3].tolist()
        assert entry.top[0] == (token_id, entry.logprob)
        context.append(token_id)


@pytest.mark.parametrize(
    ("prompts", "fields", "error", "message"),
    [
        ("", {}, InvalidRequest, "prompt must have at least 1 token; got none"),
        (["the", ""], {}, InvalidRequest, "prompt must have at least 1 token; got none"),
        (["the", []], {}, InvalidRequest, "prompt must have at least 1 token; got none"),
        ([1] * 640, {}, ContextLengthExceeded, "prompt has 640 tokens"),
        ([1] * 9999, {}, ContextLengthExceeded, "prompt has 9999 tokens"),
        ([1] * 600, {"max_tokens": 41}, ContextLengthExceeded, "max_tokens is 41"),
        ([1, 99999], {}, InvalidRequest, r"prompt must hold ids in \[0, \d+\); got 99999"),
        ([1, -1], {}, InvalidRequest, "got -1"),
        ([1, 2.5], {}, InvalidRequest, "prompt must hold token ids"),
        ("a", {"max_token": 3}, InvalidRequest, "no such sampling field: .*max_token"),
        ("a", {"temperature": 3.0}, InvalidRequest, r"temperature must be a number in \[0, 2\]"),
        ("a", {"sampling": SamplingParams(), "n": 2}, InvalidRequest, "sampling and n"),
        ("a", {"sampling": [SamplingParams()], "n": 2}, InvalidRequest, "sampling and n"),
        ("a", {"sampling": [SamplingParams()] * 2}, InvalidRequest, "got 2 for 1 prompts"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(
    llm: LLM, prompts: Any, fields: dict[str, Any], error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        llm.generate(prompts, **fields)


def test_one_bad_prompt_refuses_all_of_a_call(llm: LLM):
    with pytest.raises(ContextLengthExceeded):
        llm.generate([[1, 2], [1] * 700])


def test_an_unknown_engine_field_is_refused():
    with pytest.raises(ConfigError, match="no configuration field is called 'max_seqs'"):
        LLM("anything", max_seqs=3)


def joined(outputs: list[RequestOutput]) -> tuple[str, list[int]]:
    return "".join(o.text for o in outputs), [i for o in outputs for i in o.token_ids]


@pytest.mark.parametrize("prompt", ["日本語の", [7, 8, 9]])
def test_the_pieces_of_a_stream_join_to_the_answer(llm: LLM, prompt: Any):
    (want,) = llm.generate(prompt, temperature=0.0, max_tokens=24)
    outputs = list(llm.stream(prompt, temperature=0.0, max_tokens=24))
    assert joined(outputs) == (want.text, want.token_ids)
    assert len(outputs) > 3
    assert [o.finish_reason is not None for o in outputs] == [False] * (len(outputs) - 1) + [True]


def test_choices_of_a_stream_carry_their_index(llm: LLM):
    outputs = list(llm.stream("the", n=3, seed=3, max_tokens=6))
    (want,) = llm.generate("the", n=3, seed=3, max_tokens=6)
    for choice in want.choices:
        mine = [o for o in outputs if o.index == choice.index]
        assert joined(mine) == (choice.text, choice.token_ids)


def test_closing_a_stream_aborts_it_and_frees_its_pages(llm: LLM):
    stream = llm.stream([1] * 100, max_tokens=200, ignore_eos=True)
    next(stream)
    assert pages_used(llm) > 0
    stream.close()
    assert pages_used(llm) == 0
    assert list(stream) == []


def test_a_stream_that_nobody_reads_takes_nothing(llm: LLM):
    llm.stream([1] * 100)
    assert pages_used(llm) == 0


def test_a_stream_that_is_thrown_away_takes_nothing(llm: LLM):
    for _ in range(20):
        next(llm.stream([1] * 100, max_tokens=200, ignore_eos=True))


def test_two_streams_side_by_side_lose_nothing(llm: LLM):
    wants = [llm.generate(prompt, **GREEDY)[0].token_ids for prompt in ("the", "a dog")]
    streams = [llm.stream(prompt, **GREEDY) for prompt in ("the", "a dog")]
    outputs: list[list[RequestOutput]] = [[], []]
    for _ in range(8):
        for mine, stream in zip(outputs, streams, strict=True):
            mine += [o for o in [next(stream, None)] if o is not None]
    for mine, stream in zip(outputs, streams, strict=True):
        mine += stream
    assert [joined(mine)[1] for mine in outputs] == wants


def test_a_call_in_the_middle_of_a_stream_takes_nothing_from_it(llm: LLM):
    """The stream's outputs of the steps that the call made wait for it."""
    (want,) = llm.generate("the", temperature=0.0, max_tokens=30, ignore_eos=True)
    stream = llm.stream("the", temperature=0.0, max_tokens=30, ignore_eos=True)
    outputs = [next(stream), next(stream)]
    llm.generate(["a", "b"], max_tokens=50, ignore_eos=True)
    outputs += stream
    assert joined(outputs) == (want.text, want.token_ids)


def test_closing_one_stream_leaves_the_other_alone(llm: LLM):
    (want,) = llm.generate("the", **GREEDY)
    kept, closed = llm.stream("the", **GREEDY), llm.stream("a dog", **GREEDY)
    outputs = [next(kept)]
    next(closed)
    closed.close()
    assert joined([*outputs, *kept])[1] == want.token_ids


@pytest.mark.parametrize("prompt", ["", [], ["a", "b"]])
def test_a_stream_takes_one_prompt(llm: LLM, prompt: Any):
    with pytest.raises(InvalidRequest, match="prompt must h"):
        list(llm.stream(prompt))


def test_a_failing_step_is_raised_and_the_next_call_works(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    (want,) = llm.generate("the", **GREEDY)

    def fail(batch: object) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(llm._built.runner, "dispatch", fail)
        with pytest.raises(EngineFailure, match="RuntimeError: device lost"):
            llm.generate(["the", "cat"], **GREEDY)
    assert llm.generate("the", **GREEDY)[0].token_ids == want.token_ids


def test_chat_answers_through_the_template(llm: LLM):
    messages = [{"role": "user", "content": "the cat"}]
    prompt = llm.tokenizer.encode(
        "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )
    got = llm.chat(messages, **GREEDY)
    assert got.prompt_token_ids == tuple(llm.tokenizer.encode_chat(messages))
    assert len(got.prompt_token_ids) == len(prompt)
    assert got.token_ids == llm.generate(list(got.prompt_token_ids), **GREEDY)[0].token_ids


@pytest.mark.parametrize("length", [2, 16, 17, 40, 130])
def test_scores_are_the_references_log_softmax(llm: LLM, reference: ReferenceDecoder, length: int):
    ids = np.random.default_rng(length).integers(0, 400, length).tolist()
    (got,) = llm.score(ids)
    logprobs = log_softmax(reference.logits(ids))
    want = logprobs[np.arange(length - 1), ids[1:]]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
    assert sum(got) == pytest.approx(want.sum(), rel=1e-4)


def test_scores_of_generated_tokens_are_their_logprobs_bit_for_bit(llm: LLM):
    prompts = [[9], [5] * 17, list(range(40))]
    for prompt in prompts:
        (answer,) = llm.generate(prompt, temperature=0.0, max_tokens=20, logprobs=0)
        (scores,) = llm.score([*prompt, *answer.token_ids])
        generated = [entry.logprob for entry in answer.choices[0].logprobs]
        assert scores[len(prompt) - 1 :] == generated


def test_texts_are_scored_one_by_one_in_order(llm: LLM):
    both = llm.score(["the cat", "12345"])
    assert both == [llm.score("the cat")[0], llm.score("12345")[0]]
    assert [len(s) + 1 for s in both] == [
        len(llm.tokenizer.encode(t)) for t in ("the cat", "12345")
    ]
    assert llm.score([]) == []
    assert all(math.isfinite(x) and x < 0 for scores in both for x in scores)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ([5], InvalidRequest, "needs 2 or more tokens; got 1"),
        ([[1, 2], [5]], InvalidRequest, "needs 2 or more tokens; got 1"),
        ("", InvalidRequest, "at least 1 token"),
        ([1] * 641, ContextLengthExceeded, "the text has 641 tokens, but the model holds 640"),
    ],
)
def test_a_text_that_cannot_be_scored_is_refused(
    llm: LLM, text: Any, error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        llm.score(text)


@pytest.mark.parametrize("ids", [[1, 99999], [1, -1, 2], [1, 2.5], [1, 2**40]])
def test_a_text_of_unknown_tokens_is_refused(llm: LLM, ids: Any):
    with pytest.raises(InvalidRequest, match=r"a text to score must hold (token )?ids"):
        llm.score(ids)


def test_scoring_gives_its_pages_back_and_harms_no_one(llm: LLM):
    want = llm.generate([3] * 90, **GREEDY)[0].token_ids
    for _ in range(3):
        llm.score([7] * 640)
        assert pages_used(llm) == 0
    assert llm.generate([3] * 90, **GREEDY)[0].token_ids == want


def test_scoring_beside_a_running_stream_changes_neither(llm: LLM):
    (want,) = llm.generate("the", temperature=0.0, max_tokens=20, ignore_eos=True)
    scores = llm.score([4, 5, 6])
    stream = llm.stream("the", temperature=0.0, max_tokens=20, ignore_eos=True)
    outputs = [next(stream) for _ in range(5)]
    assert llm.score([4, 5, 6]) == scores
    assert joined([*outputs, *stream])[1] == want.token_ids


def test_the_packages_names_are_loaded_at_first_use():
    code = (
        "import sys, jaxinfer\n"
        "assert 'jax' not in sys.modules and 'jaxinfer.config' not in sys.modules\n"
        "assert jaxinfer.SamplingParams(max_tokens=3).max_tokens == 3\n"
        "assert 'jax' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there():
    for name in jaxinfer.__all__:
        assert getattr(jaxinfer, name).__name__ == name
    assert jaxinfer.LLM is LLM
    with pytest.raises(AttributeError, match="module 'jaxinfer' has no attribute 'generat'"):
        jaxinfer.generat  # noqa: B018


def test_the_function_keeps_its_model_loaded(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    loads: list[str] = []

    def load(model: str) -> LLM:
        loads.append(model)
        return llm

    offline._loaded.cache_clear()
    monkeypatch.setattr(offline, "LLM", load)
    first = jaxinfer.generate("the cat", model="tiny", **GREEDY)
    assert ids_of(first) == ids_of(jaxinfer.generate("the cat", model="tiny", **GREEDY))
    assert loads == ["tiny"]
    offline._loaded.cache_clear()

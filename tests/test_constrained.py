"""Answers that follow a grammar, in company: masks, seats, ends, preemption, aborts.

On a FakeRunner over tests/letters.py's vocabulary: where its formula's token is not admitted it
says the next one that is.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from jaxinfer.config import SamplingParams
from jaxinfer.constraint import Constraint, Mask
from jaxinfer.engine import Engine
from jaxinfer.errors import EngineFailure, InvalidRequest
from jaxinfer.scheduling.batch import Batch
from jaxinfer.scheduling.request import FinishReason, Request
from tests.fakes import EOS, Answer, Answers, FakeRunner, make_engine, run_all
from tests.letters import LETTERS, TEXTS, guided_request

A: dict[str, Any] = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["ok", "n"],
    "additionalProperties": False,
}
B: dict[str, Any] = {"type": "array", "items": {"enum": ["x", 1, None]}, "maxItems": 4}
PROMPT = LETTERS.encode("say-it")


def engine_of(runner: FakeRunner | None = None, **options: Any) -> Engine:
    return make_engine(runner, tokenizer=LETTERS, **options)


def is_an_a(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"ok", "n"}
        and isinstance(value["ok"], bool)
        and type(value["n"]) is int
        and 0 <= value["n"] <= 99
    )


def is_a_b(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 4 and all(x in ("x", 1, None) for x in value)


Script = dict[tuple[int, ...], Sequence[int]]
RULES: Mapping[str, tuple[Any, Any]] = {
    "a": ({"json_schema": A}, is_an_a),
    "b": ({"json_schema": B}, is_a_b),
    "none": (None, None),
}


def said(answer: Answer) -> Any:
    return json.loads(answer.text)


def solo(request: Request) -> Answer:
    (answer,) = run_all(engine_of(FakeRunner(num_pages=64)), [request]).values()
    return answer


@functools.cache
def solo_ids(prompt: tuple[int, ...], sampling: SamplingParams) -> list[int]:
    return solo(Request("solo", prompt, sampling)).token_ids


def test_schemas_take_turns_in_the_same_seats_a_hundred_times():
    """The next request in a seat has nothing of the last one's grammar."""
    runner = FakeRunner(num_pages=128)
    engine = engine_of(runner, max_num_seqs=4)
    answers, requests = Answers(), dict[str, Request]()
    kinds = [*RULES]
    for turn in range(100):
        for place in range(3):
            name = f"{turn} {place} {kinds[(turn + place) % 3]}"
            prompt = [turn % 9, 5 + place, *PROMPT]
            rule = RULES[name.split()[2]][0]
            ignore_eos = rule is None
            requests[name] = guided_request(
                name, prompt, rule, max_tokens=30, ignore_eos=ignore_eos
            )
            engine.submit(requests[name])
        for _ in range(6):
            answers.add(engine.step().outputs)
    while engine.has_work():
        answers.add(engine.step().outputs)
    assert len(answers) == 300
    num_whole = 0
    for (name, _), answer in answers.items():
        fits = RULES[name.split()[2]][1]
        if fits is None:
            free = requests[name]
            assert answer.token_ids == solo_ids(free.token_ids, free.sampling)
            assert answer.finish_reason is FinishReason.LENGTH
        elif answer.finish_reason is FinishReason.STOP:
            assert fits(said(answer)), answer.text
            num_whole += 1
        else:
            assert answer.finish_reason is FinishReason.LENGTH
            assert len(answer.token_ids) == requests[name].sampling.max_tokens
    assert num_whole == 200
    assert engine.pool_stats().pages_used == 0
    assert runner.faults == []


def test_an_answer_is_the_same_alone_and_in_company():
    requests = [
        guided_request(f"{kind}{i}", [i, *PROMPT], rule, temperature=0.8, seed=i, n=2)
        for i in range(4)
        for kind, (rule, _) in RULES.items()
    ]
    together = run_all(engine_of(FakeRunner(num_pages=128)), requests)
    for request in requests:
        alone = run_all(engine_of(), [request])
        for index in range(2):
            key = request.request_id, index
            assert together[key].token_ids == alone[key].token_ids
            assert together[key].finish_reason == alone[key].finish_reason


def test_two_choices_of_a_request_have_a_state_each():
    request = guided_request("r", PROMPT, {"json_schema": A}, n=4, temperature=1.0, seed=3)
    answers = run_all(engine_of(), [request])
    assert len({answer.text for answer in answers.values()}) > 1
    assert all(is_an_a(said(answer)) for answer in answers.values())


class Watching(FakeRunner):
    """Notes which sequences draw in each step, by the first token of their prompts."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.draws: list[set[int]] = []

    def dispatch(self, batch: Batch) -> Any:
        pending = super().dispatch(batch)
        contexts = [self._context(batch, row) for row in range(batch.num_sampled)]
        self.draws.append({context[0] for context in contexts})
        return pending


def test_a_guided_answer_sits_out_a_step_and_holds_nobody_up():
    runner = Watching()
    requests = [
        guided_request("g", [1, 2], {"regex": "[d-f]{5}"}),
        guided_request("f", [2, 2], max_tokens=9, ignore_eos=True),
    ]
    answers = run_all(engine_of(runner), requests)
    assert [sorted(drawn) for drawn in runner.draws[:9]] == [
        *([1, 2], [2], [1, 2], [2], [1, 2], [2], [1, 2], [2], [1, 2]),
    ]
    assert answers["g", 0].finish_reason is FinishReason.STOP
    assert len(answers["g", 0].text) == 5
    assert runner.faults == []


def test_a_guided_answer_alone_draws_in_every_step():
    runner = Watching()
    run_all(engine_of(runner), [guided_request("g", [1, 2], {"regex": "[d-f]{5}"})])
    assert runner.draws == [{1}] * 5


def test_chunks_of_a_guided_prompt_follow_each_other_without_waiting():
    runner = Watching()
    prompt = [1] * 50
    engine = engine_of(runner, max_num_batched_tokens=16, enable_prefix_caching=False)
    run_all(engine, [guided_request("g", prompt, {"regex": "[d-f]{3}"})])
    assert runner.draws == [set(), set(), set(), {1}, {1}, {1}]
    assert [batch.num_tokens for batch in runner.batches] == [16, 16, 16, 2, 1, 1]


def test_steps_without_a_grammar_carry_no_mask():
    runner = FakeRunner()
    plain = guided_request("p", PROMPT, max_tokens=4, presence_penalty=1.0)
    run_all(engine_of(runner), [plain])
    assert [batch.sampling.penalties.mask for batch in runner.batches] == [None] * 4  # type: ignore[union-attr]
    run_all(engine_of(runner), [guided_request("g", PROMPT, {"regex": "a"}), plain])
    mask = runner.batches[4].sampling.penalties.mask  # type: ignore[union-attr]
    assert mask is not None
    rows = mask[: runner.batches[4].num_sampled]
    assert sorted(int((row != -1).any()) for row in rows) == [0, 1]


def test_the_end_of_a_grammar_ends_the_answer_without_an_end_token():
    answer = solo(guided_request("g", PROMPT, {"regex": "[d-f]{3}"}))
    assert (len(answer.token_ids), len(answer.text)) == (3, 3)
    assert (answer.finish_reason, answer.stop) == (FinishReason.STOP, None)


def test_a_grammar_that_may_go_on_ends_by_an_end_token_or_the_limit():
    script: Script = {tuple(PROMPT): [TEXTS.index("x"), TEXTS.index("x"), EOS]}
    rule = {"regex": "x+"}
    (answer,) = run_all(
        engine_of(FakeRunner(scripts=script)), [guided_request("g", PROMPT, rule)]
    ).values()
    assert (answer.text, answer.finish_reason) == ("xx", FinishReason.STOP)
    assert answer.token_ids[-1] == EOS
    (answer,) = run_all(
        engine_of(FakeRunner(scripts=script)), [guided_request("g", PROMPT, rule, max_tokens=2)]
    ).values()
    assert (answer.text, answer.finish_reason) == ("xx", FinishReason.LENGTH)


def test_an_end_token_is_not_drawn_where_the_text_is_not_complete():
    script: Script = {tuple(PROMPT): [EOS] * 9}
    (answer,) = run_all(
        engine_of(FakeRunner(scripts=script)), [guided_request("g", PROMPT, {"regex": "[0-9]{3}"})]
    ).values()
    assert (answer.text, answer.finish_reason) == ("000", FinishReason.STOP)


@pytest.mark.parametrize("early", [{"ignore_eos": True}, {"min_tokens": 4}])
def test_an_end_that_is_not_wanted_yet_is_passed_over_while_the_grammar_goes_on(early: Any):
    script: Script = {tuple(PROMPT): [TEXTS.index("x"), EOS, EOS, EOS, EOS, EOS]}
    request = guided_request("g", PROMPT, {"regex": "x+"}, max_tokens=6, **early)
    (answer,) = run_all(engine_of(FakeRunner(scripts=script)), [request]).values()
    if "ignore_eos" in early:
        assert (answer.text, answer.finish_reason) == ("x" * 6, FinishReason.LENGTH)
    else:
        assert (answer.text, answer.finish_reason) == ("x" * 4, FinishReason.STOP)


@pytest.mark.parametrize("early", [{"ignore_eos": True}, {"min_tokens": 9}])
@pytest.mark.parametrize(
    ("rule", "text"), [({"regex": "x{2}"}, "xx"), ({"grammar": 'start: ""'}, "")]
)
def test_an_end_that_the_grammar_forces_wins(early: Any, rule: Any, text: str):
    answer = solo(guided_request("g", PROMPT, rule, **early))
    assert (answer.text, answer.finish_reason) == (text, FinishReason.STOP)


def test_stop_strings_still_end_an_answer():
    answer = solo(guided_request("g", PROMPT, {"choice": ["abcdef"]}, stop=("cd",)))
    assert (answer.text, answer.finish_reason, answer.stop) == ("ab", FinishReason.STOP, "cd")


def test_text_that_was_held_back_for_a_stop_string_comes_when_the_grammar_ends():
    answer = solo(guided_request("g", PROMPT, {"choice": ["abcd"]}, stop=("cde",)))
    assert (answer.text, answer.finish_reason, answer.stop) == ("abcd", FinishReason.STOP, None)


def test_an_answer_of_one_token_asks_for_no_second_mask():
    answer = solo(guided_request("g", PROMPT, {"json_schema": A}, max_tokens=1))
    assert (answer.text[0], answer.finish_reason) == ("{", FinishReason.LENGTH)


def test_penalties_and_logprobs_go_with_a_grammar():
    fields: dict[str, Any] = {"logprobs": 2, "presence_penalty": 0.5, "logit_bias": {3: 1.0}}
    runner = FakeRunner()
    request = guided_request("g", PROMPT, {"json_schema": A}, **fields)
    answer = run_all(engine_of(runner), [request])["g", 0]
    assert is_an_a(said(answer))
    assert len(answer.logprobs) == len(answer.token_ids)
    assert runner.faults == []


def test_guided_sequences_survive_preemption():
    """A pool that cannot hold them all: their states stay, their pages do not."""
    requests = [
        guided_request(f"{kind}{i}", [i, *PROMPT], rule, max_tokens=40)
        for i in range(3)
        for kind, (rule, _) in RULES.items()
    ]
    runner = FakeRunner(num_pages=9, page_size=8)
    engine = engine_of(runner, max_model_len=64)
    answers = run_all(engine, requests)
    assert engine.pool_stats().num_preemptions > 0
    for request in requests:
        assert answers[request.request_id, 0].token_ids == solo(request).token_ids
    assert runner.faults == []


def test_a_prefix_hit_begins_at_the_beginning_of_the_grammar():
    engine = engine_of()
    prompt = list(range(30))
    first = run_all(engine, [guided_request("1", prompt, {"json_schema": A})])["1", 0]
    second = run_all(engine, [guided_request("2", prompt, {"json_schema": A})])["2", 0]
    assert first.token_ids == second.token_ids
    assert second.stats is not None
    assert second.stats.num_cached_tokens > 0


@pytest.mark.parametrize("num_steps", range(1, 7))
def test_an_abort_leaves_no_page_and_no_trace_whatever_is_under_way(num_steps: int):
    runner = FakeRunner()
    engine = engine_of(runner)
    kept = guided_request("kept", [3, *PROMPT], {"json_schema": B})
    engine.submit(guided_request("gone", PROMPT, {"json_schema": A}))
    engine.submit(kept)
    answers = Answers()
    for _ in range(num_steps):
        answers.add(engine.step().outputs)
    answers.add(engine.abort("gone"))
    while engine.has_work():
        answers.add(engine.step().outputs)
    assert answers["kept", 0].token_ids == solo(kept).token_ids
    assert engine.pool_stats().pages_used == 0
    assert runner.faults == []


class Deaf(FakeRunner):
    """Looks at no mask."""

    def _draw(self, context: list[int], batch: Batch, row: int) -> int:
        return self._wanted(context, batch.sampling, row)


def test_a_token_that_the_grammar_does_not_admit_fails_its_request_alone_and_aloud():
    requests = [
        guided_request("g", PROMPT, {"choice": ["zzz"]}),
        guided_request("f", [7, *PROMPT], max_tokens=9, ignore_eos=True),
    ]
    engine = engine_of(Deaf())
    answers = run_all(engine, requests)
    assert isinstance(answers["g", 0].error, EngineFailure)
    assert "does not admit" in str(answers["g", 0].error)
    assert answers["f", 0].token_ids == solo(requests[1]).token_ids
    assert engine.pool_stats().pages_used == 0


class Stuck:
    """A Constraint that admits "a" twice and then does not know what comes next."""

    def __init__(self) -> None:
        self.left = 2
        self.is_complete = False

    def copy(self) -> Constraint:
        return Stuck()

    def take(self, token_id: int) -> None:
        self.left -= 1

    def prepare(self) -> None:
        if not self.left:
            raise InvalidRequest("guided: no token may come next", param="guided")

    def mask(self, *, may_end: bool) -> Mask:
        mask = np.zeros(4, np.int32)
        mask[TEXTS.index("a") // 32] = 1 << TEXTS.index("a") % 32
        return mask


def test_a_grammar_that_cannot_go_on_fails_its_request_alone_and_aloud():
    free = guided_request("f", [7, *PROMPT], max_tokens=9, ignore_eos=True)
    sampling = guided_request("s", PROMPT, {"regex": "a"}).sampling
    engine = engine_of()
    answers = run_all(engine, [Request("g", tuple(PROMPT), sampling, constraint=Stuck()), free])
    assert answers["g", 0].finish_reason is FinishReason.ERROR
    assert isinstance(answers["g", 0].error, InvalidRequest)
    assert answers["g", 0].text == "a"
    assert answers["f", 0].token_ids == solo(free).token_ids
    assert engine.pool_stats().pages_used == 0

"""Requests with penalties through a real engine: the same bits in every circumstance, and the
tokens that the formulas choose; their neighbours notice nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jaxinfer.config import SamplingParams, SchedulerConfig
from jaxinfer.engine import Engine
from jaxinfer.offline import LLM, Completion
from jaxinfer.scheduling.page_pool import PagePool
from jaxinfer.scheduling.request import Request
from jaxinfer.scheduling.scheduler import Scheduler
from tests.tiny_llm import tiny_llm

SAMPLINGS: dict[str, dict[str, Any]] = {
    "frequency": {"temperature": 0.0, "frequency_penalty": 1.3},
    "presence": {"temperature": 0.0, "presence_penalty": -1.7},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.4},
    "bias": {"temperature": 0.0, "logit_bias": {7: 4.5, 9: 4.25, 11: -100}},
    "drawn with all": {
        "temperature": 1.1,
        "seed": 5,
        "top_k": 50,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {3: 2.0},
    },
}
PLAIN: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 4},
    {"temperature": 1.2, "seed": 6, "top_p": 0.8, "logprobs": 3},
)
PROMPT = np.random.default_rng(0).integers(0, 400, 37).tolist()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Rows 8 and 16."""
    return tiny_llm(tmp_path_factory, {"max_num_seqs": 16, "max_num_batched_tokens": 16})


class World:
    """Engines over one runner, each with an empty pool and a scheduler of its own."""

    def __init__(self, llm: LLM):
        self._built = llm._built

    def engine(self, *, num_pages: int = 0, cache: bool = True) -> Engine:
        built = self._built
        config = SchedulerConfig(
            max_num_seqs=16, max_num_batched_tokens=16, max_model_len=built.max_model_len
        )
        pool = PagePool(num_pages or built.plan.num_pages, built.plan.page_size, cache)
        return Engine(
            runner=built.runner,
            scheduler=Scheduler(config, pool, built.buckets),
            tokenizer=None,
            version=built.version,
            vocab_size=built.engine.vocab_size,
            eos_token_ids=(),
            random_seed=lambda: 0,
        )

    def run(self, engine: Engine, *arrivals: Sequence[Request]) -> dict[str, Completion]:
        """One group of requests before each step."""
        answers: dict[str, Completion] = {}
        groups = list(arrivals)
        while groups or engine.has_work():
            for request in groups.pop(0) if groups else ():
                engine.submit(request)
                answers[request.request_id] = Completion(0)
            for output in engine.step().outputs:
                assert output.error is None, output.error
                answers[output.request_id].add(output)
        return answers

    def alone(self, request: Request) -> Completion:
        return self.run(self.engine(cache=False), [request])[request.request_id]


@pytest.fixture(scope="module")
def world(llm: LLM) -> World:
    return World(llm)


def request(name: str, token_ids: Sequence[int] = PROMPT, **sampling: Any) -> Request:
    defaults: dict[str, Any] = {"max_tokens": 40, "logprobs": 0}
    return Request(name, tuple(token_ids), SamplingParams(**defaults | sampling))


def bits(answer: Completion) -> tuple[list[int], bytes]:
    logprobs = np.array([entry.logprob for entry in answer.logprobs], np.float32)
    return answer.token_ids, logprobs.tobytes()


def neighbours(rng: np.random.Generator, number: int) -> list[Request]:
    """Of every kind, with penalties and without."""
    kinds = [*SAMPLINGS.values(), *PLAIN]
    return [
        request(
            f"n{rng.integers(2**60)}",
            rng.integers(0, 400, rng.integers(1, 60)).tolist(),
            **kinds[rng.integers(len(kinds))] | {"max_tokens": int(rng.integers(1, 30))},
        )
        for _ in range(number)
    ]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_request_with_penalties_gives_the_same_bits_in_every_circumstance(
    world: World, name: str
):
    mine = request("mine", **SAMPLINGS[name])
    want = bits(world.alone(mine))
    rng = np.random.default_rng(len(name))

    # Alone its prompt comes in chunks of 16, 16 and 5; decoding neighbours make them smaller.
    beside = world.run(world.engine(), neighbours(rng, 4), [], [mine], neighbours(rng, 9))
    assert bits(beside["mine"]) == want

    engine = world.engine()
    world.run(engine, [request("before")])
    hit = world.run(engine, [mine])["mine"]
    assert hit.stats is not None
    assert hit.stats.num_cached_tokens == 32
    assert bits(hit) == want

    first = request("first", rng.integers(0, 400, 37).tolist(), **SAMPLINGS[name])
    tight = world.run(world.engine(num_pages=7), [first], [mine])
    assert tight["mine"].stats is not None
    assert tight["mine"].stats.num_preemptions > 0
    assert bits(tight["mine"]) == want


@pytest.mark.parametrize("sampling", PLAIN, ids=("greedy", "plain", "full"))
def test_a_request_without_penalties_does_not_notice_those_of_its_neighbours(
    world: World, sampling: dict[str, Any]
):
    mine = request("mine", **sampling)
    want = bits(world.alone(mine))
    for number in (1, 12):
        rng = np.random.default_rng(number)
        company = [
            request(f"n{i}", rng.integers(0, 400, 20).tolist(), **each)
            for i, each in zip(range(number), list(SAMPLINGS.values()) * 3, strict=False)
        ]
        assert bits(world.run(world.engine(), company, [mine])["mine"]) == want


def step_by_step(world: World, number: int, **sampling: Any) -> list[int]:
    """Greedy by the formulas, on raw logits that the engine tells one token at a time.

    Relative to each other logprobs are logits, and repetition penalties are left out here.
    """
    output: list[int] = []
    for step in range(number):
        asked = request(f"s{step}", [*PROMPT, *output], max_tokens=1, temperature=0, logprobs=20)
        (entry,) = world.alone(asked).logprobs
        scores = {
            token_id: logprob
            - sampling.get("frequency_penalty", 0) * output.count(token_id)
            - sampling.get("presence_penalty", 0) * (token_id in output)
            + sampling.get("logit_bias", {}).get(token_id, 0)
            for token_id, logprob in entry.top
        }
        output.append(max(scores, key=lambda token_id: scores[token_id]))
    return output


@pytest.mark.parametrize(
    "sampling", [{"frequency_penalty": 1.3}, {"presence_penalty": -1.7}, {"logit_bias": {11: -100}}]
)
def test_greedy_tokens_are_those_of_the_formulas(world: World, sampling: dict[str, Any]):
    mine = request("mine", max_tokens=25, temperature=0, **sampling)
    assert world.alone(mine).token_ids == step_by_step(world, 25, **sampling)


def test_penalties_do_what_they_are_for(world: World):
    def distinct(**sampling: Any) -> int:
        mine = request("mine", temperature=0.0, max_tokens=80, **sampling)
        return len(set(world.alone(mine).token_ids))

    plain = distinct()
    assert distinct(frequency_penalty=2) > plain
    assert distinct(repetition_penalty=3) > plain
    assert distinct(presence_penalty=-2, frequency_penalty=-2) < plain
    assert distinct(logit_bias={5: 100}) == 1


def test_penalties_change_what_is_drawn_and_not_its_reported_logprob(world: World):
    plain = world.alone(request("plain", temperature=0, max_tokens=1, logprobs=20)).logprobs[0]
    second, logprob = plain.top[1]
    forced = request("forced", temperature=0, max_tokens=1, logprobs=20, logit_bias={second: 100})
    (entry,) = world.alone(forced).logprobs
    assert (entry.token_id, entry.logprob) == (second, logprob)
    assert entry.top == plain.top

"""How requests are put to an `LLM`, and what becomes of measures that fail. The LLM is a fake."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest

from bench import measures as module
from bench.load_time import LoadFailed
from bench.measures import Measures, memory_figures, runner_of
from bench.results import Failure, Outcome, Result
from bench.workloads import Decode, Prefill, Request
from jaxinfer import LLM, SamplingParams
from jaxinfer.errors import ContextLengthExceeded
from tests.bench.stopwatch import Stopwatch


@dataclass
class Answer:
    token_ids: list[int]


class Words:
    vocab_size = 50
    special_token_ids = frozenset({0})

    def token_bytes(self, token_id: int) -> bytes:
        return b" word"


PLAN = {"process": 200, "weights": 500, "programs": 30, "kv_pool": 1000}


class Plan:
    def by_kind(self) -> dict[str, int]:
        return PLAN


class FakeLLM:
    """Says token 7, in the time of a Stopwatch; refuses prompts over `limit`."""

    def __init__(self, watch: Stopwatch, limit: int = 2000, missing: int = 0):
        self.tokenizer, self.plan = Words(), Plan()
        self.sampling: list[SamplingParams] = []
        self._watch, self._limit, self._missing = watch, limit, missing

    def compile_events(self) -> dict[str, int]:
        return {"startup": 40, "serving": 0}

    def generate(
        self, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams]
    ) -> list[Answer]:
        self.sampling += sampling
        if any(len(prompt) > self._limit for prompt in prompts):
            raise ContextLengthExceeded(f"the model holds {self._limit}")
        numbers = [each.max_tokens or 0 for each in sampling]
        self._watch.run(list(map(Request, prompts, numbers)))
        return [Answer([7] * (number - self._missing)) for number in numbers]


def fake(watch: Stopwatch, **settings: int) -> tuple[FakeLLM, LLM]:
    llm = FakeLLM(watch, **settings)
    return llm, cast(LLM, llm)


def measures(watch: Stopwatch, num_reps: int = 2, **settings: int) -> Measures:
    return Measures(
        fake(watch, **settings)[1],
        num_reps=num_reps,
        clocks=watch.read_clocks,
        clock=watch,
        start=watch.read_clocks(),
    )


def taken(outcomes: Iterator[Outcome]) -> Result:
    (outcome,) = outcomes
    assert isinstance(outcome, Result)
    return outcome


def test_requests_of_any_length_go_in_with_one_call():
    watch = Stopwatch()
    llm, public = fake(watch)
    runner_of(public)([Request([1, 2], 5), Request([3], 9)])
    assert watch.calls == [[Request([1, 2], 5), Request([3], 9)]]
    assert llm.sampling == [
        SamplingParams(temperature=0.0, max_tokens=number, ignore_eos=True) for number in (5, 9)
    ]
    assert all(sampling.is_greedy for sampling in llm.sampling)


def test_fewer_tokens_than_asked_are_no_measurement():
    _, public = fake(Stopwatch(), missing=1)
    with pytest.raises(RuntimeError, match=r"asked for \[5, 5\] tokens; got \[4, 4\]"):
        runner_of(public)([Request([1], 5), Request([2], 5)])


def test_a_workload_is_warmed_up_and_then_repeated():
    watch = Stopwatch()
    result = taken(measures(watch, num_reps=3).workloads({"prefill": Prefill(100)}))
    assert [len(call) for call in watch.calls] == [1, 2, 1, 1, 1]
    assert result.measure == "prefill"
    assert result.title == "1 prompt, 100 in, 1 out"
    assert result.metrics["ttft_s"].median == pytest.approx(0.1)
    assert result.wall_s.median == pytest.approx(0.1)
    assert result.cpu_s.median == pytest.approx(0.1)
    assert (result.num_kept, result.num_run) == (3, 3)


def test_no_prompt_comes_twice_in_a_run():
    watch = Stopwatch()
    list(measures(watch).workloads({"prefill": Prefill(64), "decode": Decode(64, 4)}))
    prompts = [tuple(request.token_ids[:16]) for call in watch.calls for request in call]
    assert len(prompts) == len(set(prompts)) == 3 + 2 + 4


def test_a_measure_that_is_refused_does_not_end_the_others():
    watch = Stopwatch()
    first, second = measures(watch, limit=100).workloads({"a": Prefill(200), "b": Prefill(50)})
    assert first == Failure("a", "1 prompt, 200 in, 1 out", "the model holds 100")
    assert isinstance(second, Result)


def test_a_disturbed_measure_is_a_failure():
    class Stopped(Stopwatch):
        def run(self, requests: Sequence[Request]) -> None:
            pass

    failure = next(measures(Stopped()).workloads({"decode": Decode()}))
    assert isinstance(failure, Failure)
    assert "quieter machine" in failure.error


def test_memory_spans_all_since_before_the_load():
    watch = Stopwatch()
    taker = measures(watch)
    watch.now += 60.0
    result = taker.memory()
    assert result.wall_s.median == pytest.approx(60.0)
    assert result.metrics["weights_bytes"].median == 500
    assert result.metrics["kv_pool_bytes"].median == 1000
    assert result.metrics["serving_compiles"].median == 0


def test_on_a_cpu_the_process_holds_what_was_planned():
    assert memory_figures(PLAN, 1883, None) == {
        "peak_bytes": 1883,
        "process_bytes": 200,
        "weights_bytes": 500,
        "programs_bytes": 30,
        "kv_pool_bytes": 1000,
        "over_plan_bytes": 153,
        "peak_over_plan": 1.1,
    }


def test_on_a_gpu_the_device_holds_what_was_planned():
    plan = {kind: size for kind, size in PLAN.items() if kind != "process"}
    figures = memory_figures(plan, 9000, 1224)
    assert (figures["peak_bytes"], figures["device_peak_bytes"]) == (9000, 1224)
    assert figures["over_plan_bytes"] == 1224 - 1530
    assert figures["peak_over_plan"] == 0.8


def test_an_unread_peak_is_left_out():
    assert memory_figures(PLAN, None, None).keys() == {f"{kind}_bytes" for kind in PLAN}


def test_load_is_repeated_with_the_given_fields(monkeypatch: pytest.MonkeyPatch):
    given: list[dict[str, Any]] = []

    def time_load(fields: dict[str, Any], clock: Stopwatch) -> dict[str, float]:
        given.append(fields)
        clock.now += 3.0
        return {"load_s": 3.0}

    monkeypatch.setattr(module, "time_load", time_load)
    result = taken(iter([measures(Stopwatch()).load({"model": "m"})]))
    assert given == [{"model": "m"}] * 2
    assert result.metrics["load_s"].median == 3.0
    assert result.wall_s.median == pytest.approx(3.0)


def test_a_load_that_fails_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    def time_load(fields: dict[str, Any], clock: Stopwatch) -> dict[str, float]:
        raise LoadFailed("loading ended with exit code 1")

    monkeypatch.setattr(module, "time_load", time_load)
    outcome = measures(Stopwatch()).load({})
    assert isinstance(outcome, Failure)
    assert outcome.error == "loading ended with exit code 1"

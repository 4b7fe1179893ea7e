"""The measures of one loaded model: the workloads, then peak memory, then load time.

Uses `LLM` and nothing behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.load_time import LoadFailed, time_load
from bench.machine import (
    Clocks,
    Reading,
    Span,
    device_peak_bytes,
    peak_memory_bytes,
)
from bench.results import Failure, Outcome, Repetition, Result, repeat
from bench.workloads import (
    Clock,
    Disturbed,
    Figures,
    Prompts,
    Request,
    Run,
    Workload,
    warm_up,
    word_ids,
)
from jaxinfer import LLM, JaxInferError, SamplingParams


class Measures:
    """Takes measures of `llm`.

    Args:
        num_reps: repetitions that a figure is the median of.
        clocks: the machine's clocks; `clock` is the one that requests are timed with, in seconds.
        start: what they said before the model was loaded.
    """

    def __init__(self, llm: LLM, *, num_reps: int, clocks: Clocks, clock: Clock, start: Reading):
        self._llm = llm
        self._run = runner_of(llm)
        self._words = word_ids(llm.tokenizer)
        self._num_reps = num_reps
        self._clocks = clocks
        self._clock = clock
        self._start = start

    def workloads(self, chosen: Mapping[str, Workload]) -> Iterator[Outcome]:
        """One after another, each as it is ready."""
        warm_up(self._run, Prompts(self._words, "warm up"))
        for name, workload in chosen.items():
            prompts = Prompts(self._words, name)  # one for all repetitions: no prompt comes twice
            try:
                repetitions = repeat(
                    lambda workload=workload, prompts=prompts: workload(
                        self._run, prompts, self._clock
                    ),
                    self._num_reps,
                    self._clocks,
                )
            except (JaxInferError, Disturbed) as error:
                yield Failure(name, workload.title, str(error))
            else:
                yield Result.of(name, workload.title, repetitions, self._num_reps)

    def memory(self) -> Result:
        """Peaks so far, beside the plan; so it comes after the workloads.

        And what was compiled by then: after the start, nothing.
        """
        plan = self._llm.plan.by_kind()
        figures = memory_figures(plan, peak_memory_bytes(), device_peak_bytes())
        figures["serving_compiles"] = self._llm.compile_events()["serving"]
        span = Span.between(self._start, self._clocks())
        return Result.of("memory", "peak, from loading to here", [Repetition(figures, span)], 1)

    def load(self, fields: Mapping[str, Any]) -> Outcome:
        """Of a model with these fields of EngineConfig, the ones that `llm` was made of: so the
        compiled programs lie ready.
        """
        title = "a fresh process to READY, warm cache"
        try:
            repetitions = repeat(
                lambda: time_load(fields, self._clock), self._num_reps, self._clocks
            )
        except LoadFailed as error:
            return Failure("load", title, str(error))
        return Result.of("load", title, repetitions, self._num_reps)


def runner_of(llm: LLM) -> Run:
    """Greedy, to the asked number of tokens, whatever the model would end with."""

    def run(requests: Sequence[Request]) -> None:
        asked = [request.num_output for request in requests]
        sampling = [
            SamplingParams(temperature=0.0, max_tokens=number, ignore_eos=True) for number in asked
        ]
        answers = llm.generate([request.token_ids for request in requests], sampling)
        counts = [len(answer.token_ids) for answer in answers]
        if counts != asked:
            raise RuntimeError(f"asked for {asked} tokens; got {counts}")

    return run


def memory_figures(plan: Mapping[str, int], peak: int | None, device_peak: int | None) -> Figures:
    """In bytes, and a ratio; what the system does not tell is left out.

    The plan is for the device if it has memory of its own, else for this process, of which it
    counts what was there before the model (`process`).
    """
    own, planned = plan.get("process", 0), sum(plan.values())
    planned_for = peak if device_peak is None else device_peak
    figures: dict[str, float | None] = {
        "peak_bytes": peak,
        "device_peak_bytes": device_peak,
        **{f"{kind}_bytes": size for kind, size in plan.items()},
        "over_plan_bytes": None if planned_for is None else planned_for - planned,
        "peak_over_plan": None if planned_for is None else (planned_for - own) / (planned - own),
    }
    return {name: value for name, value in figures.items() if value is not None}

"""One format's figures: quality against the original, then speed."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bench.machine import read_clocks
from bench.measures import Measures
from bench.quantization.variants import Variant
from bench.results import Failure
from bench.workloads import Workload
from checkpoints.certificate import Perplexity
from checkpoints.checkpoint import Checkpoint, open_checkpoint
from checkpoints.resolve import resolve
from jaxinfer import LLM
from jaxinfer.quantization.compare import check_vocabularies
from jaxinfer.quantization.evaluation import evaluate
from jaxinfer.quantization.held_out_windows import HeldOutWindows, read_held_out
from jaxinfer.quantization.measuring import Measuring
from jaxinfer.quantization.subject import Subject, context_length, open_subject, tokenizer_of

SPEEDS = {  # the column of a workload, and its figure
    "decode": "decode_tokens_per_s",
    "conc8": "output_tokens_per_s",
    "conc32": "output_tokens_per_s",
    "prefill": "prefill_tokens_per_s",
}


@dataclass(frozen=True, slots=True)
class Row:
    """Of one variant."""

    name: str
    format: str
    bits_per_weight: float  # scales and what is not quantized included
    perplexity: Perplexity
    kl: float  # to the original, nats per token
    kl_p99: float
    perplexity_change: Perplexity
    agreement: float  # share of greedy tokens that are the original's
    num_tokens: int  # of held-out text
    weights_bytes: int = 0  # in memory
    tokens_per_s: dict[str, float] = field(default_factory=dict)  # by workload, medians
    failures: dict[str, str] = field(default_factory=dict)  # by workload

    def line(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """For a JSON line."""
        return {"measure": "quantization", **asdict(self), **context}


class Table:
    """Measures variants of one model.

    Args:
        engine: fields of EngineConfig that all have.
        workloads: of SPEEDS; with none, only quality is measured.
    """

    def __init__(
        self,
        engine: Mapping[str, Any],
        asked: Measuring,
        workloads: Mapping[str, Workload],
        *,
        num_reps: int,
    ):
        self._engine, self._asked = engine, asked
        self._workloads, self._num_reps = workloads, num_reps

    def rows(self, variants: Sequence[Variant]) -> Iterator[Row]:
        """Each as it is ready; the first variant is the original.

        Raises: CheckpointError, ConfigError and other JaxInferErrors.
        """
        for variant in variants:
            row = self._quality(variants[0], variant)
            gc.collect()  # two models are gone, before a third is loaded
            yield self._with_speed(row, variant) if self._workloads else row
            gc.collect()

    def _quality(self, first: Variant, other: Variant) -> Row:
        with closing(_opened(first)) as one, closing(_opened(other)) as another:
            check_vocabularies(one, another)
            original, subject = _loaded(one, first), _loaded(another, other)
            held_out = self._held_out(one, another)
            found = evaluate(
                original.logit_rows,
                subject.logit_rows,
                held_out.windows,
                least_tokens=self._asked.least_tokens,
                seed=self._asked.seed,
            )
        return Row(
            other.name,
            subject.format,
            subject.bits_per_weight,
            found.perplexity,
            found.mean_kl,
            found.kl_p99,
            found.perplexity_change,
            found.agreement,
            found.num_tokens,
        )

    def _held_out(self, one: Checkpoint, another: Checkpoint) -> HeldOutWindows:
        length = min(context_length(one), context_length(another))
        return read_held_out(self._asked, tokenizer_of(one), context_length=length)

    def _with_speed(self, row: Row, variant: Variant) -> Row:
        start = read_clocks()
        llm = LLM(**variant.engine_fields(self._engine))
        measures = Measures(
            llm,
            num_reps=self._num_reps,
            clocks=read_clocks,
            clock=time.monotonic,
            start=start,
        )
        found, failures = dict[str, float](), dict[str, str]()
        for outcome in measures.workloads(self._workloads):
            if isinstance(outcome, Failure):
                failures[outcome.measure] = outcome.error
            else:
                found[outcome.measure] = outcome.metrics[SPEEDS[outcome.measure]].median

        return replace(
            row,
            weights_bytes=llm.plan.weights_bytes,
            tokens_per_s=found,
            failures=failures,
        )


def _opened(variant: Variant) -> Checkpoint:
    return open_checkpoint(resolve(variant.model))


def _loaded(checkpoint: Checkpoint, variant: Variant) -> Subject:
    return open_subject(
        checkpoint,
        variant.name,
        tokenizer=tokenizer_of(checkpoint),
        rounded_to=variant.rounded_to,
        kv_cache=variant.kv_cache,
    )

"""Requests under test, their neighbours, and the one list of how both may be sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.workloads import Prompts, Vocabulary, word_ids
from jaxinfer.config import SamplingParams
from jaxinfer.scheduling.request import Request

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.9},
    "top-k": {"temperature": 1.3, "top_k": 20},
    "top-p": {"temperature": 0.8, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "likeliest": {"temperature": 0.0, "logprobs": 5},
    "all filters": {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "logprobs": 20},
    "penalties": {
        "temperature": 0.0,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
    },
    "bias and penalty": {
        "temperature": 0.9,
        "frequency_penalty": -0.5,
        "logit_bias": {1: 2.0, 5: -3.5, 17: 1.25},
    },
    "stop strings": {"temperature": 0.7, "stop": ("e", "th", "zqx")},
}
"""Every way to sample that a request can ask for: what is new in SamplingParams gets a line here,
and is then tested, and is a neighbour, in every circumstance."""

NUM_TOKENS = 28  # of the reference; a circumstance may ask for fewer


@dataclass(frozen=True, slots=True)
class Probe:
    """A request under test."""

    name: str
    request: Request

    @property
    def num_prompt(self) -> int:
        return len(self.request.token_ids)

    @property
    def is_drawn(self) -> bool:
        return not self.request.sampling.is_greedy

    @property
    def may_end_early(self) -> bool:
        return bool(self.request.sampling.stop)


def probe(name: str, token_ids: Sequence[int], kind: str, seed: int) -> Probe:
    """Args: kind: of KINDS. seed: no two probes may share it."""
    fields: dict[str, Any] = {"logprobs": 0, **KINDS[kind]}
    sampling = SamplingParams(max_tokens=NUM_TOKENS, seed=seed, ignore_eos=True, **fields)
    return Probe(name, Request(name, tuple(token_ids), sampling))


def random_probes(lengths: Sequence[int], vocab_size: int, seed: int) -> list[Probe]:
    """One of each length with random token ids; kinds of sampling take turns."""
    rng = np.random.default_rng(seed)
    kinds = list(KINDS)
    return [
        probe(f"{length} tokens, {kind}", rng.integers(0, vocab_size, length).tolist(), kind, i + 1)
        for i, length in enumerate(lengths)
        for kind in (kinds[i % len(kinds)],)
    ]


def word_probes(tokenizer: Vocabulary, number: int, page_size: int, seed: int) -> list[Probe]:
    """Prompts of random words: the first ones about page boundaries, then any up to five pages."""
    draw, rng = Prompts(word_ids(tokenizer), f"exactness {seed}"), np.random.default_rng(seed)
    lengths = [31, page_size + 1, 5, 2 * page_size - 1, 4 * page_size + 1, page_size]
    while len(lengths) < number:
        lengths.append(int(rng.integers(1, 5 * page_size, endpoint=True)))
    kinds = list(KINDS)
    return [
        probe(f"{i}: {length} tokens, {kind}", draw(length), kind, i + 1)
        for i, length in enumerate(lengths[:number])
        for kind in (kinds[i % len(kinds)],)
    ]


def neighbours(
    rng: np.random.Generator,
    number: int,
    vocab_size: int,
    *,
    lengths: tuple[int, int] = (1, 60),
    num_out: tuple[int, int] = (1, 24),
    kinds: Sequence[str] = tuple(KINDS),
) -> list[Request]:
    """Requests of every kind; `lengths` and `num_out` are ranges, both ends included."""
    requests: list[Request] = []
    for _ in range(number):
        fields = KINDS[str(rng.choice(kinds))]
        sampling = SamplingParams(
            max_tokens=int(rng.integers(*num_out, endpoint=True)), ignore_eos=True, **fields
        )
        length = int(rng.integers(*lengths, endpoint=True))
        token_ids = rng.integers(0, vocab_size, length).tolist()
        requests.append(Request("neighbour", tuple(token_ids), sampling))
    return requests


LASTING = tuple(kind for kind, fields in KINDS.items() if "stop" not in fields)
"""Kinds that go on to their last token."""

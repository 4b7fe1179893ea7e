"""Exactness of the default model in every circumstance: minutes, so under the slow marker.

The restart is one in a process of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.exactness.circumstance import Circumstance, Lab
from bench.exactness.probes import Probe, probe
from bench.exactness.restart import in_another_process
from bench.exactness.subject import Limits, Subject
from bench.exactness.suite import cases, circumstances
from jaxinfer.build import build
from jaxinfer.config import EngineConfig, replace
from jaxinfer.scheduling.buckets import Buckets

GOLDEN = json.loads((Path(__file__).parent / "data" / "smollm2_greedy.json").read_text())
PROMPT_IDS = {prompt["name"]: prompt["prompt_ids"] for prompt in GOLDEN["prompts"]}
KIND_OF = {  # prompt -> how it is sampled; 5, 31, 63, 127 and 256 tokens
    "capital": "greedy",
    "rain": "drawn",
    "python-short": "likeliest",
    "spanish": "top-k",
    "russian": "all filters",
}
PROBES = [
    probe(name, PROMPT_IDS[name], kind, seed) for seed, (name, kind) in enumerate(KIND_OF.items())
]
MAX_NUM_SEQS, MAX_TOKENS, MAX_MODEL_LEN, PAGE_SIZE = 16, 512, 2048, 64
PAGE_BYTES = 2 * 30 * 3 * 64 * 4 * PAGE_SIZE  # keys and values, layers, KV heads, head dim, float32
NUM_PAGES = 160
LIMITS = Limits(
    Buckets.for_limits(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        page_size=PAGE_SIZE,
    ),
    PAGE_SIZE,
    NUM_PAGES,
    MAX_MODEL_LEN,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def all_cases() -> Iterator[Any]:
    for circumstance, each in cases(circumstances(LIMITS, PROBES), PROBES):
        yield pytest.param(circumstance, each, id=f"{circumstance.name}-{each.name}")


@pytest.fixture(scope="module")
def lab(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    config = replace(
        EngineConfig(),
        model=str(default_model),
        cache_dir=str(tmp_path_factory.mktemp("cache")),
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        page_size=PAGE_SIZE,
        kv_cache_bytes=NUM_PAGES * PAGE_BYTES,
        show_progress=False,
    )
    subject = Subject(build(config), restart=in_another_process(config))
    assert subject.limits == LIMITS
    return Lab(subject, PROBES)


@pytest.mark.parametrize(("circumstance", "each"), all_cases())
def test_it_changes_no_bit(lab: Lab, circumstance: Circumstance, each: Probe) -> None:
    case = lab.check(circumstance, each)
    assert case.wrong is None, str(case)

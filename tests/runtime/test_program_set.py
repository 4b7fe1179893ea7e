"""The plan and the programs agree, on a device with plenty of memory and on one with hardly any."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import pytest

from checkpoints.checkpoint import open_checkpoint
from jaxinfer.config import EngineConfig, replace
from jaxinfer.errors import ConfigError
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.registry import decoder_for
from jaxinfer.runtime import program_set as module
from jaxinfer.runtime.aot import Program, Programs, measure
from jaxinfer.runtime.compile_counter import CompileCounter
from jaxinfer.runtime.kv_cache import page_shape
from jaxinfer.runtime.memory_budget import MemoryBudget
from jaxinfer.runtime.memory_plan import default_dtype
from jaxinfer.runtime.program_cache import ProgramCache
from jaxinfer.runtime.program_memory import ProgramMemory
from jaxinfer.runtime.program_set import (
    PROBE_MARGIN,
    PROBE_PAGES,
    ProgramSet,
    _Maker,
    prepare,
    prepare_beside,
)
from tests.tiny import tiny_config, tiny_engine_config
from tests.tiny_llm import SMALL, shared_cache

UNKNOWN = MemoryBudget(None, 0, None)
CONFIG = tiny_engine_config(Path("model"), Path("cache"), **SMALL)
ON_GPU = replace(CONFIG, kv_cache_bytes=None)
MODEL = tiny_config()
LAYERS = MODEL["num_hidden_layers"]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return decoder_for(MODEL, dtype=default_dtype("float32"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_cache(tmp_path_factory) / "programs"


@pytest.fixture
def counter() -> Iterator[CompileCounter]:
    counter = CompileCounter()
    yield counter
    counter.close()


def gpu(total: int) -> MemoryBudget:
    return MemoryBudget(total, 0, 1 << 30)


def fake(monkeypatch: pytest.MonkeyPatch, *, small: int, large: int) -> None:
    """Programs of the largest bucket take `large` bytes of scratch, all others `small`."""

    def memory(programs: Sequence[Program]) -> dict[str, ProgramMemory]:
        return {
            p.name: ProgramMemory(large if re.search("=(32|16) ", p.name) else small, 0, 0, 0)
            for p in programs
        }

    def ready(programs: Sequence[Program], cache: ProgramCache, **_: object) -> Programs:
        return Programs({p.name: None for p in programs}, 0, 0, 0.0, memory(programs))  # type: ignore[misc]

    monkeypatch.setattr(module, "make_ready", ready)
    monkeypatch.setattr(module, "measure", lambda programs, cache, **_: memory(programs))


def test_the_plan_has_what_the_programs_need(decoder: Decoder, root: Path):
    found = prepare(CONFIG, decoder, UNKNOWN, root)
    memories = found.programs.memory
    assert memories.keys() == found.programs.by_name.keys()
    largest = max(memory.temp_bytes for memory in memories.values())
    code = sum(memory.code_bytes for memory in memories.values())
    assert largest > 1000
    assert found.plan.programs_bytes > 2 * largest + code
    pages = found.make_pages()
    assert len(pages) == LAYERS
    assert sum(array.nbytes for array in jax.tree.leaves(pages)) == found.plan.pool_bytes


def test_on_a_gpu_the_pool_is_what_the_budget_leaves_also_on_a_warm_start(
    decoder: Decoder, root: Path, counter: CompileCounter
):
    total = 5 << 20
    first = prepare(ON_GPU, decoder, gpu(total), root).plan
    assert first.num_pages > 80
    probed = total - first.weights_bytes - first.pool_bytes
    assert 0 <= probed - first.programs_bytes < probed / PROBE_MARGIN + first.page_bytes
    compiled = counter.count
    second = prepare(ON_GPU, decoder, gpu(total), root)
    assert counter.count == compiled
    assert second.plan == first
    assert second.programs.num_compiled == 0


def test_the_smallest_budget_is_named_and_accepted_and_one_byte_less_is_not(
    decoder: Decoder, root: Path, monkeypatch: pytest.MonkeyPatch
):
    fake(monkeypatch, small=1000, large=1_000_000)
    config = replace(ON_GPU, max_model_len=640)
    with pytest.raises(ConfigError) as caught:
        prepare(config, decoder, gpu(1 << 10), root)
    found = re.search(r"need at least (\d+) bytes of the device's", str(caught.value))
    assert found is not None
    smallest = int(found[1])
    assert smallest > 2_000_000
    assert prepare(config, decoder, gpu(smallest), root).plan.num_pages == 40
    with pytest.raises(ConfigError, match=f"need at least {smallest} bytes"):
        prepare(config, decoder, gpu(smallest - 1), root)


def test_programs_that_need_more_than_the_largest_said_shrink_the_pool(
    decoder: Decoder, root: Path, monkeypatch: pytest.MonkeyPatch
):
    config = replace(ON_GPU, max_num_seqs=16, max_num_batched_tokens=32)
    plans: list[int] = []
    batches: set[int] = set()
    for small in (1000, 400_000):  # of the smaller buckets; the largest need 100,000
        fake(monkeypatch, small=small, large=100_000)
        found = prepare(config, decoder, gpu(4_000_000), root).plan
        batches.add(found.programs_bytes - 2 * max(small, 100_000))
        assert found.total_bytes <= 4_000_000
        plans.append(found.num_pages * found.page_bytes)
    assert 500_000 < plans[0] - plans[1] < 600_000 + 8192
    (batch_bytes,) = batches  # of two steps in flight
    assert 2 * 16 * 640 * 4 < batch_bytes < 300_000


def test_a_pool_that_is_not_there_is_refused_before_it_is_allocated(
    decoder: Decoder, root: Path, monkeypatch: pytest.MonkeyPatch
):
    fake(monkeypatch, small=1000, large=1000)
    plan = prepare(CONFIG, decoder, MemoryBudget(1 << 40, 1000, None), root).plan
    prepare(CONFIG, decoder, MemoryBudget(plan.total_bytes, 1000, None), root)
    with pytest.raises(ConfigError, match="are planned, but there are"):
        prepare(CONFIG, decoder, MemoryBudget(plan.total_bytes - 1, 1000, None), root)


def test_beside_another_model_the_pool_is_what_was_asked_for_if_there_is_room(
    decoder: Decoder, root: Path, monkeypatch: pytest.MonkeyPatch
):
    fake(monkeypatch, small=1000, large=1000)
    alone = prepare(CONFIG, decoder, UNKNOWN, root).plan
    for budget in (UNKNOWN, MemoryBudget(1 << 40, 1000, None), gpu(1 << 40)):
        plan = prepare_beside(CONFIG, decoder, budget, root, least_model_len=640).plan
        assert dataclasses.replace(plan, budget=UNKNOWN) == alone


@pytest.mark.parametrize("missing_pages", [1, 35])  # of the pool; only the second shows at once
def test_beside_another_model_the_pool_is_as_large_as_programs_leave_room_for(
    decoder: Decoder, root: Path, monkeypatch: pytest.MonkeyPatch, missing_pages: int
):
    fake(monkeypatch, small=1000, large=20_000)
    whole = prepare(CONFIG, decoder, UNKNOWN, root).plan
    room = whole.total_bytes - missing_pages * whole.page_bytes
    calls: list[int | None] = []
    for name in ("make_ready", "measure"):
        monkeypatch.setattr(module, name, noted(calls, getattr(module, name)))
    plan = prepare_beside(
        CONFIG, decoder, MemoryBudget(room, 0, None), root, least_model_len=160
    ).plan
    assert whole.num_pages == 80
    assert plan.num_pages * 4 // 3 > 80 - missing_pages >= plan.num_pages >= 10
    assert plan.total_bytes <= room
    assert calls == [1, 1]  # one program at a time, and not more often than twice


def noted(calls: list[int | None], function: Any) -> Any:
    def called(*args: Any, num_threads: int | None = None, **fields: Any) -> Any:
        calls.append(num_threads)
        return function(*args, **fields)

    return called


def test_beside_another_model_on_a_gpu_the_pool_is_what_both_leave(
    decoder: Decoder, root: Path, monkeypatch: pytest.MonkeyPatch
):
    fake(monkeypatch, small=1000, large=20_000)
    total = 2 << 20
    first = prepare(replace(ON_GPU, max_num_seqs=1), decoder, gpu(total), root).plan
    left = gpu(total).beside(first.total_bytes)
    plan = prepare_beside(ON_GPU, decoder, left, root, least_model_len=640).plan
    assert plan.num_pages > 80
    probed = plan.programs_bytes // PROBE_MARGIN
    assert 0 <= total - first.total_bytes - plan.total_bytes <= probed + plan.page_bytes
    full = gpu(total).beside(total - 1000)
    with pytest.raises(ConfigError, match=r"but 1000 are left: \d+ are missing"):
        prepare_beside(ON_GPU, decoder, full, root, least_model_len=640)


FORMS = [
    "layered",
    "fused",
    pytest.param("default model", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
]


@pytest.fixture(scope="module", params=FORMS)
def form(
    request: pytest.FixtureRequest, decoder: Decoder, root: Path
) -> tuple[Decoder, ProgramSet, bool]:
    """A decoder with every program of serving, and whether these are fused."""
    if request.param == "default model":
        config = EngineConfig(show_progress=False)
        checkpoint = open_checkpoint(request.getfixturevalue("default_model"))
        checkpoint.close()
        decoder = decoder_for(checkpoint.config, dtype=default_dtype("auto"))
    else:
        config = replace(CONFIG, step_programs=request.param)
    return decoder, prepare(config, decoder, UNKNOWN, root), request.param == "fused"


Form = tuple[Decoder, ProgramSet, bool]


def is_writer(name: str) -> bool:
    return name.endswith((" layer", " step"))


def test_every_program_that_is_given_pages_aliases_all_of_them(form: Form):
    decoder, found, is_fused = form
    model, plan = decoder.config, found.plan
    writers = {n: m for n, m in found.programs.memory.items() if is_writer(n)}
    assert len(writers) == len(found.buckets.tokens) + len(found.buckets.rows)
    own = plan.pool_bytes if is_fused else plan.pool_bytes // model.num_hidden_layers
    for name, memory in writers.items():
        tokens = int(re.findall(r"=(\d+) ", name)[0])
        x_bytes = 0 if is_fused else tokens * model.hidden_size * 4  # donated, too
        assert memory.alias_bytes == own + x_bytes, name
        assert memory.output_bytes < own / 10, name


def test_no_program_of_serving_copies_pages(form: Form):
    """Of the pool's shape there are arguments, and what is scattered into their place."""
    decoder, found, _ = form
    shape = page_shape(
        decoder.config, num_pages=found.plan.num_pages, page_size=found.plan.page_size
    )
    spelled = rf"f32\[{','.join(map(str, shape))}\]"
    for name, program in found.programs.by_name.items():
        text = program.as_text()
        assert text is not None
        assert bool(re.search(spelled, text)) == is_writer(name), name
        made = set(re.findall(rf"= {spelled}\S* ([\w-]+)\(", text))
        assert not {op for op in made if op.startswith(("copy", "convert", "transpose"))}, name


@pytest.mark.parametrize("step_programs", ["layered", "fused"])
def test_what_programs_need_does_not_depend_on_the_number_of_pages(
    decoder: Decoder, root: Path, step_programs: Literal["layered", "fused"]
):
    """So that they can be asked before the pool's size is known."""
    config = replace(CONFIG, step_programs=step_programs)
    maker = _Maker(config, decoder, root, lambda name: None)
    buckets = maker._buckets(640)
    found: list[dict[str, tuple[int, int]]] = []
    for num_pages in (PROBE_PAGES, 80):
        cache = maker._cache(buckets, num_pages)
        memory = measure(maker._listed(buckets, num_pages).serving(), cache)
        found.append({name: (m.temp_bytes, m.output_bytes) for name, m in memory.items()})
    assert found[0] == found[1]
    assert all(temp > 1000 for name, (temp, _) in found[0].items() if is_writer(name))

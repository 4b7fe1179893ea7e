"""Everything that a compiled program depends on changes its key, and nothing else does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax
import jax
import jaxlib.version
import pytest

from checkpoints.formats import Quantization, WeightFormat
from jaxinfer.config import EngineConfig, replace
from jaxinfer.models.registry import decoder_for
from jaxinfer.runtime import program_key as module
from jaxinfer.runtime.memory_budget import MemoryBudget
from jaxinfer.runtime.memory_plan import default_dtype, plan_memory
from jaxinfer.runtime.program_key import program_key
from jaxinfer.runtime.program_set import _Maker
from tests.tiny import tiny_config, tiny_engine_config

DEVICE = jax.devices()[0]


def device(**changes: Any) -> Any:
    client = SimpleNamespace(platform_version=changes.pop("version", "v"))
    kind = {"platform": DEVICE.platform, "device_kind": DEVICE.device_kind, "client": client}
    return SimpleNamespace(**kind | changes)


def test_a_key_is_its_facts_in_order():
    assert program_key(("a", 1)) == program_key(["a", 1])
    keys = {program_key(facts) for facts in ((), ("a",), ("a", 1), (1, "a"), ("a1",), ("a", "1"))}
    assert len(keys) == 6
    assert all(len(key) == 24 for key in keys)


@pytest.mark.parametrize(
    ("target", "name", "value"),
    [
        (jax, "__version__", "9.9"),
        (jaxlib.version, "__version__", "9.9"),
        (flax, "__version__", "9.9"),
        (module, "_num_cores", lambda: 77),
        (module, "_cpu_features", lambda: "flags: none"),
        (module, "SOURCES", ("pallas_kernels/*.py",)),
    ],
    ids=["jax", "jaxlib", "flax", "cores", "cpu", "source"],
)
def test_a_key_changes_with_what_a_program_depends_on(
    target: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
):
    before = program_key(("fact",))
    monkeypatch.setattr(target, name, value)
    assert program_key(("fact",)) != before


@pytest.mark.parametrize(
    "changes",
    [{"platform": "gpu"}, {"device_kind": "NVIDIA H100"}, {"version": "CUDA 13"}],
    ids=["platform", "kind", "driver"],
)
def test_a_key_changes_with_the_device(changes: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module.jax, "devices", lambda: [device()])
    before = program_key(())
    monkeypatch.setattr(module.jax, "devices", lambda: [device(**changes)])
    assert program_key(()) != before


def test_a_key_changes_with_jaxs_settings_and_xlas_flags(monkeypatch: pytest.MonkeyPatch):
    before = program_key(())
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    flags = program_key(())
    with jax.default_matmul_precision("highest"):
        precision = program_key(())
    assert len({before, flags, precision}) == 3


def test_a_key_changes_with_every_byte_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "__file__", str(tmp_path / "jaxinfer/runtime/program_key.py"))
    keys: list[str] = []
    for pattern in module.SOURCES:
        file = tmp_path / pattern.replace("*", "x")
        file.parent.mkdir(parents=True, exist_ok=True)
        for content in ("a = 1", "a = 2"):
            file.write_text(content)
            keys.append(program_key(()))
    assert len(set(keys)) == 2 * len(module.SOURCES)


def key_of(
    config: EngineConfig,
    budget: MemoryBudget | None = None,
    quantization: Quantization | None = None,
    **model: Any,
) -> str:
    """The key that this start would use."""
    budget = budget or MemoryBudget(None, 0, None)
    decoder = decoder_for(
        tiny_config(**model),
        dtype=default_dtype(config.source.dtype),
        quantization=quantization,
    )
    maker = _Maker(config, decoder, Path("nowhere"), lambda name: None)
    plan = plan_memory(config, decoder, budget, 0)
    return maker._cache(maker._buckets(plan.max_model_len), plan.num_pages).folder.name


BASE = tiny_engine_config(Path("model"), Path("cache"))


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"page_size": 32},
        {"kv_cache_bytes": 1 << 18},
        {"max_num_seqs": 8},
        {"max_num_batched_tokens": 64},
        {"max_model_len": 128},
        {"step_programs": "fused"},
        {"kv_cache_dtype": "int8"},
    ],
    ids=str,
)
def test_a_key_changes_with_every_setting_that_shapes_programs(change: dict[str, Any]):
    assert key_of(replace(BASE, **change)) != key_of(BASE)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 3},
        {"show_progress": True},
        {"enable_prefix_caching": False},
        {"model": "elsewhere"},
        {"cache_dir": "elsewhere"},
        {"memory_utilization": 0.5},
    ],
    ids=str,
)
def test_a_key_does_not_change_with_any_other_setting(change: dict[str, Any]):
    assert key_of(replace(BASE, **change)) == key_of(BASE)


def test_a_key_does_not_change_with_the_memory_of_the_moment():
    """An image that is built on a small machine serves on a large one."""
    assert key_of(BASE, MemoryBudget(1 << 40, 1 << 20, None)) == key_of(BASE)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 32},
        {"intermediate_size": 96},
        {"num_hidden_layers": 3},
        {"num_attention_heads": 4},
        {"num_key_value_heads": 1},
        {"head_dim": 32},
        {"vocab_size": 300},
        {"max_position_embeddings": 512},
        {"rms_norm_eps": 1e-6},
        {"rope_theta": 5000.0},
        {"tie_word_embeddings": False},
        {"attention_bias": True},
        {"mlp_bias": True},
    ],
    ids=str,
)
def test_a_key_changes_with_the_models_shape(change: dict[str, Any]):
    assert key_of(BASE, **change) != key_of(BASE)


INT4 = WeightFormat(4, 32)
FORMATS = (
    None,
    Quantization(INT4),
    Quantization(INT4, head=None),
    Quantization(WeightFormat(4, 32, has_zero=True)),
    Quantization(WeightFormat(8, 32)),
    Quantization(WeightFormat(8, activations="int8")),
    Quantization(WeightFormat(8, activations="int8_static")),
    Quantization(INT4, exceptions=(("layers.1.mlp.up_proj", WeightFormat(8, 32)),)),
    Quantization(INT4, exceptions=(("layers.0.mlp.up_proj", WeightFormat(8, 32)),)),
)


def test_a_key_changes_with_every_format_and_where_it_is():
    keys = {key_of(BASE, quantization=kept) for kept in FORMATS}
    assert len(keys) == len(FORMATS)


def test_every_field_of_the_model_is_in_the_key():
    config = decoder_for(tiny_config(), dtype=default_dtype("float32")).config
    assert all(f"{field.name}=" in repr(config) for field in dataclasses.fields(config))

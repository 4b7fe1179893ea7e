"""Whole steps of a 7B-shaped model (Llama 3 8B's shape) and of models that have other parts, as the
engine would compile them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import jax
import jax.numpy as jnp

from bench.aot.compiler import Compiler
from checkpoints.formats import Quantization, WeightFormat
from jaxinfer.models.registry import decoder_for
from jaxinfer.runtime.aot import Program
from jaxinfer.runtime.kv_cache import page_shape
from jaxinfer.runtime.program_list import ProgramList, sample_name, step_name
from jaxinfer.runtime.sampling import Variant
from jaxinfer.runtime.steps import Steps
from jaxinfer.scheduling.buckets import Buckets
from pallas_kernels.backend import Backend

NUM_LAYERS = 32
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA = "llama"
MODELS = {
    LLAMA: CONFIG,
    "gemma2": {  # 2B: caps of scores and logits, and a window in every other layer
        "architectures": ["Gemma2ForCausalLM"],
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
    "qwen3-moe": {  # 30B-A3B: 8 of 128 experts
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 8192,
    },
}
FORMATS = {
    "bf16": None,
    "int8": Quantization(WeightFormat(8, 128), head=None),
    "int4": Quantization(WeightFormat(4, 128), head=None),
    "int8-a8": Quantization(WeightFormat(8, activations="int8")),
    "mixed": Quantization(
        WeightFormat(4, 128, has_zero=True),
        exceptions=(
            ("layers.0.mlp.down_proj", WeightFormat(8, has_zero=True)),
            ("layers.0.self_attn.k_proj", None),
            ("layers.1.mlp.up_proj", WeightFormat(8, activations="int8_static")),
            ("layers.1.self_attn.o_proj", WeightFormat(8, 64)),
        ),
    ),
}
"""Of the products inside the layers, in the last two also of embedding and head."""
ROWS, TOKENS = 64, 512  # of the largest decode and prefill
PAGE_SIZE, NUM_PAGES, CONTEXT = 64, 1024, 8192
"""A pool of 8 GiB in 32 layers. Nothing that is read here depends on the number of pages, but the
pool's own bytes (tests/runtime/test_program_set.py)."""


class ModelPrograms:
    """The programs of the model on one GPU.

    Args:
        num_layers: 32 is the model; fewer compile faster.
        weights: a name of FORMATS; it begins the names of the steps.
        model: a name of MODELS; one that is not the first is named before that.
    """

    def __init__(
        self,
        compiler: Compiler,
        *,
        num_layers: int = NUM_LAYERS,
        weights: str = "bf16",
        model: str = LLAMA,
    ):
        self.weights = weights
        self._prefix = weights if model == LLAMA else f"{model} {weights}"
        self.decoder = decoder_for(
            MODELS[model] | {"num_hidden_layers": num_layers},
            dtype=jnp.dtype("bfloat16"),
            backend=Backend("pallas", compiler.target.gpu),
            quantization=FORMATS[weights],
        )
        self.buckets = Buckets.for_limits(
            max_num_seqs=ROWS,
            max_num_batched_tokens=TOKENS,
            max_model_len=CONTEXT,
            page_size=PAGE_SIZE,
        )
        self._listed = ProgramList(
            self.decoder,
            Steps(self.decoder, max_rows=self.buckets.max_rows),
            self.buckets,
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            is_fused=True,
            lower=compiler.lower,
        )
        self._by_name = {program.name: program for program in self._listed.serving()}

    def decode(self, rows: int = ROWS) -> Program:
        return self._named(step_name("decode", rows, "step"))

    def prefill(self, tokens: int = TOKENS) -> Program:
        return self._named(step_name("prefill", tokens, "step"))

    def samplers(self, rows: int = ROWS) -> list[Program]:
        """Head and draw, every variant: the same in every format of weights."""
        return [self._by_name[sample_name(variant, rows)] for variant in get_args(Variant)]

    def largest(self) -> list[Program]:
        """One of each kind, of the largest bucket: what the programs' memory is planned by."""
        rows = self.buckets.max_rows
        return [self.prefill(self.buckets.max_tokens), self.decode(rows), *self.samplers(rows)]

    def batch_bytes(self) -> int:
        """Of the arrays that the largest step brings along."""
        return self._listed.batch_bytes()

    def pool_bytes(self) -> int:
        leaf = jax.ShapeDtypeStruct(self.pool_shape(), self.decoder.dtype)
        return 2 * self.decoder.config.num_hidden_layers * leaf.size * leaf.dtype.itemsize

    def pool_shape(self) -> tuple[int, ...]:
        """Of one layer's keys or values."""
        return page_shape(self.decoder.config, num_pages=NUM_PAGES, page_size=PAGE_SIZE)

    def weight_shapes(self) -> set[tuple[int, ...]]:
        """Of the products' weights and the embedding."""
        leaves = jax.tree.leaves(self.decoder.param_shapes)
        return {leaf.shape for leaf in leaves if len(leaf.shape) > 1}

    def _named(self, name: str) -> Program:
        return dataclasses.replace(self._by_name[name], name=f"{self._prefix} {name}")

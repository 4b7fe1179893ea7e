"""A decoder's shape, in Hugging Face's words where there is one form for all.

No JAX here. Who reads it out of a config.json: family.py, and each file of families/.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Activation = Literal["silu", "gelu_tanh"]
LayerType = Literal["full_attention", "sliding_attention"]
LAYER_TYPES: tuple[LayerType, ...] = get_args(LayerType)
FULL, SLIDING = LAYER_TYPES


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context."""

    rope_type: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position_embeddings: int = 8192  # llama3 and yarn
    low_freq_factor: float = 1.0  # llama3 only, as the next
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn only, as all that follow
    beta_slow: float = 1.0
    attention_factor: float = 1.0  # multiplies cosines and sines
    is_truncated: bool = True  # the band between ends at whole pairs


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What a layer may have that another of its model has not."""

    attention: LayerType = FULL
    has_rope: bool = True  # False: its queries and keys are not turned
    is_sparse: bool = False  # a mixture of experts stands in place of its MLP


@dataclass(frozen=True, slots=True)
class Experts:
    """Of a sparse layer's mixture."""

    count: int
    per_token: int  # that a token's outputs are of
    intermediate_size: int  # of each
    normalizes: bool  # a token's weights are made to sum to 1
    shared_intermediate_size: int | None = None  # of one that all tokens have; None: none


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Keys as in a Hugging Face config.json, where that has them for all families."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    norm_adds_one: bool = False  # norms multiply by 1 + weight
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_local_base_freq: float | None = None  # rope_theta of sliding layers, which then have no
    # scaling; None: that of all
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    hidden_act: Activation = "silu"
    qk_norm: Literal["head", "whole"] | None = None  # queries and keys are normed before they turn:
    # each head by itself, or all heads as one vector
    attention_multiplier: float | None = None  # of q·k; None: head_dim**-0.5
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what attention and MLP add
    logits_scaling: float = 1.0  # logits are divided by it
    layer_kinds: tuple[LayerKind, ...] = ()  # of each layer; empty: all are LayerKind()
    experts: Experts | None = None  # of sparse layers
    sliding_window: int | None = None  # tokens that a sliding layer sees, the newest included

    @property
    def attention_scale(self) -> float:
        """Multiplies q·k."""
        return self.attention_multiplier or self.head_dim**-0.5

    def layer_kind(self, layer: int) -> LayerKind:
        return self.layer_kinds[layer] if self.layer_kinds else LayerKind()

    def window_of(self, layer_type: LayerType) -> int | None:
        """Tokens that a query of such a layer sees, itself included; None: all before it."""
        return self.sliding_window if layer_type == SLIDING else None

    @property
    def mlp_sizes(self) -> tuple[int, ...]:
        """Intermediate sizes of all MLPs that layers have."""
        kinds = {kind.is_sparse for kind in self.layer_kinds or (LayerKind(),)}
        dense = (self.intermediate_size,) if False in kinds else ()
        if self.experts is None:
            return dense
        shared = self.experts.shared_intermediate_size
        return (*dense, self.experts.intermediate_size, *(() if shared is None else (shared,)))

    @property
    def has_local_rope(self) -> bool:
        """Whether sliding layers have rotary tables of their own."""
        return self.rope_local_base_freq is not None

    @property
    def rope_types(self) -> tuple[LayerType, ...]:
        """Layer types of which there are rotary tables; one alone serves all layers."""
        return LAYER_TYPES if self.has_local_rope else (FULL,)

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that one token keeps in the KV pool, all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

"""Where products of a layer take their inputs, and where a scaling of these folds, per family.

Channel k of an input is divided by s[k], and column k of the weights multiplied: the same sums of
other numbers (SmoothQuant, arXiv:2211.10438; AWQ, arXiv:2306.00978). The division folds into the
parameters that make the input, exactly, or isn't done. Data only; folding is in layer_weights.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Fold:
    """The parameters that take a division.

    module: by its dotted name in the layer.
    form: norm: its weight; norm_plus_one: the same where the norm multiplies by 1 + weight; rows:
        those of a product, and its bias.
    """

    module: str
    form: Literal["norm", "norm_plus_one", "rows"]


@dataclass(frozen=True, slots=True)
class Site:
    """One input and the products that it meets."""

    products: tuple[str, ...]  # by their dotted names in the layer, in the order of computing
    fold: Fold | None  # None: it can't be scaled
    is_by_heads: bool = False  # the input is of query heads [H * D]; those of a KV head share
    # scales

    @property
    def name(self) -> str:
        """For people: that of its first product."""
        return self.products[0]


@dataclass(frozen=True, slots=True)
class KeyRows:
    """Keys that are rows of a product up to their rotation: scaled there, queries against it."""

    queries: str
    keys: str


@dataclass(frozen=True, slots=True)
class LayerSites:
    """Of one layer; sites in the order of computing."""

    sites: tuple[Site, ...]
    key_rows: KeyRows | None
    unseen: tuple[str, ...] = ()  # products that are rounded to the nearest without looking at
    # their inputs, where the layer has them: an expert meets only the tokens that choose it


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_OUT = Site(("self_attn.o_proj",), Fold("self_attn.v_proj", "rows"), is_by_heads=True)
_DOWN = Site(("mlp.down_proj",), Fold("mlp.up_proj", "rows"))

LLAMA = LayerSites(
    (
        Site(_QKV, Fold("input_layernorm", "norm")),
        _OUT,
        Site(_GATE_UP, Fold("post_attention_layernorm", "norm")),
        _DOWN,
    ),
    KeyRows("self_attn.q_proj", "self_attn.k_proj"),
)
GEMMA3 = LayerSites(
    (
        Site(_QKV, Fold("input_layernorm", "norm_plus_one")),
        _OUT,
        Site(_GATE_UP, Fold("pre_feedforward_layernorm", "norm_plus_one")),
        _DOWN,
    ),
    None,  # keys are normalized after the product
)

GEMMA2 = replace(GEMMA3, key_rows=LLAMA.key_rows)
QWEN3 = replace(LLAMA, key_rows=None)
MIXTURE = LayerSites(
    LLAMA.sites[:2],
    LLAMA.key_rows,
    tuple(
        f"{mlp}.{product}_proj"
        for mlp in ("mlp.experts", "mlp.shared_expert", "mlp")
        for product in ("gate", "up", "down")
    ),
)
OLMO2 = LayerSites((Site(_QKV, None), _OUT, Site(_GATE_UP, None), _DOWN), None)  # no norm before

SITES = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": QWEN3,
    "GraniteForCausalLM": LLAMA,
    "SmolLM3ForCausalLM": LLAMA,
    "Gemma2ForCausalLM": GEMMA2,
    "Gemma3ForCausalLM": GEMMA3,
    "MixtralForCausalLM": MIXTURE,
    "Olmo2ForCausalLM": OLMO2,
    "OlmoeForCausalLM": replace(MIXTURE, key_rows=None),
    "Qwen2MoeForCausalLM": MIXTURE,
    "Qwen3MoeForCausalLM": replace(MIXTURE, key_rows=None),
}
"""By the architecture in config.json, as jaxinfer/models/registry.py's FAMILIES."""

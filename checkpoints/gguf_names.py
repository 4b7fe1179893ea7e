"""The architectures that GGUF files may have, and what their tensors are called here.

One `Architecture` per value of general.architecture; another one is one more entry of the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError

_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SANDWICH_PARTS = _LAYER_PARTS | _POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GLOBAL_PARTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ONE_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")  # before April 2024


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one general.architecture maps to Hugging Face's names."""

    name: str  # general.architecture, and the prefix of its metadata keys
    model_class: str
    model_type: str
    is_permuted: bool = False  # rows of q and k are stored for the interleaved rotary form
    norms_hold_one: bool = False  # stored as 1 + weight
    layer_parts: Mapping[str, str] = field(default_factory=lambda: _LAYER_PARTS)

    def hf_name(self, name: str) -> str:
        """Ours for a tensor of the file; a name unknown here stays, so that the loader reports it.

        Those of one expert alone are left to layout.py.
        """
        layer, expert = _LAYER_NAME.fullmatch(name), _ONE_EXPERT.fullmatch(name)
        if layer and layer[2] in self.layer_parts:
            return f"model.layers.{layer[1]}.{self.layer_parts[layer[2]]}.{layer[3]}"
        if expert and "ffn_gate_exps" in self.layer_parts:
            return f"model.layers.{expert[1]}.mlp.experts.{expert[3]}.{expert[2]}_proj.weight"
        part, _, kind = name.rpartition(".")
        if part in _GLOBAL_PARTS and kind in ("weight", "bias"):
            return f"{_GLOBAL_PARTS[part]}.{kind}"
        return name

    def permuted_heads(self, name: str, config: Mapping[str, Any]) -> tuple[int, ...]:
        """Heads of each product in the tensor whose rows must be put back in order, from the first
        row on; () if all rows are as they should be.
        """
        layer = _LAYER_NAME.fullmatch(name)
        if not self.is_permuted or not layer:
            return ()
        q, k = config["num_attention_heads"], config["num_key_value_heads"]
        return {"attn_q": (q,), "attn_k": (k,), "attn_qkv": (q, k)}.get(layer[2], ())

    def is_offset(self, name: str) -> bool:
        """Whether the file holds 1 + the weight."""
        return self.norms_hold_one and name.endswith("norm.weight")


ARCHITECTURES = (
    Architecture(
        "llama",
        "LlamaForCausalLM",
        "llama",
        is_permuted=True,
        layer_parts=_LAYER_PARTS | _EXPERTS,
    ),
    Architecture("qwen2", "Qwen2ForCausalLM", "qwen2"),
    Architecture("qwen3", "Qwen3ForCausalLM", "qwen3", layer_parts=_LAYER_PARTS | _QK_NORMS),
    Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        "gemma2",
        norms_hold_one=True,
        layer_parts=_SANDWICH_PARTS,
    ),
    Architecture(
        "gemma3",
        "Gemma3ForCausalLM",
        "gemma3_text",
        norms_hold_one=True,
        layer_parts=_SANDWICH_PARTS | _QK_NORMS,
    ),
    Architecture(
        "phi3",
        "Phi3ForCausalLM",
        "phi3",
        layer_parts=_LAYER_PARTS | {"ffn_up": "mlp.gate_up_proj"},
    ),
    Architecture("smollm3", "SmolLM3ForCausalLM", "smollm3", is_permuted=True),
    Architecture(
        "olmo2",
        "Olmo2ForCausalLM",
        "olmo2",
        layer_parts=_LAYER_PARTS | _POST_NORMS | _QK_NORMS,
    ),
    Architecture("granite", "GraniteForCausalLM", "granite", is_permuted=True),
    Architecture(
        "qwen2moe",
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        layer_parts=_LAYER_PARTS | _EXPERTS | _SHARED_EXPERT,
    ),
    Architecture(
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        layer_parts=_LAYER_PARTS | _EXPERTS | _QK_NORMS,
    ),
    Architecture(
        "olmoe", "OlmoeForCausalLM", "olmoe", layer_parts=_LAYER_PARTS | _EXPERTS | _QK_NORMS
    ),
)


def architecture_of(path: Path, metadata: Mapping[str, Any]) -> Architecture:
    """The table's entry for general.architecture. Raises: CheckpointError if there is none."""
    name = metadata.get("general.architecture")
    for architecture in ARCHITECTURES:
        if isinstance(name, str) and architecture.name == name:
            return architecture
    known = ", ".join(architecture.name for architecture in ARCHITECTURES)
    raise CheckpointError(
        f"{path}: expected general.architecture to be {known}, found {name!r:.60}"
    )

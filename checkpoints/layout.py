"""Which tensors of a Hugging Face checkpoint models here know under other names.

Where a family fuses products (Phi-3's `qkv_proj` and `gate_up_proj`), they are cut; where it has a
tensor for each expert, all experts' rows are laid one under the other; a new form of a checkpoint
is one more function here. Knows names and config keys, no bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from checkpoints.arranged import ArrangedSource, Cut, Joined
from checkpoints.source import TensorSource

Parts = dict[str, Cut | Joined]

_EXPERT = re.compile(
    r"(.*\.)(?:mlp|block_sparse_moe)\.experts\.(\d{1,5})\.(\w+)\.(weight|q|scale|zero)"
)
_MIXTRAL_ROUTER = re.compile(r"(.*\.)block_sparse_moe\.gate\.weight")
_MIXTRAL_PRODUCTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_FUSED = re.compile(
    r"(.*\.)(self_attn\.qkv_proj|mlp\.gate_up_proj)\.(weight|bias|q|scale|zero|order)"
)


def arranged(source: TensorSource, config: Mapping[str, Any], file: str) -> TensorSource:
    """The source itself if all its names are ours already.

    Raises: CheckpointError for tensors that do not fit together.
    """
    names = source.names()
    parts = _unfused(names, config) | _joined_experts(names)
    return ArrangedSource(source, parts, file=file) if parts else source


def _unfused(names: Sequence[str], config: Mapping[str, Any]) -> Parts:
    """A config that is not sound is left to the model: the tensors then stay as they are."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    ffn = config.get("intermediate_size")
    if not (_is_size(heads) and _is_size(hidden) and _is_size(ffn)):
        return {}
    kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    kv_heads = heads if kv_heads is None else kv_heads
    head_dim = hidden // heads if head_dim is None else head_dim
    if not (_is_size(kv_heads) and _is_size(head_dim)):
        return {}
    q, kv = heads * head_dim, kv_heads * head_dim
    sizes = {
        "self_attn.qkv_proj": {
            "self_attn.q_proj": q,
            "self_attn.k_proj": kv,
            "self_attn.v_proj": kv,
        },
        "mlp.gate_up_proj": {"mlp.gate_proj": ffn, "mlp.up_proj": ffn},
    }
    parts: Parts = {}
    for name in names:
        found = _FUSED.fullmatch(name)
        if found is None:
            continue
        start = 0
        for product, size in sizes[found[2]].items():
            is_shared = found[3] == "order"  # of the inputs, which all of them have
            cut = Joined((name,)) if is_shared else Cut(name, start, start + size)
            parts[f"{found[1]}{product}.{found[3]}"] = cut
            start += size
    return parts


def _joined_experts(names: Sequence[str]) -> Parts:
    """Where one of them is missing between others, all stay as they are: the loader names it."""
    parts: Parts = {}
    found: dict[str, dict[int, str]] = {}
    for name in names:
        if router := _MIXTRAL_ROUTER.fullmatch(name):
            parts[f"{router[1]}mlp.gate.weight"] = Joined((name,))
        elif expert := _EXPERT.fullmatch(name):
            product = _MIXTRAL_PRODUCTS.get(expert[3], expert[3])
            ours = f"{expert[1]}mlp.experts.{product}.{expert[4]}"
            found.setdefault(ours, {})[int(expert[2])] = name
    for ours, of in found.items():
        if max(of) == len(of) - 1:
            parts[ours] = Joined(tuple(of[index] for index in range(len(of))))
    return parts


def _is_size(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0

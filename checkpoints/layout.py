"""Which tensors of a Hugging Face checkpoint models here know under other names.

Where a family fuses products (Phi-3's `qkv_proj` and `gate_up_proj`), they are cut; a new form of a
checkpoint is one more function here. Knows names and config keys, no bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from checkpoints.arranged import ArrangedSource, Cut, Joined
from checkpoints.source import TensorSource

Parts = dict[str, Cut | Joined]

_FUSED = re.compile(r"(.*\.)(self_attn\.qkv_proj|mlp\.gate_up_proj)\.(weight|bias|q|scale|zero)")


def arranged(source: TensorSource, config: Mapping[str, Any], file: str) -> TensorSource:
    """The source itself if all its names are ours already.

    Raises: CheckpointError for tensors that do not fit together.
    """
    names = source.names()
    parts = _unfused(names, config)
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
            parts[f"{found[1]}{product}.{found[3]}"] = Cut(name, start, start + size)
            start += size
    return parts


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0

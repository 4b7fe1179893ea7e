"""OLMo 2 (arXiv:2501.00656): norms stand after attention and MLP, and all queries of a token are
normed as one vector, as all keys are.
"""

from __future__ import annotations

from typing import Any

from jaxinfer.models.decoder_layer import PostNormLayer
from jaxinfer.models.family import Family
from jaxinfer.models.hf_keys import HfKeys


def _fields(keys: HfKeys) -> dict[str, Any]:
    return {"qk_norm": "whole"}


OLMO2 = Family(PostNormLayer, _fields, {"rms_norm_eps": 1e-5})

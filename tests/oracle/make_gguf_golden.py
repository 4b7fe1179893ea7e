"""Writes tests/data/gguf/: a tiny model of each architecture as llama.cpp's converter writes it.

    python -m tests.oracle.make_gguf_golden LLAMA_CPP

Run from the repository root, with the `oracle` extra; made once and committed. LLAMA_CPP is a
checkout of llama.cpp, whose converter and gguf package are used; of its commands only the one that
writes the tokenizer is left out. Written apart from the product on purpose: imports nothing of
jaxinfer or checkpoints.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.oracle.gguf_models import CONFIGS, tensors

FOLDER = Path(__file__).parents[1] / "data" / "gguf"
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def as_published(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors under the names that the family's own checkpoints have."""
    found: dict[str, np.ndarray] = {}
    for name, tensor in tensors(config).items():
        if ".experts." not in name:
            found[name] = tensor
            continue
        layer, product = name.split("mlp.experts.")
        count = config.get("num_experts") or config["num_local_experts"]
        for i, part in enumerate(np.split(tensor, count)):
            found[f"{layer}mlp.experts.{i}.{product}"] = part
    if config["model_type"] == "mixtral":
        found = {_mixtral(name): tensor for name, tensor in found.items()}
    if config["model_type"] == "phi3":
        found = _fused(found)
    return {name: np.ascontiguousarray(tensor) for name, tensor in found.items()}


def _mixtral(name: str) -> str:
    name = name.replace(".mlp.", ".block_sparse_moe.")
    for product, theirs in MIXTRAL.items():
        name = name.replace(product, theirs)
    return name


def _fused(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    pieces = {
        "self_attn.q_proj": "self_attn.qkv_proj",
        "self_attn.k_proj": "self_attn.qkv_proj",
        "self_attn.v_proj": "self_attn.qkv_proj",
        "mlp.gate_proj": "mlp.gate_up_proj",
        "mlp.up_proj": "mlp.gate_up_proj",
    }
    for name, tensor in found.items():
        product = next((x for x in pieces if x in name), None)
        theirs = name if product is None else name.replace(product, pieces[product])
        out[theirs] = np.concatenate([out[theirs], tensor]) if theirs in out else tensor
    return out


def write_folder(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )
    save_file(as_published(config), folder / "model.safetensors", {"format": "pt"})
    # Gemma 3's converter counts the tokens, to leave out rows beyond them.
    vocab = {str(i): i for i in range(config["vocab_size"])}
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": vocab}, "added_tokens": []})
    )


def convert(name: str, config: dict[str, Any]) -> None:
    """Without a vocabulary, which is the same for all architectures."""
    import conversion
    import gguf
    import torch

    with tempfile.TemporaryDirectory() as temporary, torch.inference_mode():
        folder = Path(temporary) / name
        write_folder(folder, config)
        found: Any = conversion.get_model_class(config["architectures"][0], mmproj=False)
        model = found(
            folder,
            gguf.LlamaFileType.MOSTLY_BF16,
            FOLDER / f"{name}.gguf",
            fuse_qkv="fused" in name,
        )
        model.set_vocab = lambda: None
        model.write()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Write tiny GGUF files with llama.cpp's converter."
    )
    parser.add_argument("llama_cpp", type=Path)
    args = parser.parse_args(argv)
    sys.path[:0] = [str(args.llama_cpp), str(args.llama_cpp / "gguf-py")]
    FOLDER.mkdir(exist_ok=True)
    for name, config in CONFIGS.items():
        convert(name, config)
    total = sum(file.stat().st_size for file in FOLDER.iterdir())
    print(f"{FOLDER}: {len(CONFIGS)} files, {total} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

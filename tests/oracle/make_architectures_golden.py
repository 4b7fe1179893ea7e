"""Writes tests/data/architectures.json: what transformers says of a tiny model of each family.

    python -m tests.oracle.make_architectures_golden

Run from the repository root, with the `oracle` extra; made once and committed.
"""

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from tests.oracle.architectures import CASES, SHOWN, config_of, tensors_of, token_ids

GOLDEN = Path(__file__).parents[1] / "data" / "architectures.json"
PACKAGES = ("torch", "transformers", "numpy")


def weights_hash(case: str) -> str:
    """So that another random generator is not taken for a wrong model."""
    digest = hashlib.sha256()
    for _, tensor in sorted(tensors_of(case).items()):
        digest.update(np.ascontiguousarray(tensor).tobytes())
    return digest.hexdigest()


def loaded(case: str) -> Any:
    """The model, out of a folder as anyone would have it."""
    config = {key: value for key, value in config_of(case).items() if value is not None}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config | {"pad_token_id": 0}))
        save_file(tensors_of(case), Path(folder) / "model.safetensors", metadata={"format": "pt"})
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            attn_implementation="eager",
            experts_implementation="eager",
            dtype=torch.float32,
            output_loading_info=True,
        )
    assert not any(found.values()), found
    return model


@torch.inference_mode()
def logits(case: str, *, num_first: int | None = None) -> np.ndarray:
    """float32[SHOWN, V], in one pass without a cache.

    num_first: tokens of a first pass; the others come one by one, with a cache.
    """
    model = loaded(case).eval()
    ids = torch.tensor([token_ids(case)])
    if num_first is None:
        return model(ids, use_cache=False).logits[0][list(SHOWN)].numpy()
    parts, cache = [], None
    for part in (ids[:, :num_first], *ids[:, num_first:].split(1, dim=1)):
        out = model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits[0])
    return torch.cat(parts)[list(SHOWN)].numpy()


def entry(case: str) -> dict[str, Any]:
    rows = [[float(f"{value:.7g}") for value in row] for row in logits(case).tolist()]
    return {"case": case, "weights": weights_hash(case), "logits": rows}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Write the golden file of the families.")
    parser.add_argument("--out", type=Path, default=GOLDEN, help="default: %(default)s")
    args = parser.parse_args(argv)
    about = {
        "made_by": "python -m tests.oracle.make_architectures_golden",
        "date": datetime.date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }
    golden = {"about": about, "models": [entry(case) for case in CASES]}
    lines = ",\n".join(json.dumps(model) for model in golden["models"])
    args.out.write_text(f'{{"about": {json.dumps(about)}, "models": [\n{lines}\n]}}\n')
    print(f"{args.out}: {args.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

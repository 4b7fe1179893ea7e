"""Writes tests/data/ropes.json: the inverse frequencies and attention factors of transformers.

    python -m tests.oracle.make_ropes_golden

Run from the repository root, with the `oracle` extra; made once and committed.
"""

import argparse
import datetime
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from tests.oracle.ropes import HEAD_DIM, LONGEST, MAX_POSITIONS, PARTS, SCALINGS, THETA, scaling

GOLDEN = Path(__file__).parents[1] / "data" / "ropes.json"
PACKAGES = ("torch", "transformers")


def entry(name: str, part: float) -> dict[str, Any]:
    own = scaling(name, part)
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=own | {"rope_theta": THETA, "partial_rotary_factor": part},
    )
    plain: Any = Phi3RotaryEmbedding.compute_default_rope_parameters  # Llama's turns whole heads
    frequencies, factor = ROPE_INIT_FUNCTIONS.get(own["rope_type"], plain)(config, seq_len=LONGEST)
    shown = [float(f"{value:.8g}") for value in frequencies.tolist()]
    return {"scaling": name, "part": part, "frequencies": shown, "attention_factor": factor}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Write the golden file of rotary scalings.")
    parser.add_argument("--out", type=Path, default=GOLDEN, help="default: %(default)s")
    args = parser.parse_args(argv)
    about = {
        "made_by": "python -m tests.oracle.make_ropes_golden",
        "date": datetime.date.today().isoformat(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }
    entries = [entry(name, part) for name in SCALINGS for part in PARTS]
    lines = ",\n".join(map(json.dumps, entries))
    args.out.write_text(f'{{"about": {json.dumps(about)}, "ropes": [\n{lines}\n]}}\n')
    print(f"{args.out}: {args.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

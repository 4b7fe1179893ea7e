"""Writes tests/data/smollm2_greedy.json: what the reference says about SmolLM2-135M-Instruct.

    python -m tests.oracle.make_golden SmolLM2-135M-Instruct.Q4_1.gguf

Run from the repository root, with the `oracle` extra. The file is made once and committed, so that
comparing the product with it needs neither torch nor transformers; test_oracle.py checks that it
is still what the reference says. Imports nothing of jaxinfer or checkpoints.
"""

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from typing import Any

from tests.oracle.prompts import PROMPTS, SCORED_TEXTS, Prompt, fit
from tests.oracle.reference import Reference
from tests.oracle.strings import STRINGS

GOLDEN = Path(__file__).parents[1] / "data" / "smollm2_greedy.json"
NUM_NEW = 64
PACKAGES = ("torch", "transformers", "tokenizers", "gguf", "numpy")


def rounded(values: list[float]) -> list[float]:
    """To 5 significant digits, which is finer than two float32 implementations agree."""
    return [float(f"{value:.5g}") for value in values]


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def about(path: Path) -> dict[str, Any]:
    return {
        "made_by": "python -m tests.oracle.make_golden",
        "date": datetime.date.today().isoformat(),
        "model": path.name,
        "sha256": sha256(path),
        "weights": "dequantized to float32, computed in float32 on a CPU, eager attention",
        "num_new": NUM_NEW,
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
    }


def continued(reference: Reference, prompt: Prompt) -> dict[str, Any]:
    text, prompt_ids = fit(prompt, reference.encode, reference.decode)
    answer = reference.greedy(prompt_ids, NUM_NEW)
    return {
        "name": prompt.name,
        "text": text,
        "prompt_ids": prompt_ids,
        "output_ids": answer.token_ids,
        "second_ids": answer.second_ids,
        "margins": rounded(answer.margins),
        "logprobs": rounded(answer.logprobs),
    }


def scored(reference: Reference, text: str) -> dict[str, Any]:
    token_ids = reference.encode(text)
    logprobs = reference.score(token_ids)
    return {
        "text": text,
        "token_ids": token_ids,
        "mean_nll": rounded([-logprobs.mean()])[0],
        "logprobs": rounded(logprobs.tolist()),
    }


def tokenized(reference: Reference, text: str) -> dict[str, Any]:
    """The ids with control tokens recognized; `plain_ids` without, where that is different.

    `decoded` is there where the ids do not decode to the text, since some bytes have no token.
    """
    token_ids = reference.encode(text)
    plain_ids = reference.encode(text, control_tokens=False)
    decoded = reference.decode(token_ids)
    return {
        "text": text,
        "token_ids": token_ids,
        **({"plain_ids": plain_ids} if plain_ids != token_ids else {}),
        **({"decoded": decoded} if decoded != text else {}),
    }


def write(path: Path, golden: dict[str, Any]) -> None:
    """Compact JSON, one entry of a list on a line, so that a diff shows which entries changed."""

    def compact(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    sections = []
    for name, value in golden.items():
        entries = ",\n".join(map(compact, value)) if isinstance(value, list) else ""
        sections.append(f'"{name}":' + (f"[\n{entries}\n]" if entries else compact(value)))
    path.write_text("{" + ",\n".join(sections) + "}\n", encoding="utf-8")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Write the golden file of SmolLM2-135M-Instruct.")
    parser.add_argument("model", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--out", type=Path, default=GOLDEN, help="default: %(default)s")
    args = parser.parse_args(argv)
    reference = Reference(args.model)
    prompts = []
    for prompt in PROMPTS:
        prompts.append(continued(reference, prompt))
        least = min(prompts[-1]["margins"])
        print(f"{prompt.name}: {prompt.num_tokens} tokens, least margin {least}", flush=True)
    golden = {
        "about": about(args.model),
        "prompts": prompts,
        "scored": [scored(reference, text) for text in SCORED_TEXTS],
        "tokenizer": [tokenized(reference, text) for text in STRINGS],
    }
    write(args.out, golden)
    print(f"{args.out}: {args.out.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
